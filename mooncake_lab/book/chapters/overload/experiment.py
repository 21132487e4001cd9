"""Chapter 11: overload, early rejection, and the least that any policy must reject."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab import conductor, metrics
from mooncake_lab.book.chapters.placement.readings import DecodeChoice, with_decode_choice
from mooncake_lab.book.experiments import whole_trace
from mooncake_lab.book.testbeds import arxiv_testbed, paper_node_latency
from mooncake_lab.book.testbeds.arxiv import CONSTANT_S
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor.admission import PredictedLoad, StillDecodes, mean_step_s
from mooncake_lab.conductor.decide import needs_of
from mooncake_lab.core import SLO, Record, Rejected, Request, TracedRequest, blocks_for, keyed_uniform
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation import Cluster, SimulationOptions
from mooncake_lab.workload import Trace, with_poisson_arrivals

Array = npt.NDArray[np.float64]


class LoadStage(NamedTuple):
    """Both loads in one stage, as shares of full."""

    number: int
    decode: float
    """Load of the requests that decode in this stage."""
    prefill: float
    """Load of the requests that were admitted in this stage, and decode in the next."""


def stages(offered: float, limit: float, *, predicted: bool, count: int = 8) -> Iterator[LoadStage]:
    """A cluster in which prefill takes one stage and decoding takes one stage.

    With early rejection, all arriving requests are admitted while the decode load of this stage is below the
    limit, and otherwise none. With prediction, as many are admitted as the next stage has room for.
    """
    decode = 0.0
    for number in range(1, count + 1):
        admitted = min(offered, limit) if predicted else offered * (decode < limit)
        yield LoadStage(number, decode, admitted)
        decode = admitted


@dataclass(frozen=True, slots=True, eq=False)
class OracleAdmission(PredictedLoad):
    """Refuse on arrival when the decode pool will be full, by answers whose lengths are known beforehand."""

    load_name: ClassVar[str] = "known decode"
    answer_tokens: Mapping[int, int] = field(kw_only=True)
    """The future: output length by request id."""

    def still_decodes(self, view: conductor.ClusterView, estimate: conductor.Estimator) -> StillDecodes:
        """1 until the answer has all its tokens, then 0."""
        step_s = mean_step_s(view, estimate)
        return lambda served, then_s: float(
            then_s - served.starts_s < self.answer_tokens[served.request_id] * step_s
        )


@dataclass(frozen=True, slots=True)
class OfChosenInstance:
    """Another policy, which on arrival sees no decode instance but the chosen one (assumption B24)."""

    inner: conductor.AdmissionPolicy

    @property
    def needs(self) -> frozenset[str]:
        """What the other policy needs."""
        return needs_of(self.inner)

    def admit(
        self,
        request: Request,
        proposed: conductor.Placement,
        view: conductor.ClusterView,
        *,
        estimate: conductor.Estimator,
        slo: SLO,
    ) -> conductor.Decision:
        """The decision of the other policy, as if the chosen instance were the decode pool."""
        chosen = tuple(each for each in view.decode if each.name == proposed.decode)
        seen = msgspec.structs.replace(view, decode=chosen)
        return self.inner.admit(request, proposed, seen, estimate=estimate, slo=slo)

    def double_check(
        self, request: Request, decode: conductor.DecodeView, *, estimate: conductor.Estimator, slo: SLO
    ) -> conductor.Rejection | None:
        """The second check of the other policy, which is of one instance anyway."""
        return self.inner.double_check(request, decode, estimate=estimate, slo=slo)


PolicyName = Literal[
    "after_prefill", "early", "committed", "predictive", "length_predicting", "adaptive", "oracle"
]
TABLE_3: Final = {
    "after_prefill": "Baseline",
    "early": "Early Rejection",
    "predictive": "Early Rejection based on Prediction",
}
"""Our policies and the rows of arXiv Table 3."""
REQUESTS: Final = {"smoke": 400, "classroom": 2400, "full": 23_000, "gpu": 23_000}
"""How many requests of a trace a scale replays at most."""
SEEDS: Final = {"smoke": 2, "classroom": 10, "full": 20, "gpu": 20}
"""How many windows of a trace a scale replays where it gives an interval."""
_MOST_LAG_S: Final = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A stretch of a trace, replayed faster than recorded, on a cluster that may reject requests."""

    workload: str = "conversation"
    policy: PolicyName = "early"
    speed: float = 2.0
    """Speed of the replay relative to the recording."""
    first: int = 2000
    """How many requests."""
    prefill_nodes: int = 8
    decode_nodes: int = 8
    ttft_limit_s: float = 30.0
    tbt_limit_s: float = 0.1
    prefill_factor: float | None = None
    """By how much the nodes prefill slower than those of FAST'25; None is FAST'25's node, also for decode."""
    decode_factor: float = 1.0
    """By how much more a decode step grows with each request and token."""
    decode_constant_s: float = CONSTANT_S
    """What each decode step of a slower node takes at least."""
    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    arrival_threshold: float | None = None
    """Load at which a request is refused on arrival; None is `threshold`."""
    decode_s: float | None = None
    """t_d of the predictive policy; None takes the length-biased mean answer times the TBT limit (B22)."""
    placement: Literal["kvcache_centric", "random"] = "kvcache_centric"
    """Random where only admission shall see the load, not placement."""
    decode_choice: DecodeChoice = "least_tbt"
    """How a decode instance is selected (assumption B05)."""
    load_of: Literal["mean_instance", "chosen_instance"] = "mean_instance"
    """Whose decode load decides on arrival (assumption B24)."""
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides."""
    every_s: float = 5.0
    """Spacing of the load series."""
    seed: int = 0
    """From 1 on, another stretch of the trace, with arrivals spread over their tick (assumption B09)."""
    twin: int = 0
    """Seed of the twin where there is no released trace."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: what was rejected where, what was wasted, what was served, and how load moved."""
        requests, trace = self.requests()
        log, times_s = self.replay(requests, trace.block_size_tokens)
        yield {
            **rejections(log, requests),
            "goodput": float(metrics.effective(metrics.request_table(log), self.slo).mean()),
            **self._movement(log, times_s),
            "origin": trace.origin,
            "source": trace.source,
        }

    def rejected(self) -> dict[str, Any]:
        """The part of the row that is counted fastest: what was rejected where, and what was wasted."""
        requests, trace = self.requests()
        log, _ = self.replay(requests, trace.block_size_tokens)
        return {**rejections(log, requests), "origin": trace.origin}

    @property
    def slo(self) -> SLO:
        """The limits."""
        return SLO(ttft_s=self.ttft_limit_s, tbt_s=self.tbt_limit_s)

    def requests(self) -> tuple[list[TracedRequest], Trace]:
        """The requests as they arrive, from second 0 on, and the trace they are from."""
        everybody, trace = _whole(self.workload, self.twin)
        count = min(self.first, len(everybody))
        start = int(keyed_uniform(self.seed, "window") * (len(everybody) - count)) if self.seed else 0
        arrival_s = trace.arrival_s[start : start + count]
        if self.seed:
            arrival_s = np.sort(arrival_s + np.random.default_rng(self.seed).uniform(0, 3.0, count))
        at_s = (arrival_s - arrival_s[0]) / self.speed
        chosen = zip(everybody[start : start + count], at_s.tolist(), strict=True)
        return [replace(each, request=replace(each.request, arrival_s=at)) for each, at in chosen], trace

    def replay(self, requests: list[TracedRequest], block_size_tokens: int) -> tuple[list[Record], Array]:
        """The log, and the times of the load series: while requests arrive, after the cluster has filled."""
        spec = ClusterSpec.disaggregated(
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            placement=with_decode_choice(
                conductor.KVCacheCentric() if self.placement == "kvcache_centric" else conductor.Random(self.seed),
                self.decode_choice,
            ),
            admission=self.admission(requests),
            slo=self.slo,
            block_size_tokens=block_size_tokens,
        )
        log = Cluster(spec, self.node(), SimulationOptions(view_age_s=self.view_age_s)).run(requests)
        end_s = requests[-1].request.arrival_s
        return log, np.arange(min(60.0, end_s / 5), end_s, self.every_s)

    def node(self) -> LatencyModel:
        """The latency model of the nodes."""
        if self.prefill_factor is None:
            return paper_node_latency()
        return arxiv_testbed(self.prefill_factor, self.decode_factor, self.decode_constant_s)

    def admission(self, requests: list[TracedRequest]) -> conductor.AdmissionPolicy:
        """The policy; only the oracle is told the future, and no command line can build it."""
        decode_s = self.decode_s
        if decode_s is None:
            answers = [traced.output_tokens for traced in requests]
            decode_s = self.tbt_limit_s * conductor.length_biased_mean(answers, answers)
        lengths = {traced.request.id: traced.output_tokens for traced in requests}
        policies: dict[str, Callable[..., conductor.AdmissionPolicy]] = {
            "after_prefill": conductor.AfterPrefill,
            "early": conductor.EarlyRejection,
            "committed": partial(conductor.EarlyRejection, with_coming=True),
            "predictive": partial(conductor.PredictiveRejection, decode_s=decode_s),
            "length_predicting": conductor.LengthPredicting,
            "adaptive": conductor.AdaptiveThreshold,
            "oracle": partial(OracleAdmission, answer_tokens=lengths),
        }
        policy = policies[self.policy](self.threshold, arrival_threshold=self.arrival_threshold)
        return OfChosenInstance(policy) if self.load_of == "chosen_instance" else policy

    def loads(self, log: list[Record], times_s: Array) -> tuple[Array, Array]:
        """Loads of the prefill and of the decode pool at some times."""
        prefill = metrics.prefill_load_series(log, times_s, self.prefill_nodes, self.slo)
        return prefill, metrics.decode_load_series(log, times_s, self.decode_nodes, self.slo)

    def _movement(self, log: list[Record], times_s: Array) -> dict[str, float]:
        prefill, decode = self.loads(log, times_s)
        found = {
            "prefill_load": float(prefill.mean()),
            "decode_load": float(decode.mean()),
            "prefill_swing": metrics.swing(prefill),
            "decode_swing": metrics.swing(decode),
        }
        lags = min(int(_MOST_LAG_S / self.every_s), len(times_s) // 3)
        if len(times_s) < 8 or not (np.ptp(prefill) and np.ptp(decode)):
            return found  # too short, or nothing moves
        together = metrics.lagged_correlation(prefill, decode, lags)
        return found | {
            "correlation": float(together[0]),
            "peak_correlation": float(together.max()),
            "peak_lag_s": float(together.argmax() * self.every_s),
            "period_s": metrics.period_s(decode, self.every_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSeries:
    """The two loads of one replay over time (arXiv Fig. 9)."""

    replay: Overload

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a sample: at_s, prefill and decode, as shares of full."""
        requests, trace = self.replay.requests()
        log, times_s = self.replay.replay(requests, trace.block_size_tokens)
        prefill, decode = self.replay.loads(log, times_s)
        for at_s, p, d in zip(times_s, prefill, decode, strict=True):
            yield {"at_s": float(at_s), "prefill": float(p), "decode": float(d), "source": trace.source}


@lru_cache(maxsize=4)
def _whole(workload: str, twin: int) -> tuple[list[TracedRequest], Trace]:
    trace = _uniform() if workload == "uniform" else whole_trace(workload, twin)
    return list(trace.requests()), trace


def _uniform() -> Trace:
    """Requests that are all alike, at the mean lengths and rate of the conversation trace, with nothing shared."""
    like, requests = whole_trace("conversation"), 6000
    blocks = blocks_for(int(like.input_tokens.mean()), like.block_size_tokens)
    ones = np.ones(requests, dtype=np.int64)
    alike = replace(
        like.head(0),
        name="uniform",
        source=f"{requests} requests alike, of the mean lengths of: {like.source}",
        arrival_s=np.zeros(requests),
        input_tokens=ones * int(like.input_tokens.mean()),
        output_tokens=ones * int(like.output_tokens.mean()),
        block_ids=np.arange(requests * blocks),
        block_starts=np.arange(requests + 1) * blocks,
        sessions=None,
        max_tokens=None,
    )
    return with_poisson_arrivals(alike, len(like) / float(like.arrival_s[-1]), seed=0)


def rejections(log: list[Record], requests: list[TracedRequest]) -> dict[str, Any]:
    """How many requests were rejected on arrival and after prefill, how long they are, and the prefill in vain."""
    rejected = [record for record in log if isinstance(record, Rejected)]
    late = {record.request_id for record in rejected if record.stage == "decode"}
    early = {record.request_id for record in rejected} - late
    return {
        "requests": len(requests),
        "rejected": len(rejected),
        "rejected_late": len(late),
        "rejected_share": len(rejected) / len(requests),
        "arrival_rejected_tokens": _mean_prompt(requests, early),
        "late_rejected_tokens": _mean_prompt(requests, late),
        "kept_tokens": _mean_prompt(requests, {traced.request.id for traced in requests} - late - early),
        "wasted_prefill_s": metrics.wasted_prefill_gpu_s(log),
        "prefill_gpu_s": metrics.prefill_gpu_s(log),
    }


def _mean_prompt(requests: list[TracedRequest], of: set[int]) -> float:
    """The mean prompt of some requests; not a number where there are none."""
    tokens = [traced.request.input_tokens for traced in requests if traced.request.id in of]
    return float(np.mean(tokens)) if tokens else float("nan")
