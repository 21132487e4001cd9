"""Every judged claim again, with one assumption changed at a time.

`python -m mooncake_lab.book.chapters.sensitivity` runs the experiments that decide the claims once as assumed, and
once for each alternative of `data/paper/alternatives.csv`. It writes what became of each claim whose figure uses
the assumption to `data/measured/sensitivity.csv`. `09_placement 10_endtoend --assumption B57` computes only the
alternatives to B57, of claims of these chapters; all other rows of the record stay.

An alternative says in its column `how` what it sets. `EndToEnd.router=random` sets a field of all experiments of
that class; `EndToEnd[system=vllm].router=random` only of those with that value, and `system!=vllm` of the others;
`pipeline.sum_ms=1` sets a parameter of a function below. Only experiments that decide a claim which uses the
assumption are changed. The points of an experiment that an alternative does not change come from the kept results,
and so does everything when the command runs again after an interruption.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import pandas as pd

from mooncake_lab.bench.commits import commit
from mooncake_lab.book.chapters.chunked import experiment as chunked
from mooncake_lab.book.chapters.endtoend import claims as endtoend_claims
from mooncake_lab.book.chapters.endtoend import experiment as endtoend
from mooncake_lab.book.chapters.endtoend import rates
from mooncake_lab.book.chapters.endtoend.host import fitted_host
from mooncake_lab.book.chapters.overload import claims as overload_claims
from mooncake_lab.book.chapters.overload import recorded, replays
from mooncake_lab.book.chapters.overload.experiment import Overload
from mooncake_lab.book.chapters.overload.measure import vars_of
from mooncake_lab.book.chapters.piggyback import experiment as piggyback
from mooncake_lab.book.chapters.piggyback import model as piggyback_model
from mooncake_lab.book.chapters.pipeline import claims as pipeline_claims
from mooncake_lab.book.chapters.pipeline import experiment as pipeline
from mooncake_lab.book.chapters.pipeline import long, serving
from mooncake_lab.book.chapters.placement import claims as placement_claims
from mooncake_lab.book.chapters.placement import experiment as placement
from mooncake_lab.book.chapters.stages import model as stages_model
from mooncake_lab.book.chapters.store import claims as store_claims
from mooncake_lab.book.chapters.store import experiment as store
from mooncake_lab.book.chapters.traces import experiment as traces
from mooncake_lab.book.chapters.transfer import experiment as transfer
from mooncake_lab.book.experiments import Experiment, run, vary, where
from mooncake_lab.book.paper import Compared, ComparisonTable, Grounds, claim, claims, constant, fact
from mooncake_lab.book.paper.evidence import AS_ASSUMED, NO_OTHER, NOT_TRIED, SENSITIVITY, alternatives
from mooncake_lab.book.testbeds import fit_nodes
from mooncake_lab.book.testbeds.sarathi_serve import CONTEXT_TOKENS
from mooncake_lab.core import carried_folder, complete_file
from mooncake_lab.workload import WORKLOADS

E = TypeVar("E", bound=Experiment)
SCALE: Final = "classroom"
_SETTING: Final = re.compile(r"(\w+)(?:\[([^]]*)\])?\.(\w+)=(.+)")
_ONLY: Final = re.compile(r"(\w+)(!?=)(.*?)(?:,(?=\w+!?=)|$)")


@dataclasses.dataclass(slots=True)
class Change:
    """What one alternative sets, and the claims whose experiments it is about."""

    how: str = ""
    about: frozenset[str] | None = None
    """The claims whose figures use the assumption; experiments that decide none of them stay. None is all."""
    tried: set[str] = dataclasses.field(default_factory=set)

    def run(
        self, points: Iterable[E], decides: str, by: Callable[[Sequence[E]], pd.DataFrame] = run
    ) -> pd.DataFrame:
        """The table of experiments that decide some claims (`F01-F10 F49`), after changing those it is about."""
        before, names = tuple(points), set(_ids(decides))
        if self.about is not None and not names & self.about:
            return by(before)
        changes = [self._of(point) for point in before]
        if any(changes):
            self.tried |= names
        return by([cast("E", replace(cast("Any", p), **new)) for p, new in zip(before, changes, strict=True)])

    def parameter(self, function: str, name: str, decides: str, default: Any = None) -> Any:
        """A parameter of a function below, which decides some claims."""
        names = set(_ids(decides))
        for target, _, field, text in self._settings():
            if (target, field) == (function, name) and (self.about is None or names & self.about):
                self.tried |= names
                return _value(text)
        return default

    def _of(self, point: Any) -> dict[str, Any]:
        """What it sets of one experiment."""
        names = {field.name for field in dataclasses.fields(point)}
        return {
            field: _value(text)
            for target, only, field, text in self._settings()
            if target == type(point).__name__ and field in names and _has(point, only)
        }

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


def only_of(text: str) -> list[tuple[str, bool, str]]:
    """Field, whether it has the value or another one, and value of each part of `system!=vllm,seed=1`."""
    return [(name, sign == "=", wanted) for name, sign, wanted in _ONLY.findall(text)]


def _has(point: Any, only: str) -> bool:
    return all((getattr(point, name) == _value(text)) is equal for name, equal, text in only_of(only))


def _value(text: str) -> Any:
    """A number, a truth value, None, or the text itself."""
    if text in {"true", "false"}:
        return text == "true"
    if text == "none":
        return None
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text


def of_traces(change: Change) -> ComparisonTable:
    """Chapter 1."""
    numbers = change.run(vary(traces.TraceNumbers(), workload=WORKLOADS), "F101-F103 A12 A13 A101 A102")
    if change.parameter("traces", "share_of_blocks", "F101-F103"):
        numbers = numbers.assign(ideal_token_hit_rate=numbers["ideal_block_hit_rate"])
    return traces.beside_papers(numbers)


def of_stages(change: Change) -> ComparisonTable:
    """Chapter 2."""
    fitted = bool(change.parameter("stages", "fitted_machine", "S07 S08"))
    return stages_model.beside_papers(fit_nodes.calibrate_paper_node(), fitted_machine=fitted)


def of_chunked(change: Change) -> ComparisonTable:
    """Chapter 4."""
    names = "S10 S11 S41-S43"
    tiles, rereads = (change.parameter("a6000", name, names, default=True) for name in ("tiles", "rereads"))
    tokens = change.parameter("chunked", "prompt_tokens", names, 1024)
    overhead = chunked.chunk_overhead((tokens,), rereads=rereads)
    speeds = chunked.saturation((256, 2048), (1, 8))
    return chunked.beside_papers(overhead, speeds, tiles=tiles, prompt_tokens=tokens)


def of_piggyback(change: Change) -> ComparisonTable:
    """Chapter 5."""
    balanced, on_a100 = "S01-S03 S28 S30 S33 S35", "S03 S32-S36"
    changed = {name: bool(change.parameter("piggyback", name, balanced)) for name in ("printed_ratio", "filled")}
    grows = change.parameter("piggyback", "filled_at_all_ratios", "S40", default=True)
    every = "S01-S06 S12 S28-S36 S40 S44-S46"
    machine = {name: change.parameter("a6000", name, every, default=True) for name in ("tiles", "rereads")}
    share = change.parameter("a100", "share", on_a100, 1.0)
    sweep = piggyback_model.ratio_sweep(("1K",), filled=grows, **machine)
    cells = piggyback_model.predictions(**changed, **machine, a100_share=share)
    return piggyback.beside_papers(cells, sweep, **machine)


def of_pipeline(change: Change) -> ComparisonTable:
    """Chapter 6."""
    base = pipeline.Gpt3(requests=pipeline.REQUESTS[SCALE])
    by_scheme = {"Orca-best": "S13 S14 S39", "SARATHI": "S13-S15", "TP8 replicas": "S15 S39"}
    schemes = [change.run((replace(base, scheme=name),), names) for name, names in by_scheme.items()]
    three = pd.concat(schemes, ignore_index=True).assign(decode_attention=1.0, overhead_ms_a_layer=0.0)
    server = serving.Serving(requests=serving.REQUESTS[SCALE])
    policies = ("vLLM", "Sarathi-Serve 512", "Sarathi-Serve 2048")
    served = change.run(vary(server, policy=policies, rate=serving.RATES[SCALE]), "S18 S20 S53")
    limits_s = [fact("sarathi_serve_slo", series="Yi-34B", x=limit).value for limit in ("strict", "relaxed")]
    attention = change.parameter("pipeline", "attention_efficiency", "K01-K05", long.EFFICIENCY)
    lengths, processes = _runahead_settings(change)
    apart = change.run(pipeline_claims.ablation_points(SCALE), "S17 S26 S27 S37 S38")
    return pipeline_claims.beside_papers(
        pipeline.sensitivity(three),
        serving.capacity(served, limits_s),
        long.runahead_sweep(lengths, processes, attention_efficiencies=(attention,)),
        pipeline_claims.ablation(apart),
        serving.over_vllm(_searched(change)),
        sum_ms=change.parameter("pipeline", "sum_ms", "S24"),
        decode_rows=change.parameter("pipeline", "decode_rows", "S24 S52 S55", "first and last"),
        context_tokens=change.parameter("pipeline", "context_tokens", "S24 S52 S55", CONTEXT_TOKENS),
        printed_decodes=change.parameter("pipeline", "printed_decodes", "S24 S54 S55", default=False),
    )


def _searched(change: Change) -> pd.DataFrame:
    """Capacities, machine by machine."""
    decided = {
        "Mistral-7B": "S21",
        "Yi-34B": "S47",
        "LLaMA2-70B": "S22 S48",
        "Falcon-180B": "S23 S49-S51",
        "Falcon-180B, TP8": "S49",
    }
    cells = serving.cells(SCALE)
    parts = [
        change.run([cell for cell in cells if cell.testbed == machine], names)
        for machine, names in decided.items()
    ]
    return pd.concat(parts, ignore_index=True)


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
    decided = {"lru": "A09-A11 A103-A106", "lfu": "A11 A107-A111", "length_aware": "A11 A112-A116"}
    base, blocks = store.PolicyHitRates(), store_claims.capacities_of_table_1()
    policies = [
        change.run(
            vary(base, workload=("toolagent", "conversation"), policy=(name,), capacity_blocks=blocks), names
        )
        for name, names in decided.items()
    ]
    return store_claims.beside_papers(capacities, pd.concat(policies, ignore_index=True))


def of_transfer(change: Change) -> ComparisonTable:
    """Chapter 8."""
    node, slow = fit_nodes.calibrate_paper_node(), "F40 F72 F73 F107"
    late = bool(change.parameter("transfer", "sent_after_prefill", f"{slow} F106"))
    sweep = vary(transfer.BandwidthDemand(), streams_layers=(True, False), gbps=transfer.bandwidths_of_fig_13())
    demand = change.run(sweep, slow)
    again = transfer.BandwidthDemand(reuses=False, gbps=400.0, streams_layers=not late)
    whole = change.run((again,), "F106").assign(streams_layers=True)
    if late:
        sent_late = where(demand, streams_layers=False)
        demand = pd.concat([sent_late.assign(streams_layers=True), sent_late])
    demand = pd.concat([demand, whole], ignore_index=True)
    return transfer.beside_papers(transfer.store_latency(node), transfer.breakdown(node), demand)


def of_placement(change: Change) -> ComparisonTable:
    """Chapter 9."""
    on_fast = {"kvcache_centric": "F29 F30 F47 F48", "cache_aware": "F29 F31"}
    on_fast |= {"load_balance": "F32 F47", "random": "F33 F48"}
    fast = [change.run(vary(placement.PlacementReplay(), policy=(p,)), names) for p, names in on_fast.items()]
    crowd = placement.PlacementReplay(workload="arxiv", testbed="arxiv", first=23_000)
    seeds = placement_claims.ARXIV_TWINS
    on_arxiv = {"kvcache_centric": "A19 A28-A30", "cache_aware": "A20 A28"}
    on_arxiv |= {"load_balance": "A21 A29", "random": "A22 A30"}
    arxiv = [change.run(vary(crowd, seed=seeds, policy=(p,)), names) for p, names in on_arxiv.items()]
    ten = placement.PlacementReplay(prefill_nodes=10, decode_nodes=6, one_token=True)
    fig_10, workloads = "F15 F16 F68-F71", tuple(placement_claims.WORKLOADS)
    stated = placement_claims.STATED_POLICY
    local = change.run(vary(ten, workload=workloads, policy=(stated,)), fig_10).assign(policy=stated)
    shared = change.run(vary(ten, workload=workloads, shared_cache=(True,)), fig_10)
    caches = placement_claims.local_and_global(pd.concat([local, shared]))
    replicas = change.run((placement.Replicas(),), "F104 F105")
    means = placement_claims.means_of_twins(pd.concat(arxiv, ignore_index=True))
    return placement_claims.beside_papers(pd.concat(fast, ignore_index=True), means, caches, replicas)


def of_endtoend(change: Change) -> ComparisonTable:
    """Chapter 10."""
    host = fitted_host()
    base = endtoend.EndToEnd(first=endtoend.FIRST_REQUESTS[SCALE], **host)
    replays = _three_traces(change, base)
    split = replace(base, workload="synthetic", ttft_limit_s=constant("slo_ttft_fig15").value)
    ways = change.run(endtoend.splits(split, range(5, 16), (host["host_s"],)), "F45 F74-F78 F108")
    twenty = replace(base, workload="arxiv", testbed="arxiv", host_s=0.0, prefill_nodes=10, decode_nodes=10)
    on_twenty = {"mooncake": "A03 A04 A06 A129 A130", "vllm": "A03 A05 A06 A126-A128 A131 A132"}
    real = pd.concat(
        [change.run((replace(twenty, system=s),), names).assign(system=s) for s, names in on_twenty.items()]
    )
    if change.parameter(
        "endtoend", "few_gaps_pass", "F01-F10 F45 F49 F56-F67 F74-F76 F108 F201-F221 A03-A05 A126-A128"
    ):
        replays, ways, real = (_read_as(table, "few_gaps_", "") for table in (replays, ways, real))
    if change.parameter("endtoend", "mean_gap", "A03-A05 A126-A128"):
        real = _read_as(real, "within_mean_gap_", "within_").assign(within_tbt=real["within_mean_gap"])
    return endtoend_claims.beside_papers(replays, ways, real, _rated(change))


def _three_traces(change: Change, base: endtoend.EndToEnd) -> pd.DataFrame:
    """FAST'25 Figs. 1 and 6 to 8, system by system."""
    decided = {
        "mooncake": "F01-F09 F17-F19 F50-F55 F201-F203 F207-F209 F213-F215 F219-F221",
        "vllm": "F01-F03 F07-F10 F17-F19 F49 F204-F206 F210-F212 F216-F218",
        "vllm_prefix": "F04-F06 F50 F52 F54 F56 F57 F60 F61 F64 F65",
        "vllm_chunked": "F49 F51 F53 F55 F58 F59 F62 F63 F66 F67",
    }
    workloads = tuple(endtoend_claims.CURVES)
    parts = {
        name: change.run(vary(base, workload=workloads, system=(name,)), names) for name, names in decided.items()
    }
    if change.parameter("endtoend", "chunks_cost_as_whole_prompts", "F51 F53 F55"):
        whole = parts["vllm"]["prefill_gpu_s"].to_numpy()
        parts["vllm_chunked"] = parts["vllm_chunked"].assign(prefill_gpu_s=whole)
    return pd.concat(parts.values(), ignore_index=True)


def _read_as(table: pd.DataFrame, begin: str, usual: str) -> pd.DataFrame:
    """Rows of `EndToEnd` read otherwise: columns that begin with one text, under names with the usual one."""
    read = {name: table[name] for name in map(str, table.columns) if name.startswith(begin)}
    return table.assign(**{usual + name.removeprefix(begin): column for name, column in read.items()})


def _rated(change: Change) -> pd.DataFrame:
    """ArXiv Figs. 11 and 12, dataset by dataset.

    Runs that an alternative makes shorter are judged as if they had the usual length: it is what is tried.
    """
    decided = {
        "16k": "A01 A23 A117",
        "32k": "A23 A33 A118",
        "64k": "A02 A23 A119",
        "128k": "A23 A34 A120",
        "ArXiv Summarization": "A07 A121",
        "L-Eval": "A08 A122",
    }
    usual = rates.REQUESTS[SCALE]
    at_rate = rates.AtRate(dataset="16k", requests=usual)
    over_tokens = change.parameter("rates", "tbt_over_tokens", "A07 A08 A23 A121 A122")
    column = "gap_p90_s" if over_tokens else "tbt_arxiv_p90_s"
    parts = [change.run(rates.points(name, at_rate), names) for name, names in decided.items()]
    rated = rates.normalised(pd.concat(parts, ignore_index=True), column)
    return rated.assign(requests=rated["requests"].clip(lower=usual))


def of_overload(change: Change) -> ComparisonTable:
    """Chapter 11, on its seven twins; at one limit on TTFT only the order is judged."""
    limit_s = change.parameter(
        "overload", "ttft_limit_s", "A16-A18 A24 A31 A32 A35 A36 A123-A125", overload_claims.PRINTED_TTFT_LIMIT_S
    )
    decided = {
        "after_prefill": "A16 A31 A32 A123",
        "early": "A17 A24 A31 A35 A36 A123-A125",
        "predictive": "A18 A32 A123",
    }
    parts: list[pd.DataFrame] = []
    for point in replays.fitted_points():
        at_limit = point.ttft_limit_s == overload_claims.PRINTED_TTFT_LIMIT_S
        for policy in replays.POLICIES[:3]:
            points = [
                each
                for twin in vary(point, twin=recorded.JUDGED_TWINS)
                for each in replays.with_policies(twin, (policy,), (replays.JUDGED_THRESHOLD,))
            ]
            parts.append(change.run(points, decided[policy] if at_limit else "A123", _replayed))
    judged = pd.concat(parts, ignore_index=True)
    if limit_s != overload_claims.PRINTED_TTFT_LIMIT_S:
        judged = where(judged, ttft_limit_s=limit_s)
    return overload_claims.beside_papers(judged, {}, limit_s)


def _replayed(points: Sequence[Overload]) -> pd.DataFrame:
    """Rows of replays: what is on record as it is there, and the others computed."""
    record = recorded.recorded().dropna(subset=["goodput"]).astype(object)
    record = record.where(record.notna(), None)
    on_record = {replays.key_of(row): row for row in record.to_dict("records")}
    found = [
        on_record.get(replays.key_of(vars_of(_plain(each)))) if _recordable(each) else None for each in points
    ]
    missing = [point for point, row in zip(points, found, strict=True) if row is None]
    kept = pd.DataFrame([row for row in found if row is not None])
    return pd.concat([kept, run(missing)], ignore_index=True).infer_objects()


def _plain(point: Overload) -> Overload:
    """The same replay as the record has it: the baseline has one threshold, unless another is set on arrival."""
    same = point.policy == "after_prefill" and point.arrival_threshold == point.threshold
    return replace(point, arrival_threshold=None) if same else point


def _recordable(point: Overload) -> bool:
    """Whether the record could hold it: only what tells its replays apart differs from the replay of Table 3."""
    same = {name: getattr(replays.REPLAY, name) for name in replays.KEY}
    return replace(point, **same) == replays.REPLAY


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


def verdicts_of(
    chapter: str, told: Callable[[str], object] = _tell, only: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """The verdicts on a chapter's claims as assumed, and at each alternative of each assumption that they use.

    Columns: claim, assumption, alternative, ours, verdict.

    Args:
        chapter: its stem.
        told: is given a line for each computation that begins.
        only: the assumptions whose alternatives are tried, and then no row is as assumed; empty for all.
    """
    make = FIGURES[chapter]
    told(f"{chapter}: {AS_ASSUMED}")
    assumed = _decided(make(Change()))
    if not only:
        for name, row in assumed.items():
            yield {"claim": name, "assumption": "", "alternative": AS_ASSUMED, **_outcome(row)}
    for each in alternatives():
        using = [name for name in assumed if each.assumption in claim(name).grounds.assumptions]
        if not using or each.alternative == NO_OTHER or (only and each.assumption not in only):
            continue
        change = Change(each.how, frozenset(using))
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
    read = argparse.ArgumentParser(prog="python -m mooncake_lab.book.chapters.sensitivity")
    read.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"of {', '.join(FIGURES)}; all by default")
    read.add_argument(
        "--assumption",
        action="append",
        default=[],
        metavar="ID",
        help="compute only the alternatives to this assumption, such as B57; may be given several times",
    )
    asked = read.parse_args(arguments)
    changeable = {each.assumption for each in alternatives()}
    for what, names, known in (("chapter", asked.chapters, FIGURES), ("assumption", asked.assumption, changeable)):
        if unknown := [name for name in names if name not in known]:
            sys.stderr.write(f"no {what} {unknown[0]!r}; there are {', '.join(sorted(known))}\n")
            return 2
    source = commit(carried_folder("measured") / SENSITIVITY)
    for chapter in asked.chapters or FIGURES:
        rows = [row | {"commit": source} for row in verdicts_of(chapter, only=asked.assumption)]
        missing = sum(row["verdict"] == NOT_TRIED for row in rows)
        path = _record(rows, asked.assumption)
        _tell(f"{chapter}: {len(rows)} rows in {path}, of which {missing} alternatives were not tried")
    return 0


def _record(rows: Sequence[dict[str, Any]], only: Collection[str] = ()) -> Path:
    """Put rows in place of those about the same claims, in the order of claims and alternatives.

    Args:
        rows: what was computed.
        only: the assumptions whose alternatives were tried; rows about others stay. Empty for all.
    """
    path = carried_folder("measured") / SENSITIVITY
    kept = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records") if path.is_file() else []
    new = {row["claim"] for row in rows}
    stays = [row for row in kept if row["claim"] not in new or (only and row["assumption"] not in only)]
    of_claim = {each.id: rank for rank, each in enumerate(claims())}
    tried = [("", AS_ASSUMED), *((each.assumption, each.alternative) for each in alternatives())]
    of_alternative = {each: rank for rank, each in enumerate(tried)}

    def place(row: dict[str, Any]) -> tuple[int, int]:
        return of_claim[row["claim"]], of_alternative.get((row["assumption"], row["alternative"]), len(tried))

    table = pd.DataFrame(sorted([*stays, *rows], key=place))
    with complete_file(path) as file:
        file.write(table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode())
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
