"""Chapter 05: piggybacked decodes on the engine, batching policies, and the verdicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import pandas as pd

from mooncake_lab.batching import BatchingPolicy, Limits, Orca, Plan, Progress, RequestLevel, Sarathi, trace_plans
from mooncake_lab.bench.measuring import Clock, measured_by, one_thread, random_prompt
from mooncake_lab.book.chapters.piggyback.model import CHUNKS, FUSED_TOKENS, LARGEST, TOTALS, orca_peak
from mooncake_lab.book.experiments import at_scale
from mooncake_lab.book.paper import ComparisonTable, claimed, comparison_table, detail
from mooncake_lab.book.testbeds.sarathi import llama_13b_on_a6000, machine
from mooncake_lab.core import sum_in_order
from mooncake_lab.engine import CoupledEngine, EngineSettings, GenerationRequest, LlamaModel, load_model
from mooncake_lab.perf import Workload, balanced_ratio, decode_accounts
from mooncake_lab.simulation import plan_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRiders:
    """Decodes alone, a chunk alone, and both in one iteration, on the real engine; paired within each round.

    The requests that decode are prefilled once and go on decoding through all rounds, so their contexts grow by a
    few tokens. Run it with `cache=False`.
    """

    model: str = "lab-30m"
    fused_tokens: tuple[int, ...] = (64, 128, 256)
    riders: tuple[int, ...] = (1, 3, 7)
    context_tokens: int = 256
    rounds: int = 7
    seed: int = 0
    device: str = "cpu"

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a width, number of riders and round: the three times, in seconds."""
        with one_thread(self.device) as clock:
            room = (
                self.context_tokens + 8 * (self.rounds + 2) * len(self.fused_tokens) + 2 * max(self.fused_tokens)
            )
            model = load_model(f"random:{self.model}", device=self.device, seed=self.seed, positions=room)
            decoding = {count: self._decoding(model, count, room, clock) for count in self.riders}
            alone = self._engine(model, 1, room, clock)
            for number in range(self.rounds + 1):
                for count, engine in decoding.items():
                    for fused in self.fused_tokens:
                        times = self._round(alone, engine, fused, fused - count, model.config.vocabulary)
                        if number:  # round 0 warms up
                            yield {"round": number, "fused": fused, "decodes": count, **times,
                                   "machine": measured_by(self.device)}  # fmt: skip

    def _engine(self, model: LlamaModel, count: int, room: int, clock: Clock) -> CoupledEngine:
        return _engine(model, Sarathi(), count + 1, tokens=room, batch_tokens=room, clock=clock)

    def _decoding(self, model: LlamaModel, count: int, room: int, clock: Clock) -> CoupledEngine:
        """An engine in which `count` requests decode."""
        engine = self._engine(model, count, room, clock)
        for number in range(count):
            prompt = random_prompt(self.context_tokens, model.config.vocabulary, seed=self.seed, number=number + 1)
            engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=room - self.context_tokens))
        for _ in range(count):
            engine.step()
        return engine

    def _round(
        self, alone: CoupledEngine, both: CoupledEngine, fused: int, chunk: int, vocabulary: int
    ) -> dict[str, float]:
        """A full-width chunk alone, decodes alone, and a shorter chunk beside them."""
        prompt = random_prompt(fused, vocabulary, seed=self.seed)
        return {
            "chunk_s": _step_with(alone, prompt),
            "decodes_s": _last_step_s(both),
            "both_s": _step_with(both, prompt[:chunk]),
        }


def _engine(
    model: LlamaModel, policy: BatchingPolicy, requests: int, *, tokens: int, batch_tokens: int, clock: Clock
) -> CoupledEngine:
    """An engine for a number of requests of at most `tokens` each."""
    settings = EngineSettings(
        prefix_caching=False,
        block_size_tokens=BLOCK_TOKENS,
        cache_blocks=requests * -(-tokens // BLOCK_TOKENS),
        max_batch_tokens=batch_tokens,
        max_requests=requests,
    )
    return CoupledEngine(model, policy, settings, clock=clock)


def _step_with(engine: CoupledEngine, prompt: Any) -> float:
    """One iteration with this prompt in it, which is gone afterwards."""
    engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=1))
    return _last_step_s(engine)


def _last_step_s(engine: CoupledEngine) -> float:
    engine.step()
    last = engine.engine.log[-1]
    return last.end_s - last.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGain:
    """Equal requests, really generated under each scheme at the balanced P:D ratio; paired within each round."""

    model: str = "lab-30m"
    fused_tokens: int = 128
    total_tokens: int = 256
    batch: int = 8
    requests: int = 16
    rounds: int = 3
    seed: int = 0
    device: str = "cpu"

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a scheme and round: seconds, gain over the baseline of the round, and whether tokens agree."""
        work = Workload.balanced(self.total_tokens, self.fused_tokens, self.batch)
        with one_thread(self.device) as clock:
            model = load_model(
                f"random:{self.model}", device=self.device, seed=self.seed, positions=self.total_tokens + 1
            )
            for number in range(self.rounds):
                runs = {
                    name: self._run(model, policy_of(name, self.fused_tokens), work, clock) for name in POLICIES
                }
                seconds, tokens = runs["baseline"]
                for name, (each, generated) in runs.items():
                    yield {
                        "round": number,
                        "scheme": name,
                        "prompt_tokens": work.prompt_tokens,
                        "decode_steps": work.decode_steps,
                        "seconds": each,
                        "gain": seconds / each,
                        "same_tokens": generated == tokens,
                        "machine": measured_by(self.device),
                    }

    def _run(self, model: LlamaModel, policy: BatchingPolicy, work: Workload, clock: Clock) -> tuple[float, Any]:
        longest, most = work.prompt_tokens + work.decode_steps + 1, self.batch * work.prompt_tokens
        engine = _engine(model, policy, self.batch, tokens=longest, batch_tokens=most, clock=clock)
        for number in range(self.requests):
            prompt = random_prompt(work.prompt_tokens, model.config.vocabulary, seed=self.seed, number=number)
            engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=work.decode_steps + 1))
        outputs = engine.run()
        log = engine.engine.log
        return sum_in_order(each.end_s - each.start_s for each in log), [output.tokens for output in outputs]


def measured_riders(scale: str, *, seed: int = 0) -> MeasuredRiders:
    """What is measured of single iterations at a scale."""
    larger: dict[str, Any] = {"context_tokens": 1024, "rounds": 15}
    return at_scale(
        MeasuredRiders(seed=seed),
        scale,
        smoke={"model": "lab-8m", "fused_tokens": (32, 64), "riders": (1, 3), "context_tokens": 64, "rounds": 2},
        full={"model": "lab-100m", "riders": (1, 3, 7, 15), **larger},
        gpu={"model": "llama3-8b", "fused_tokens": (128, 256, 512, 1024), "riders": (1, 3, 7, 17, 63), **larger}
        | {"device": "cuda"},
    )


def measured_gain(scale: str, *, seed: int = 0) -> MeasuredGain:
    """What is measured end to end at a scale."""
    return at_scale(
        MeasuredGain(seed=seed),
        scale,
        smoke={"model": "lab-8m", "fused_tokens": 32, "total_tokens": 64, "batch": 4, "requests": 8, "rounds": 2},
        full={"model": "lab-100m", "total_tokens": 1024, "requests": 24, "rounds": 5},
        gpu={"model": "llama3-8b", "fused_tokens": 256, "total_tokens": 1024, "batch": 18, "requests": 72}
        | {"rounds": 5, "device": "cuda"},
    )


def rider_accounts(measured: pd.DataFrame) -> pd.DataFrame:
    """Three accounts of a decode's cost from measured iterations, as in the model; medians over the rounds.

    `by_token` splits the chunk's time by tokens and adds what the decodes made the iteration longer; all of the
    chunk's own attention is in it too, so it is an upper bound here.

    Returns:
        Rows of fused, decodes, alone_ms, marginal_ms, by_token_ms, by_order_ms, marginal's quartiles, and
        apart_over_together: a chunk and then decodes, over both at once.
    """
    each = measured.assign(
        alone_ms=1000 * measured["decodes_s"] / measured["decodes"],
        marginal_ms=1000 * (measured["both_s"] - measured["chunk_s"]) / measured["decodes"],
        by_order_ms=500 * (measured["both_s"] - measured["chunk_s"] + measured["decodes_s"]) / measured["decodes"],
    )
    separate_s = measured["chunk_s"] * (1 - measured["decodes"] / measured["fused"]) + measured["decodes_s"]
    each["apart_over_together"] = separate_s / measured["both_s"]
    each["by_token_ms"] = each["marginal_ms"] + 1000 * measured["chunk_s"] / measured["fused"]
    accounts = ["alone_ms", "marginal_ms", "by_token_ms", "by_order_ms", "apart_over_together"]
    grouped = each.groupby(["fused", "decodes"])
    table = grouped[accounts].median()
    table["marginal_low_ms"] = grouped["marginal_ms"].quantile(0.25)
    table["marginal_high_ms"] = grouped["marginal_ms"].quantile(0.75)
    return table.reset_index()


def gain_medians(measured: pd.DataFrame) -> pd.DataFrame:
    """Median gain of each scheme over the baseline, with its extremes: scheme, gain, least, most, seconds."""
    grouped = measured.groupby("scheme", sort=False).agg(
        gain=("gain", "median"), least=("gain", "min"), most=("gain", "max"), seconds=("seconds", "median")
    )
    return grouped.reset_index()


BLOCK_TOKENS: Final = 16
POLICIES: Final = ("baseline", "Orca-best", "SARATHI")
"""The schemes of SARATHI's evaluation: prompts together and then decodes; whole prompts; chunks."""


def policy_of(name: str, fused_tokens: int) -> BatchingPolicy:
    """The batching policy behind a name of SARATHI's evaluation.

    Raises:
        ValueError: naming those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"no scheme {name!r}; allowed are {', '.join(POLICIES)}")
    made: dict[str, BatchingPolicy] = {
        "baseline": RequestLevel(),
        "Orca-best": Orca(max_prefills=1),
        "SARATHI": Sarathi(chunk_tokens=fused_tokens, chunk="fixed"),
    }
    return made[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledRun:
    """Equal requests under a real batching policy, every iteration timed by the cost of a SARATHI testbed."""

    testbed: str = "LLaMA-13B/A6000"
    scheme: str = "SARATHI"
    fused_tokens: int = 256
    total_tokens: int = 1024
    batch: int = 18
    rounds: int = 4
    """Requests over batch size: with many, the ramps at both ends matter less."""

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row: seconds a round, iterations by kind, and the seconds spent in each kind."""
        work = Workload.balanced(self.total_tokens, self.fused_tokens, self.batch)
        cost = machine(self.testbed)
        plans = [step.plan for step in _log(work, policy_of(self.scheme, self.fused_tokens), self.rounds)]
        seconds = [plan_s(cost, plan) for plan in plans]
        kinds = [_kind(plan) for plan in plans]
        yield {
            "prompt_tokens": work.prompt_tokens,
            "decode_steps": work.decode_steps,
            "seconds_a_round": sum_in_order(seconds) / self.rounds,
            **{f"{kind}_iterations": kinds.count(kind) for kind in ("prefill", "hybrid", "decode")},
        }


def _kind(plan: Plan) -> str:
    return "hybrid" if plan.prefills and plan.decodes else "prefill" if plan.prefills else "decode"


def _log(work: Workload, policy: BatchingPolicy, rounds: int) -> Sequence[Any]:
    count, output = rounds * work.batch, work.decode_steps + 1  # the prefill gives the first token
    requests = [
        Progress(request_id=i, arrival=i, prompt_tokens=work.prompt_tokens, max_new_tokens=output)
        for i in range(count)
    ]
    capacity = work.batch * -(-(work.prompt_tokens + output) // BLOCK_TOKENS)
    limits = Limits(
        max_batch_tokens=work.batch * (work.prompt_tokens + 1),
        max_requests=work.batch,
        block_size_tokens=BLOCK_TOKENS,
        capacity_blocks=capacity,
        free_blocks=capacity,
    )
    return trace_plans(policy, requests, limits, dict.fromkeys(range(count), output))


def beside_closed_form(modelled: pd.DataFrame, expected: Mapping[str, float]) -> pd.DataFrame:
    """Simulated rounds beside closed ones: scheme, simulated_s, closed_s, apart_percent (ramps at both ends)."""
    closed_s = [expected[scheme] for scheme in modelled["scheme"]]
    table = modelled[["scheme"]].assign(simulated_s=modelled["seconds_a_round"], closed_s=closed_s)
    return table.assign(apart_percent=100 * (table["simulated_s"] / table["closed_s"] - 1))


_END, _DECODE = "Table 4, end to end", "Table 4, decode"
_ROWS: Final = {
    "S01": (_END, "LLaMA-13B/A6000/1K"),
    "S03": (_END, "LLaMA-33B/A100/1K"),
    "S04": (_DECODE, "LLaMA-13B/A6000/1K"),
    "S28": (_END, "LLaMA-13B/A6000/2K"),
    "S29": (_DECODE, "LLaMA-13B/A6000/2K"),
    "S30": (_END, "LLaMA-13B/A6000/3K"),
    "S31": (_DECODE, "LLaMA-13B/A6000/3K"),
    "S32": (_DECODE, "LLaMA-33B/A100/1K"),
    "S33": (_END, "LLaMA-33B/A100/2K"),
    "S34": (_DECODE, "LLaMA-33B/A100/2K"),
    "S35": (_END, "LLaMA-33B/A100/3K"),
    "S36": (_DECODE, "LLaMA-33B/A100/3K"),
}
"""Claims about one row of Table 4."""


def beside_papers(
    cells: pd.DataFrame, sweep: pd.DataFrame, *, tiles: bool = True, rereads: bool = True
) -> ComparisonTable:
    """SARATHI's claims from the model of the A6000; the step at a tile needs the GPU.

    Args:
        cells: rows of `predictions`.
        sweep: rows of `ratio_sweep` with those of 1K.
        tiles: whether times of the machine jump at the edges of tiles (assumption B63).
        rereads: whether each chunk reads the keys and values before it again (likewise).
    """
    found: dict[tuple[str, str], float] = cells.set_index(["place", "cell"])["model"].to_dict()
    of_table = {(place, cell.partition(",")[0]): model for (place, cell), model in found.items()}
    cost = llama_13b_on_a6000(tiles=tiles, rereads=rereads)
    mixed = decode_accounts(cost, fused_tokens=TOTALS["1K"], batch=4, context_tokens=TOTALS["1K"])
    ours: dict[str, float | None] = {name: of_table[row] for name, row in _ROWS.items()} | {
        "S02": found["Figure 11a", "SARATHI, 1K"],
        "S05": found["Figure 8", "1K, batch 2"],
        "S40": median_gain(sweep, FUSED_TOKENS),
        "S44": found["Figure 8", "2K, batch 2"],
        "S45": found["Figure 8", "3K, batch 2"],
        "S46": found["Figure 8", "1K, batch 18"],
        "S06": mixed.alone_s / mixed.marginal_s,
        "S09": None,
        "S12": orca_peak(cost)[1],
        "S16": balanced_ratio(FUSED_TOKENS, LARGEST["1K"]),
    }
    best = detail(claimed("S40", median_gain(sweep, *CHUNKS)), "the best chunk at each ratio")
    return comparison_table([*(claimed(name, ours[name]) for name in sorted(ours)), best])


def median_gain(sweep: pd.DataFrame, *fused_tokens: int) -> float:
    """Over the P:D ratios of `ratio_sweep` for 1K: the median gain of the best of these chunks at each ratio."""
    rows = sweep[(sweep["label"] == "1K") & sweep["fused_tokens"].isin(fused_tokens)]
    best: dict[int, float] = rows.pivot_table("gain", "ratio", aggfunc="max")["gain"].to_dict()
    return median(best.values())
