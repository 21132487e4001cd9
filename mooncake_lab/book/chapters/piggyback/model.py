"""Chapter 05: SARATHI's model of an iteration, operator by operator, beside the paper."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from mooncake_lab import perf
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.book.paper import curve, fact
from mooncake_lab.book.testbeds.sarathi import TESTBEDS, llama_13b_on_a6000, machine
from mooncake_lab.perf.iteration import Round

FUSED_TOKENS = 256
"""The paper's headline chunk size: chunk and decodes together."""
CHUNKS = (128, 256, 512)
"""The chunk sizes of SARATHI Fig. 9."""
TOTALS = {"1K": 1024, "2K": 2048, "3K": 3072}
LARGEST = {"1K": 18, "2K": 10, "3K": 6}
"""The largest batch that fits on the A6000 at each sequence length (the captions of SARATHI Fig. 9)."""
FIGURE_8, TABLE_4 = "sarathi_fig08_decode_speedup", "sarathi_table4_peak_gains"
FIGURE_9, FIGURE_10 = "sarathi_fig09_gain_vs_pd_ratio", "sarathi_fig10_total_time"
FIGURE_11 = "sarathi_fig11a_gain_over_baseline"
Cell = tuple[str, str, float, float]
"""Place and name of a number of the paper, the number, and the model's."""


def gain(
    cost: perf.IterationCost, work: perf.Workload, fused_tokens: int | None = FUSED_TOKENS, *, filled: bool = False
) -> float:
    """Throughput with piggybacking over throughput without; None never cuts a prompt (Orca-best)."""
    separate = perf.separate_round(cost, work)
    return separate.seconds / perf.piggyback_round(cost, work, fused_tokens, filled=filled).seconds


def balanced(label: str, fused_tokens: int = FUSED_TOKENS) -> perf.Workload:
    """The largest batch of a sequence length, at the P:D ratio that balances chunks and decodes."""
    return perf.Workload.balanced(TOTALS[label], fused_tokens, LARGEST[label])


def rounds(cost: perf.IterationCost, label: str, fused_tokens: int = FUSED_TOKENS) -> dict[str, Round]:
    """A round of `balanced` work in the steady state under each scheme of SARATHI's evaluation."""
    work = balanced(label, fused_tokens)
    return {
        "baseline": perf.separate_round(cost, work),
        "Orca-best": perf.piggyback_round(cost, work),
        "SARATHI": perf.piggyback_round(cost, work, fused_tokens),
    }


def predictions(
    *,
    tiles: bool = True,
    rereads: bool = True,
    printed_ratio: bool = False,
    filled: bool = False,
    a100_share: float = 1.0,
) -> pd.DataFrame:
    """Every number of Table 4 and Figures 8, 9, 10 and 11 that the paper lets us read, and the model's.

    Args:
        tiles: whether the time of an operator jumps at the edges of tiles.
        rereads: whether each chunk reads the keys and values before it again.
        printed_ratio: whether the end-to-end rows of Table 4 and Figure 11a are computed at the printed P:D ratio,
            that of Figure 9a where it has one, and not at the ratio that balances chunks and decodes exactly
            (assumption B35).
        filled: whether chunks there grow where decodes are fewer, so that no last piece is short.
        a100_share: which share of its peak the A100 reaches, over that of the A6000 (assumption B64).
    """
    cost = llama_13b_on_a6000(tiles=tiles, rereads=rereads)
    figures = _figures(cost, printed_ratio=printed_ratio, filled=filled)
    machines = {name: machine(name, tiles=tiles, rereads=rereads, a100_share=a100_share) for name in TESTBEDS}
    cells = [*_table_4(machines, printed_ratio=printed_ratio, filled=filled), *figures]
    table = pd.DataFrame(cells, columns=["place", "cell", "paper", "model"])
    return table.assign(error_percent=100 * (table["model"] / table["paper"] - 1))


@tabulated
def errors_by_term() -> Iterator[dict[str, Any]]:
    """How far the predictions miss with and without tiles and rereads: mean and largest error, in percent."""
    for tiles in (True, False):
        for rereads in (True, False):
            missed = predictions(tiles=tiles, rereads=rereads)["error_percent"].abs()
            yield {"tiles": tiles, "rereads": rereads, "mean_%": missed.mean(), "largest_%": missed.max()}


def printed_row(series: str) -> Mapping[str, float]:
    """A row of SARATHI Table 4 by its columns, e.g. of `LLaMA-13B/A6000/1K`."""
    columns = ("batch_size", "decode_speedup", "end_to_end_speedup", "prefill_to_decode_ratio")
    return {x: fact(TABLE_4, series=series, x=x).value for x in columns}


def _table_4(machines: Mapping[str, perf.IterationCost], *, printed_ratio: bool, filled: bool) -> Iterable[Cell]:
    for name, cost in machines.items():
        for label, total in TOTALS.items():
            printed = printed_row(f"{name}/{label}")
            batch = int(printed["batch_size"])
            cell = f"{name}/{label}, batch {batch}"
            yield "Table 4, decode", cell, printed["decode_speedup"], _speedup(cost, batch, total)
            ratio = printed["prefill_to_decode_ratio"]
            work = perf.Workload.balanced(total, FUSED_TOKENS, batch)
            work = perf.Workload.of_length(total, ratio, batch) if printed_ratio else work
            yield "Table 4, end to end", cell, printed["end_to_end_speedup"], gain(cost, work, filled=filled)


def _figures(cost: perf.IterationCost, *, printed_ratio: bool, filled: bool) -> Iterable[Cell]:
    for series, x, y in _points(FIGURE_8):
        yield "Figure 8", f"{series}, batch {int(x)}", y, _speedup(cost, int(x), TOTALS[series])
    for label, fused, _, y in _peaks_of_figure_9():
        yield "Figure 9a, peak", f"{label}, chunk {fused}", y, gain(cost, balanced(label, fused), fused)
    for name, each in rounds(cost, "1K").items():
        if name != "Orca-best":
            yield "Figure 10, seconds", name, fact(FIGURE_10, series=name).value, each.seconds
    ratios = {label: ratio for label, fused, ratio, _ in _peaks_of_figure_9() if fused == FUSED_TOKENS}
    for label, total in TOTALS.items():
        printed = fact(FIGURE_11, series="SARATHI", x=label).value
        work = balanced(label)
        if printed_ratio and label in ratios:
            work = perf.Workload.of_length(total, ratios[label], LARGEST[label])
        yield "Figure 11a", f"SARATHI, {label}", printed, gain(cost, work, filled=filled)
    yield "Figure 11b, peak", "Orca-best, 1K", fact(FIGURE_11, series="Orca-best").value, orca_peak(cost)[1]


def _points(name: str) -> list[tuple[str, float, float]]:
    """Series, x and y of a curve's points."""
    table = curve(name)
    return [(str(s), float(x), float(y)) for s, x, y in zip(table["series"], table["x"], table["y"], strict=True)]


def _peaks_of_figure_9() -> Iterator[tuple[str, int, float, float]]:
    """Length, chunk, P:D ratio and gain of the points of SARATHI Fig. 9a."""
    for series, x, y in _points(FIGURE_9):
        label, _, fused = series.partition("/chunk ")
        yield label, int(fused), x, y


def _speedup(cost: perf.IterationCost, batch: int, context_tokens: int) -> float:
    accounts = perf.decode_accounts(cost, fused_tokens=FUSED_TOKENS, batch=batch, context_tokens=context_tokens)
    return accounts.alone_s / accounts.marginal_s


def orca_peak(cost: perf.IterationCost) -> tuple[int, float]:
    """The P:D ratio from 1 to 200 at which Orca-best gains most for 1K at the largest batch, and that gain."""
    gains = [(gain(cost, perf.Workload.of_length(TOTALS["1K"], r, LARGEST["1K"]), None), r) for r in range(1, 201)]
    best, ratio = max(gains)
    return ratio, best


@tabulated
def balances() -> Iterator[dict[str, Any]]:
    """The P:D ratios of Table 4 and Fig. 9, the balance of the chunk, and what the text's formula would give."""
    rows: list[tuple[str, int, int, float]] = []
    for series in (f"{name}/{label}" for name in TESTBEDS for label in TOTALS):
        printed = printed_row(series)
        ratio = printed["prefill_to_decode_ratio"]
        rows.append((f"Table 4, {series}", FUSED_TOKENS, int(printed["batch_size"]), ratio))
    for label, fused, x, _ in _peaks_of_figure_9():
        rows.append((f"Figure 9a, {label}/chunk {fused}", fused, LARGEST[label], x))
    for place, fused, batch, printed_ratio in rows:
        found = {"balance": perf.balanced_ratio(fused, batch), "c_over_b_minus_1": fused / (batch - 1)}
        yield {"where": place, "fused_tokens": fused, "batch": batch, "printed": printed_ratio, **found}


@tabulated
def ratio_sweep(
    labels: Sequence[str] = tuple(TOTALS), *, filled: bool = True, tiles: bool = True, rereads: bool = True
) -> Iterator[dict[str, Any]]:
    """Gain over the baseline by P:D ratio (SARATHI Figs. 9 and 11b); chunks fill what absent decodes leave.

    A chunk of 0 stands for Orca-best, which never cuts. Without `filled`, chunks are always as long as beside a
    full batch of decodes, and a short last one stays short (assumption B35). `tiles` and `rereads` are those of
    the machine (assumption B63).
    """
    cost = llama_13b_on_a6000(tiles=tiles, rereads=rereads)
    for label in labels:
        for fused in (*CHUNKS, 0):
            for ratio in range(1, 201):
                work = perf.Workload.of_length(TOTALS[label], ratio, LARGEST[label])
                setting = {"label": label, "batch": LARGEST[label], "fused_tokens": fused, "ratio": ratio}
                yield setting | {"gain": gain(cost, work, fused or None, filled=filled)}


@tabulated
def decode_places(ratios: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What a P:D ratio does to chunks and riders for 1K and the largest batch; chunks fill what decodes leave.

    `places_filled` is the share of the decodes that could ride along which do, `decodes_alone` the share of the
    decode steps without a chunk.
    """
    cost, batch = llama_13b_on_a6000(), LARGEST["1K"]
    for ratio in ratios:
        work = perf.Workload.of_length(TOTALS["1K"], ratio, batch)
        for fused in (*CHUNKS, None):
            found = perf.piggyback_round(cost, work, fused, filled=True)
            beside = work.decode_steps - found.decode_iterations
            yield {
                "ratio": ratio,
                "scheme": f"chunks of {fused}" if fused else "whole prompts",
                "gain": perf.separate_round(cost, work).seconds / found.seconds,
                "prompt_tokens": work.prompt_tokens,
                "decode_steps": work.decode_steps,
                "places_filled": beside * batch / ((batch - 1) * found.hybrid_iterations),
                "decodes_alone": found.decode_iterations / work.decode_steps,
            }


@tabulated
def peaks(labels: Sequence[str] = tuple(TOTALS)) -> Iterator[dict[str, Any]]:
    """Where chunks and decodes balance at the largest batches, and what that gains."""
    cost = llama_13b_on_a6000()
    for label in labels:
        for fused in CHUNKS:
            setting = {"label": label, "fused_tokens": fused, "batch": LARGEST[label]}
            ratio = perf.balanced_ratio(fused, LARGEST[label])
            yield setting | {"ratio": ratio, "gain": gain(cost, balanced(label, fused), fused)}


@tabulated
def beside_orca() -> Iterator[dict[str, Any]]:
    """Baseline, Orca-best and SARATHI at the balance of the largest batch (Fig. 11a)."""
    for label in TOTALS:
        found = rounds(llama_13b_on_a6000(), label)
        for scheme, each in found.items():
            yield {"label": label, "scheme": scheme, "gain": found["baseline"].seconds / each.seconds}


def closed_rounds() -> dict[str, float]:
    """Seconds of a round for 1K in the steady state, by scheme, at the balance of the largest batch."""
    return {scheme: each.seconds for scheme, each in rounds(llama_13b_on_a6000(), "1K").items()}


@tabulated
def account_sweep() -> Iterator[dict[str, Any]]:
    """How much cheaper a decode gets beside a chunk, by three accounts (SARATHI Fig. 8 is the first)."""
    cost = llama_13b_on_a6000()
    for label, total in TOTALS.items():
        for batch in (b for b in (2, 4, 6, 8, 10, 14, 18) if b <= LARGEST[label]):
            found = perf.decode_accounts(cost, fused_tokens=FUSED_TOKENS, batch=batch, context_tokens=total)
            accounts = {"marginal": found.marginal_s, "by_token": found.by_token_s, "by_order": found.by_order_s}
            row: dict[str, Any] = {"label": label, "batch": batch, "alone_ms": 1000 * found.alone_s}
            yield row | {name: found.alone_s / seconds for name, seconds in accounts.items()}


@tabulated
def last_piece_matters() -> Iterator[dict[str, Any]]:
    """One prompt token too many costs a whole iteration (assumption B35): the printed ratio and the exact one."""
    cost, printed = machine(TESTBEDS[1]), printed_row(f"{TESTBEDS[1]}/1K")
    batch = int(printed["batch_size"])
    for ratio in (printed["prefill_to_decode_ratio"], perf.balanced_ratio(FUSED_TOKENS, batch)):
        work = perf.Workload.of_length(TOTALS["1K"], ratio, batch)
        chunk = FUSED_TOKENS - (batch - 1)
        iterations = -(-work.prompt_tokens // chunk)
        yield {
            "ratio": ratio,
            "prompt_tokens": work.prompt_tokens,
            "iterations": iterations,
            "last_piece_tokens": work.prompt_tokens - (iterations - 1) * chunk,
            "gain": gain(cost, work),
        }


@tabulated
def time_per_token(batches: Sequence[int] = (1, 2, 4, 8, 12, 18), tokens: int = 1024) -> Iterator[dict[str, Any]]:
    """Milliseconds a token by operator, prefill and decode, over batch size (SARATHI Fig. 3).

    The linear time is split among its operators by their weights, which is how bytes and FLOPs both split.
    """
    cost, shares = llama_13b_on_a6000(), operator_shares()
    for batch in batches:
        stages = {
            "prefill": (batch * tokens, batch * cost.chunk_attention_s(tokens)),
            "decode": (batch, cost.decode_attention_s(batch * tokens)),
        }
        for stage, (count, attention_s) in stages.items():
            linear_s = cost.linear.seconds(count)
            parts = {name: share * linear_s for name, share in shares.items()} | {"attention": attention_s}
            for name, seconds in parts.items():
                yield {"stage": stage, "batch": batch, "operator": name, "ms": 1000 * seconds / count}


def operator_shares() -> dict[str, float]:
    """The share of each linear operator in the weights of a layer of LLaMA-13B."""
    shape = perf.model_shape("llama-13b")
    weights = {
        "preproj": shape.width * (shape.query_width + 2 * shape.kv_width),
        "postproj": shape.width * shape.query_width,
        "ffn1": (shape.ffn_matrices - 1) * shape.width * shape.ffn_width,
        "ffn2": shape.width * shape.ffn_width,
    }
    return {name: count / shape.layer_parameters for name, count in weights.items()}


@tabulated
def sawtooth(most_tokens: int = 1024) -> Iterator[dict[str, Any]]:
    """Iteration time over its tokens, with tiles and without (SARATHI Fig. 7)."""
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles)
        for tokens in range(1, most_tokens + 1):
            yield {"tokens": tokens, "tiles": tiles, "ms": 1000 * cost.step_s(tokens, 0)}


@tabulated
def breakdown(chunks: Sequence[int] = (256, 512)) -> Iterator[dict[str, Any]]:
    """Where the time of a round goes, with and without piggybacking, at the balance (SARATHI Fig. 10)."""
    for fused in chunks:
        for label in TOTALS:
            for scheme, each in rounds(llama_13b_on_a6000(), label, fused).items():
                setting = {"label": label, "batch": LARGEST[label], "fused_tokens": fused, "scheme": scheme}
                for name, seconds in asdict(each).items():
                    if name.endswith("_s") and scheme != "Orca-best":
                        part = name.removesuffix("_s").replace("_", " ")
                        yield setting | {"part": part, "seconds": seconds}
