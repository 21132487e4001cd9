"""Chapter 12: the live cluster beside the simulator."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import pandas as pd

from mooncake_lab.batching import SarathiServe
from mooncake_lab.book.chapters.live.requests import REPETITION, checked, side_by_side, slowed
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import LoadBalance, PlacementPolicy, decide, named_placement
from mooncake_lab.core import Record, TracedRequest, check_scale, sum_in_order
from mooncake_lab.metrics import ttft_s
from mooncake_lab.perf import LatencyModel
from mooncake_lab.perf.calibration import LogCalibration, model_from_log
from mooncake_lab.serving import LiveCluster, LiveOptions, Pacer, WorkerProcesses
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import Trace, load, with_poisson_arrivals
from mooncake_lab.workload.transforms import scaled_down

CLUSTERS: Final = {
    "1P+1D": (1, 1, 0),
    "2P+1D": (2, 1, 0),
    "1P+2D": (1, 2, 0),
    "2 coupled": (0, 0, 2),
    "1 coupled": (0, 0, 1),
}
"""Prefill, decode and coupled workers by the name of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Slices of a scaled-down trace, and the clusters that serve them, live and simulated."""

    workload: str = "toolagent"
    divide: int = 16
    """Divisor of the lengths and of the block size."""
    most_tokens: int = 1024
    """Longer requests are left out."""
    requests: int = 24
    """Requests per run; calibration uses its own, which come earlier in the trace."""
    model: str = "random:lab-tiny"
    device: str = "cpu"
    """On auto, workers take the machine's GPUs in turn."""
    backend: str = "dense"
    dtype: str | None = None
    chunk_tokens: int = 256
    light: float = 0.3
    """Work that arrives, as a share of what one prefill worker can do."""
    overloaded: float = 6.0
    clusters: tuple[str, ...] = ("1P+1D", "2P+1D", "1P+2D", "2 coupled")
    placements: tuple[str, ...] = ("load_balance", "random")
    """Tried on an overloaded 2P+1D besides the default."""
    beat: float = 3.0
    """Seconds that the metronome allots for each second that this machine needs to compute."""
    seed: int = 0

    def spec(self, cluster: str = "1P+1D", placement: str | None = None, **changes: Any) -> ClusterSpec:
        """A cluster of this study, live or simulated."""
        prefill, decode, coupled = CLUSTERS[cluster]
        asked: dict[str, Any] = {"block_size_tokens": self.trace().block_size_tokens}
        if placement is not None:
            asked["placement"] = named_placement(placement, self.seed)
        if not coupled:
            asked |= {"prefill_nodes": prefill, "decode_nodes": decode, "chunk_tokens": self.chunk_tokens}
            return ClusterSpec.small(**asked | changes)
        asked |= {
            "nodes": coupled,
            "batching": SarathiServe(chunk_tokens=self.chunk_tokens),
            "max_request_tokens": 2 * self.most_tokens,
            "placement": asked.get("placement", LoadBalance()),
        }
        return ClusterSpec.small_coupled(**asked | changes)

    def options(self, **changes: Any) -> LiveOptions:
        """What the live clusters of this study run."""
        asked: dict[str, Any] = {
            "model": self.model,
            "seed": self.seed,
            "device": self.device,
            "backend": self.backend,
            "dtype": self.dtype,
            "max_model_len": 2 * self.most_tokens,
            "spares": 0,  # nothing may compute beside what is measured
        }
        return LiveOptions(**asked | changes)

    def trace(self) -> Trace:
        """The scaled-down trace, lengths divided and sharing kept."""
        return _scaled(self.workload, self.divide, self.most_tokens, self.seed)

    def slice(self, number: int, requests_per_s: float) -> list[TracedRequest]:
        """One slice of `requests` requests as a Poisson process from time 0; slice 0 is for calibration."""
        chosen = list(self.trace().head((number + 1) * self.requests).requests())[number * self.requests :]
        timed = with_poisson_arrivals(self.trace().head(len(chosen)), requests_per_s, seed=self.seed + number)
        return [
            TracedRequest(replace(one.request, arrival_s=float(at_s)), one.output_tokens)
            for one, at_s in zip(chosen, timed.arrival_s, strict=True)
        ]

    def runs(self) -> Iterator[tuple[str, str | None, str]]:
        """Cluster, placement and load of each run that is predicted."""
        for cluster in self.clusters:
            for load_name in ("light", "overloaded"):
                yield cluster, None, load_name
        for placement in self.placements:
            yield "2P+1D", placement, "overloaded"


STUDIES: Final = {
    "smoke": Study(requests=6, clusters=("1P+1D", "2 coupled"), placements=()),
    "classroom": Study(),
    "full": Study(requests=60),
    "gpu": Study(requests=60, model="random:llama3-8b", device="auto", backend="auto", dtype="bfloat16"),
}
"""What each scale measures."""


def study(scale: str, *, seed: int = 0) -> Study:
    """The study of a scale."""
    return replace(STUDIES[check_scale(scale)], seed=seed)


@cache
def _scaled(workload: str, divide: int, most_tokens: int, seed: int) -> Trace:
    return scaled_down(load(workload, seed=seed), divide, most_tokens=most_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StudyResult:
    """What a study found."""

    calibration: LogCalibration
    rates_per_s: Mapping[str, float]
    """Requests a second of each load."""
    requests: pd.DataFrame
    """Rows of run, cluster, placement, load, request and what `requests.side_by_side` says of it."""
    again: pd.DataFrame
    """The same for the first run, predicted by a second run of the very same: no model can do better."""
    decisions: pd.DataFrame
    """Rows by run: decisions, and how many of them the Conductor gives again on the recorded view."""


def hold_against(plan: Study, pool: WorkerProcesses, pace: Pacer | None = None) -> StudyResult:
    """Calibrate on the first slice on 1P+1D, then serve the second slice live and simulated, run by run."""
    calibration, rates = calibrate(plan, pool, pace)
    tables, decided, logs = list[pd.DataFrame](), list[dict[str, Any]](), list[list[Record]]()
    for cluster, placement, load_name in plan.runs():
        requests = plan.slice(1, rates[load_name])
        spec = plan.spec(cluster, placement)
        log, found = serve(spec, plan.options(pacer=pace), calibration.model, requests, pool)
        run = f"{cluster}, {load_name}" + ("" if placement is None else f", {placement}")
        about = {"run": run, "cluster": cluster, "placement": placement or "default", "load": load_name}
        predicted = side_by_side(log, Cluster(spec, calibration.model).run(requests))
        tables.append(_apart(predicted, calibration, coupled=len(spec.pools) == 1).assign(**about))
        decided.append({"run": run, **found})
        logs.append(log)
    first_cluster, first_placement, first_load = next(iter(plan.runs()))
    requests = plan.slice(1, rates[first_load])
    spec = plan.spec(first_cluster, first_placement)
    repeated, _ = serve(spec, plan.options(pacer=pace), calibration.model, requests, pool)
    return StudyResult(
        calibration=calibration,
        rates_per_s=rates,
        requests=pd.concat(tables, ignore_index=True),
        again=side_by_side(logs[0], repeated).assign(run=f"{first_cluster}, {first_load}, {REPETITION}"),
        decisions=pd.DataFrame(decided).set_index("run"),
    )


def serve(
    spec: ClusterSpec,
    options: LiveOptions,
    model: LatencyModel,
    requests: Sequence[TracedRequest],
    pool: WorkerProcesses,
) -> tuple[list[Record], dict[str, int]]:
    """The log of a live run; how many decisions it took, and how many the Conductor gives again."""
    with LiveCluster(spec, options, model=model, launcher=pool) as live:
        warm_up(live)
        log = checked(live.run(requests))
        return log, {"decisions": len(live.decisions), "given again": replayed(live)}


def calibrate(
    plan: Study, pool: WorkerProcesses, pace: Pacer | None = None
) -> tuple[LogCalibration, dict[str, float]]:
    """A latency model from a run on 1P+1D: half of it light, so that idle workers are met, half of it overloaded.

    Returns:
        The calibration, and the requests a second of each load: shares of what one prefill worker computes.
    """
    with LiveCluster(plan.spec(), plan.options(pacer=pace), launcher=pool) as live:
        warm_up(live)
        rates = _rates(plan, live.model)
        light = plan.slice(0, rates["light"])
        half = len(light) // 2
        ratio = rates["light"] / rates["overloaded"]
        turn_s = light[half].request.arrival_s
        mixed = [
            replace(one, request=replace(one.request, arrival_s=turn_s + ratio * (one.request.arrival_s - turn_s)))
            if i > half
            else one
            for i, one in enumerate(light)
        ]
        found = model_from_log(checked(live.run(mixed)), live.model)
    return found, _rates(plan, found.model)


def informed(plan: Study, held: StudyResult) -> pd.DataFrame:
    """The predictions again, told how long prefill really took on average in each run."""
    rows = list[dict[str, Any]]()
    runs = zip(plan.runs(), held.requests.groupby("run", sort=False), strict=True)
    for (cluster, placement, load_name), (run, table) in runs:
        means: dict[str, float] = table.mean(numeric_only=True).to_dict()
        slower = means["real_prefill_s"] / means["simulated_prefill_s"]
        spec, requests = plan.spec(cluster, placement), plan.slice(1, held.rates_per_s[load_name])
        again = ttft_s(Cluster(spec, slowed(held.calibration.model, slower)).run(requests))
        before = means["simulated_ttft_s"] / means["real_ttft_s"] - 1
        after = sum_in_order(again.values()) / len(again) / means["real_ttft_s"] - 1
        rows.append({"run": run, "slower": slower, "error before": before, "error after": after})
    return pd.DataFrame(rows).set_index("run")


def predicted_ttft_s(policy: PlacementPolicy, plan: Study, held: StudyResult) -> float:
    """Mean TTFT of the second slice on a simulated 2P+1D under any placement policy, such as one's own."""
    spec = replace(plan.spec("2P+1D"), placement=policy)
    log = Cluster(spec, held.calibration.model).run(plan.slice(1, held.rates_per_s["overloaded"]))
    found = ttft_s(log)
    return sum_in_order(found.values()) / len(found)


def warm_up(live: LiveCluster) -> None:
    """Let every worker touch its memory once; the tokens are none that a trace is likely to begin with."""
    for number in range(2 * len(live.spec.roles)):
        live.generate([[number, 1, 2, 3] * 20], max_new_tokens=3)


def replayed(live: LiveCluster) -> int:
    """How many decisions of the latest run the Conductor gives again on the view that was recorded (I7)."""
    spec, estimate = live.spec, live.estimate
    return sum(
        decide(
            one.request,
            one.view,
            placement=spec.placement,
            admission=spec.admission,
            estimate=estimate,
            slo=spec.slo,
        )
        == one.decision
        for one in live.decisions
    )


def _apart(table: pd.DataFrame, calibration: LogCalibration, *, coupled: bool) -> pd.DataFrame:
    """What the fit added to prefill for the time between prompts, back where the log of a live run has it."""
    if coupled or not calibration.between_s:
        return table
    between_s = sum_in_order(calibration.between_s) / len(calibration.between_s)
    return table.assign(
        simulated_prefill_s=table["simulated_prefill_s"] - between_s,
        simulated_handover_s=table["simulated_handover_s"] + between_s,
    )


def _rates(plan: Study, model: LatencyModel) -> dict[str, float]:
    prompts = [float(one.request.input_tokens) for one in plan.slice(1, 1.0)]
    capacity_per_s = len(prompts) / sum_in_order(float(model.prefill.seconds(tokens)) for tokens in prompts)
    return {"light": plan.light * capacity_per_s, "overloaded": plan.overloaded * capacity_per_s}
