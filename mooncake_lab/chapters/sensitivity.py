"""Every judged claim again, with one assumption changed at a time.

`python -m mooncake_lab.chapters.sensitivity` runs the experiments that decide the claims once as assumed, and once
for each alternative of `data/paper/alternatives.csv`. It writes what became of each claim whose figure uses the
assumption to `data/measured/sensitivity.csv`.

An alternative says in its column `how` what it sets. `EndToEnd.router=random` sets a field of all experiments of
that class; `EndToEnd[system=vllm].router=random` only of those with that value; `pipeline.sum_ms=1` sets a
parameter of a function below. The points of an experiment that an alternative does not change come from the kept
results, and so does everything when the command runs again after an interruption.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import pandas as pd

from mooncake_lab.bench.commits import commit
from mooncake_lab.chapters.chunked import experiment as chunked
from mooncake_lab.chapters.endtoend import claims as endtoend_claims
from mooncake_lab.chapters.endtoend import experiment as endtoend
from mooncake_lab.chapters.endtoend import rates
from mooncake_lab.chapters.endtoend.host import fitted_host
from mooncake_lab.chapters.overload import claims as overload_claims
from mooncake_lab.chapters.overload import replays
from mooncake_lab.chapters.piggyback import experiment as piggyback
from mooncake_lab.chapters.piggyback import model as piggyback_model
from mooncake_lab.chapters.pipeline import claims as pipeline_claims
from mooncake_lab.chapters.pipeline import experiment as pipeline
from mooncake_lab.chapters.pipeline import long, serving
from mooncake_lab.chapters.placement import claims as placement_claims
from mooncake_lab.chapters.placement import experiment as placement
from mooncake_lab.chapters.stages import model as stages_model
from mooncake_lab.chapters.store import claims as store_claims
from mooncake_lab.chapters.store import experiment as store
from mooncake_lab.chapters.traces import experiment as traces
from mooncake_lab.chapters.transfer import experiment as transfer
from mooncake_lab.core import carried_folder, complete_file
from mooncake_lab.experiments import Experiment, run, vary, where
from mooncake_lab.paper import Compared, ComparisonTable, Grounds, claim, claims, constant, fact
from mooncake_lab.paper.evidence import AS_ASSUMED, NOT_TRIED, SENSITIVITY, alternatives
from mooncake_lab.testbeds import nodes
from mooncake_lab.workload import WORKLOADS

E = TypeVar("E", bound=Experiment)
SCALE: Final = "classroom"
_SETTING: Final = re.compile(r"(\w+)(?:\[([^]]*)\])?\.(\w+)=(.+)")


@dataclasses.dataclass(slots=True)
class Change:
    """What one alternative sets, and the claims whose experiments had such a setting."""

    how: str = ""
    tried: set[str] = dataclasses.field(default_factory=set)

    def run(self, points: Iterable[E], decides: str) -> pd.DataFrame:
        """The table of experiments that decide some claims (`F01-F10 F49`), after changing those it is about."""
        before = tuple(points)
        after = tuple(self._changed(point) for point in before)
        if after != before:
            self.tried |= set(_ids(decides))
        return run(after)

    def parameter(self, function: str, name: str, decides: str, default: Any = None) -> Any:
        """A parameter of a function below, which decides some claims."""
        for target, _, field, text in self._settings():
            if (target, field) == (function, name):
                self.tried |= set(_ids(decides))
                return _value(text)
        return default

    def _changed(self, point: E) -> E:
        names = {field.name for field in dataclasses.fields(point)}
        new = {
            field: _value(text)
            for target, only, field, text in self._settings()
            if target == type(point).__name__ and field in names and _has(point, only)
        }
        return cast("E", replace(cast("Any", point), **new))

    def _settings(self) -> Iterator[tuple[str, str, str, str]]:
        for part in filter(None, self.how.split("; ")):
            found = _SETTING.fullmatch(part)
            if found is None:
                raise ValueError(
                    f"{part!r} sets nothing; write Class.field=value or Class[field=value].field=value"
                )
            target, only, field, text = found.groups()
            yield target, only or "", field, text


def _ids(text: str) -> Iterator[str]:
    """The claims in a text such as `F01-F10 S19`."""
    for part in text.split():
        first, _, last = part.partition("-")
        for number in range(int(first[1:]), int((last or first)[1:]) + 1):
            yield f"{first[0]}{number:02d}"


def _has(point: Any, only: str) -> bool:
    wanted = (each.split("=") for each in filter(None, only.split(",")))
    return all(str(getattr(point, name)) == text for name, text in wanted)


def _value(text: str) -> Any:
    """A number, a truth value, or the text itself."""
    if text in {"true", "false"}:
        return text == "true"
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text


def of_traces(change: Change) -> ComparisonTable:
    """Chapter 1."""
    return traces.beside_papers(
        change.run(vary(traces.TraceNumbers(), workload=WORKLOADS), "F101-F103 A12 A13 A101 A102")
    )


def of_stages(_: Change) -> ComparisonTable:
    """Chapter 2."""
    return stages_model.beside_papers(nodes.calibrate_paper_node())


def of_chunked(_: Change) -> ComparisonTable:
    """Chapter 4."""
    return chunked.beside_papers(chunked.chunk_overhead(), chunked.saturation((256, 2048), (1, 8)))


def of_piggyback(change: Change) -> ComparisonTable:
    """Chapter 5."""
    table_4 = "S01 S03 S28 S30 S33 S35"
    changed = {name: bool(change.parameter("piggyback", name, table_4)) for name in ("printed_ratio", "filled")}
    return piggyback.beside_papers(piggyback_model.predictions(**changed), piggyback_model.ratio_sweep(("1K",)))


def of_pipeline(change: Change) -> ComparisonTable:
    """Chapter 6."""
    schemes = vary(pipeline.Gpt3(requests=pipeline.REQUESTS[SCALE]), scheme=pipeline.SCHEMES)
    three = change.run(schemes, "S13-S15 S39").assign(decode_attention=1.0, overhead_ms_a_layer=0.0)
    server = serving.Serving(requests=serving.REQUESTS[SCALE])
    policies = ("vLLM", "Sarathi-Serve 512", "Sarathi-Serve 2048")
    served = change.run(vary(server, policy=policies, rate=serving.RATES[SCALE]), "S18 S20 S53")
    limits_s = [fact("sarathi_serve_slo", series="Yi-34B", x=limit).value for limit in ("strict", "relaxed")]
    attention = change.parameter("pipeline", "attention_efficiency", "K01-K05", long.EFFICIENCY)
    lengths, processes = _runahead_settings(change)
    apart = change.run(pipeline_claims.ablation_points(SCALE), "S17 S26 S27 S37 S38")
    searched = change.run(serving.cells(SCALE), "S21-S23 S47-S51")
    return pipeline_claims.beside_papers(
        pipeline.sensitivity(three),
        serving.capacity(served, limits_s),
        long.runahead_sweep(lengths, processes, attention_efficiencies=(attention,)),
        pipeline_claims.ablation(apart),
        serving.over_vllm(searched),
        sum_ms=change.parameter("pipeline", "sum_ms", "S24"),
        decode_rows=change.parameter("pipeline", "decode_rows", "S52 S54 S55", "first and last"),
    )


def _runahead_settings(change: Change) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of prompts and numbers of GPUs among which KV-Runahead's best gains are looked for."""
    without_setting = "K01 K04"
    if change.parameter("pipeline", "printed_setting", without_setting):
        return (12_288,), (4,)
    longest = change.parameter("pipeline", "longest_tokens", without_setting, long.RUNAHEAD_TOKENS[-1])
    return tuple(tokens for tokens in long.RUNAHEAD_TOKENS if tokens <= longest), long.RUNAHEAD_GPUS


def of_store(change: Change) -> ComparisonTable:
    """Chapter 7."""
    workloads, sizes = tuple(store_claims.FAST_FIG_9.values()), store_claims.capacities_of_fig_9()
    capacities = run(vary(store.CapacityHitRates(), workload=workloads, capacity_tokens=sizes))
    if change.parameter("store", "whole_blocks", "F21-F25"):
        capacities = capacities.assign(hit_rate=capacities["whole_blocks_hit_rate"])
    policies = vary(
        store.PolicyHitRates(),
        workload=("toolagent", "conversation"),
        policy=tuple(store_claims.ARXIV_TABLE_1.values()),
        capacity_blocks=store_claims.capacities_of_table_1(),
    )
    return store_claims.beside_papers(capacities, change.run(policies, "A09-A11 A103-A116"))


def of_transfer(change: Change) -> ComparisonTable:
    """Chapter 8."""
    node, slow = nodes.calibrate_paper_node(), "F40 F72 F73 F106 F107"
    sweep = vary(transfer.BandwidthDemand(), streams_layers=(True, False), gbps=transfer.bandwidths_of_fig_13())
    again = transfer.BandwidthDemand(reuses=False, gbps=400.0)
    demand = change.run((*sweep, again), slow)
    if change.parameter("transfer", "sent_after_prefill", slow):
        late = where(demand, streams_layers=False)
        demand = pd.concat([late.assign(streams_layers=True), late, where(demand, reuses=False)])
    return transfer.beside_papers(transfer.store_latency(node), transfer.breakdown(node), demand)


def of_placement(change: Change) -> ComparisonTable:
    """Chapter 9."""
    four, stated = tuple(placement_claims.FAST_FIG_5), placement_claims.STATED_POLICY
    fast = change.run(vary(placement.PlacementReplay(), policy=four), "F29-F33 F47 F48")
    crowd = placement.PlacementReplay(workload="arxiv", testbed="arxiv", first=23_000)
    twins = vary(crowd, seed=placement_claims.ARXIV_TWINS, policy=four)
    arxiv = placement_claims.means_of_twins(change.run(twins, "A19-A22 A28-A30"))
    ten = placement.PlacementReplay(prefill_nodes=10, decode_nodes=6, one_token=True)
    fig_10, workloads = "F15 F16 F68-F71", tuple(placement_claims.WORKLOADS)
    local = change.run(vary(ten, workload=workloads, policy=(stated,)), fig_10).assign(policy=stated)
    shared = change.run(vary(ten, workload=workloads, shared_cache=(True,)), fig_10)
    caches = placement_claims.local_and_global(pd.concat([local, shared]))
    replicas = change.run((placement.Replicas(),), "F104 F105")
    return placement_claims.beside_papers(fast, arxiv, caches, replicas)


def of_endtoend(change: Change) -> ComparisonTable:
    """Chapter 10."""
    host = fitted_host()
    base = endtoend.EndToEnd(first=endtoend.FIRST_REQUESTS[SCALE], **host)
    workloads, systems = tuple(endtoend_claims.CURVES), tuple(endtoend_claims.SYSTEMS)
    replays = change.run(vary(base, workload=workloads, system=systems), "F01-F10 F17-F19 F49-F67 F201-F218")
    split = replace(base, workload="synthetic", ttft_limit_s=constant("slo_ttft_fig15").value)
    ways = change.run(endtoend.splits(split, range(5, 16), (host["host_s"],)), "F45 F74-F78 F108")
    twenty = replace(base, workload="arxiv", testbed="arxiv", host_s=0.0, prefill_nodes=10, decode_nodes=10)
    real = change.run(vary(twenty, system=tuple(endtoend_claims.REAL)), "A03-A06")
    at_rate = rates.AtRate(dataset="16k", requests=rates.REQUESTS[SCALE])
    tested = [point for name in rates.PUBLIC + rates.SIMULATED for point in rates.points(name, at_rate)]
    rated = rates.normalised(change.run(tested, "A01 A02 A07 A08 A23 A33 A34 A117-A122"))
    return endtoend_claims.beside_papers(replays, ways, real, rated)


def of_overload(change: Change) -> ComparisonTable:
    """Chapter 11, on three of the seven twins that decide in the book."""
    twins = [each for point in replays.fitted_points() for each in vary(point, twin=(0, 1, 2))]
    points = [
        each
        for twin in twins
        for each in replays.with_policies(twin, replays.POLICIES[:3], (replays.JUDGED_THRESHOLD,))
    ]
    return overload_claims.beside_papers(change.run(points, "A16-A18 A24 A31 A32 A35 A36 A123-A125"), {})


FIGURES: Final[dict[str, Callable[[Change], ComparisonTable]]] = {
    "01_traces": of_traces,
    "02_stages": of_stages,
    "04_chunked": of_chunked,
    "05_piggyback": of_piggyback,
    "06_pipeline": of_pipeline,
    "07_store": of_store,
    "08_transfer": of_transfer,
    "09_placement": of_placement,
    "10_endtoend": of_endtoend,
    "11_overload": of_overload,
}
"""The chapters whose claims a model or a trace decides, and how their tables of verdicts are made."""


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def verdicts_of(chapter: str, told: Callable[[str], object] = _tell) -> Iterator[dict[str, Any]]:
    """The verdicts on a chapter's claims as assumed, and at each alternative of each assumption that they use.

    Columns: claim, assumption, alternative, ours, verdict.
    """
    make = FIGURES[chapter]
    told(f"{chapter}: {AS_ASSUMED}")
    assumed = _decided(make(Change()))
    for name, row in assumed.items():
        yield {"claim": name, "assumption": "", "alternative": AS_ASSUMED, **_outcome(row)}
    for each in alternatives():
        using = [name for name in assumed if each.assumption in claim(name).grounds.assumptions]
        if not using:
            continue
        change = Change(each.how)
        if each.how:
            told(f"{chapter}: {each.assumption}, {each.alternative}")
        found = _decided(make(change)) if each.how else {}
        for name in using:
            outcome = _outcome(found[name]) if name in change.tried else {"ours": None, "verdict": NOT_TRIED}
            yield {"claim": name, "assumption": each.assumption, "alternative": each.alternative, **outcome}


def _decided(table: ComparisonTable) -> dict[str, Compared]:
    """The rows that decide claims which rest on more than construction or arithmetic, by claim."""
    return {row.claim: row for row in table.rows if row.decides and claim(row.claim).is_judged}


def _outcome(row: Compared) -> dict[str, Any]:
    """Our number, and the verdict on it without regard to any condition."""
    grounds = Grounds(basis=claim(row.claim).grounds.basis)
    return {"ours": row.ours, "verdict": replace(row, grounds=grounds).verdict.value}


def main(arguments: Sequence[str]) -> int:
    """Write the record, of all chapters or of those named; the rows of others stay."""
    if unknown := [name for name in arguments if name not in FIGURES]:
        sys.stderr.write(f"no chapter {unknown[0]!r}; there are {', '.join(FIGURES)}\n")
        return 2
    for chapter in arguments or FIGURES:
        rows = [row | {"commit": commit()} for row in verdicts_of(chapter)]
        missing = sum(row["verdict"] == NOT_TRIED for row in rows)
        _tell(f"{chapter}: {len(rows)} rows in {_record(rows)}, of which {missing} alternatives were not tried")
    return 0


def _record(rows: Sequence[dict[str, Any]]) -> Path:
    """Put rows in place of those about the same claims, in the order of the claims."""
    path = carried_folder("measured") / SENSITIVITY
    kept = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records") if path.is_file() else []
    order = {each.id: rank for rank, each in enumerate(claims())}
    others = order.keys() - {row["claim"] for row in rows}
    table = pd.DataFrame([*(row for row in kept if row["claim"] in others), *rows])
    table = table.sort_values("claim", key=lambda names: names.map(order), kind="stable")
    with complete_file(path) as file:
        file.write(table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
