"""Chapter 05: SARATHI's model of an iteration, operator by operator, beside the paper."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from mooncake_lab.paper import curve, fact
from mooncake_lab.perf import (
    IterationCost,
    Workload,
    balanced_ratio,
    decode_accounts,
    model_shape,
    piggyback_round,
    separate_round,
)
from mooncake_lab.testbeds.sarathi import TESTBEDS, llama_13b_on_a6000, machine

FUSED_TOKENS = 256
"""The paper's headline chunk size: chunk and decodes together."""
CHUNKS = (128, 256, 512)
"""The chunk sizes of SARATHI Fig. 9."""
TOTALS = {"1K": 1024, "2K": 2048, "3K": 3072}
LARGEST = {"1K": 18, "2K": 10, "3K": 6}
"""The largest batch that fits on the A6000 at each sequence length (the captions of SARATHI Fig. 9)."""
FIGURE_8, TABLE_4, FIGURE_9 = (
    "sarathi_fig08_decode_speedup",
    "sarathi_table4_peak_gains",
    "sarathi_fig09_gain_vs_pd_ratio",
)
FIGURE_10, FIGURE_11 = "sarathi_fig10_total_time", "sarathi_fig11a_gain_over_baseline"


def gain(
    cost: IterationCost, work: Workload, fused_tokens: int | None = FUSED_TOKENS, *, filled: bool = False
) -> float:
    """Throughput with piggybacking over throughput without; None never cuts a prompt (Orca-best)."""
    return separate_round(cost, work).seconds / piggyback_round(cost, work, fused_tokens, filled=filled).seconds


def predictions(*, tiles: bool = True, rereads: bool = True) -> pd.DataFrame:
    """Every number of Table 4 and Figures 8, 9, 10 and 11 that the paper lets us read, and the model's.

    Returns:
        One row a cell: place, cell, paper, model, error_percent.
    """
    rows = [
        *_table_4(tiles=tiles, rereads=rereads),
        *_figures(llama_13b_on_a6000(tiles=tiles, rereads=rereads)),
    ]
    table = pd.DataFrame(rows, columns=["place", "cell", "paper", "model"])
    return table.assign(error_percent=100 * (table["model"] / table["paper"] - 1))


def errors_by_term() -> pd.DataFrame:
    """How far the predictions miss with and without tiles and rereads: mean and largest error, in percent."""
    rows: list[dict[str, Any]] = []
    for tiles in (True, False):
        for rereads in (True, False):
            missed = predictions(tiles=tiles, rereads=rereads)["error_percent"].abs()
            rows.append({"tiles": tiles, "rereads": rereads, "mean_%": missed.mean(), "largest_%": missed.max()})
    return pd.DataFrame(rows)


def _table_4(*, tiles: bool, rereads: bool) -> Iterable[tuple[str, str, float, float]]:
    for name in TESTBEDS:
        cost = machine(name, tiles=tiles, rereads=rereads)
        for label, total in TOTALS.items():
            series = f"{name}/{label}"
            batch = int(fact(TABLE_4, series=series, x="batch_size").value)
            speedup = _speedup(cost, batch, total)
            work = Workload.balanced(total, FUSED_TOKENS, batch)
            yield (
                "Table 4, decode",
                f"{series}, batch {batch}",
                fact(TABLE_4, series=series, x="decode_speedup").value,
                speedup,
            )
            yield (
                "Table 4, end to end",
                f"{series}, batch {batch}",
                fact(TABLE_4, series=series, x="end_to_end_speedup").value,
                gain(cost, work),
            )


def _figures(cost: IterationCost) -> Iterable[tuple[str, str, float, float]]:
    for series, x, y in _points(FIGURE_8):
        model = _speedup(cost, int(x), TOTALS[series])
        yield "Figure 8", f"{series}, batch {int(x)}", y, model
    for series, _, y in _points(FIGURE_9):
        label, _, fused = series.partition("/chunk ")
        work = Workload.balanced(TOTALS[label], int(fused), LARGEST[label])
        yield "Figure 9a, peak", f"{label}, chunk {fused}", y, gain(cost, work, int(fused))
    work = Workload.balanced(TOTALS["1K"], FUSED_TOKENS, LARGEST["1K"])
    seconds = {"baseline": separate_round(cost, work), "SARATHI": piggyback_round(cost, work, FUSED_TOKENS)}
    for name, each in seconds.items():
        yield "Figure 10, seconds", name, fact(FIGURE_10, series=name).value, each.seconds
    for label, total in TOTALS.items():
        work = Workload.balanced(total, FUSED_TOKENS, LARGEST[label])
        yield "Figure 11a", f"SARATHI, {label}", fact(FIGURE_11, series="SARATHI", x=label).value, gain(cost, work)
    yield "Figure 11b, peak", "Orca-best, 1K", fact(FIGURE_11, series="Orca-best").value, orca_peak(cost)[1]


def _points(name: str) -> list[tuple[str, float, float]]:
    """Series, x and y of a curve's points."""
    table = curve(name)
    columns = (table["series"].tolist(), table["x"].tolist(), table["y"].tolist())
    return [(str(series), float(x), float(y)) for series, x, y in zip(*columns, strict=True)]


def _speedup(cost: IterationCost, batch: int, context_tokens: int) -> float:
    accounts = decode_accounts(cost, fused_tokens=FUSED_TOKENS, batch=batch, context_tokens=context_tokens)
    return accounts.alone_s / accounts.marginal_s


def orca_peak(cost: IterationCost) -> tuple[int, float]:
    """The P:D ratio from 1 to 200 at which Orca-best gains most for 1K at the largest batch, and that gain."""
    gains = [(gain(cost, Workload.of_length(TOTALS["1K"], r, LARGEST["1K"]), None), r) for r in range(1, 201)]
    best, ratio = max(gains)
    return ratio, best


def balances() -> pd.DataFrame:
    """The P:D ratios of Table 4 and Fig. 9, the balance of the chunk, and what the text's formula would give.

    Returns:
        One row a setting: where, fused_tokens, batch, printed, balance, c_over_b_minus_1.
    """
    rows: list[tuple[str, int, int, float]] = []
    for name in TESTBEDS:
        for label in TOTALS:
            series = f"{name}/{label}"
            batch = int(fact(TABLE_4, series=series, x="batch_size").value)
            printed = fact(TABLE_4, series=series, x="prefill_to_decode_ratio").value
            rows.append((f"Table 4, {series}", FUSED_TOKENS, batch, printed))
    for series, x, _ in _points(FIGURE_9):
        label, _, fused = series.partition("/chunk ")
        rows.append((f"Figure 9a, {series}", int(fused), LARGEST[label], x))
    table = pd.DataFrame(rows, columns=["where", "fused_tokens", "batch", "printed"])
    pairs = list(zip(table["fused_tokens"], table["batch"], strict=True))
    return table.assign(
        balance=[balanced_ratio(fused, batch) for fused, batch in pairs],
        c_over_b_minus_1=[fused / (batch - 1) for fused, batch in pairs],
    )


def ratio_sweep(labels: Sequence[str] = tuple(TOTALS)) -> pd.DataFrame:
    """Gain over the baseline by P:D ratio (SARATHI Figs. 9 and 11b); chunks fill what absent decodes leave.

    Returns:
        Rows of label, batch, fused_tokens (0 stands for Orca-best, which never cuts), ratio, gain.
    """
    cost = llama_13b_on_a6000()
    rows: list[dict[str, Any]] = []
    for label in labels:
        for fused in (*CHUNKS, 0):
            for ratio in range(1, 201):
                work = Workload.of_length(TOTALS[label], ratio, LARGEST[label])
                reached = gain(cost, work, fused or None, filled=True)
                rows.append(
                    {
                        "label": label,
                        "batch": LARGEST[label],
                        "fused_tokens": fused,
                        "ratio": ratio,
                        "gain": reached,
                    }
                )
    return pd.DataFrame(rows)


def seats(ratios: Sequence[int]) -> pd.DataFrame:
    """What a P:D ratio does to chunks and riders for 1K and the largest batch; chunks fill what decodes leave.

    Returns:
        One row a ratio and scheme: ratio, scheme, gain, prompt_tokens, decode_steps, seats_filled (share of the
        decodes that could ride along which do), decodes_alone (share of the decode steps without a chunk).
    """
    cost, batch = llama_13b_on_a6000(), LARGEST["1K"]
    rows: list[dict[str, Any]] = []
    for ratio in ratios:
        work = Workload.of_length(TOTALS["1K"], ratio, batch)
        asked = {"prompt_tokens": work.prompt_tokens, "decode_steps": work.decode_steps}
        for fused in (*CHUNKS, None):
            found = piggyback_round(cost, work, fused, filled=True)
            seated = work.decode_steps - found.decode_iterations
            rows.append(
                {
                    "ratio": ratio,
                    "scheme": f"chunks of {fused}" if fused else "whole prompts",
                    "gain": separate_round(cost, work).seconds / found.seconds,
                    **asked,
                    "seats_filled": seated * batch / ((batch - 1) * found.hybrid_iterations),
                    "decodes_alone": found.decode_iterations / work.decode_steps,
                }
            )
    return pd.DataFrame(rows)


def peaks(labels: Sequence[str] = tuple(TOTALS)) -> pd.DataFrame:
    """Where chunks and decodes balance at the largest batches: rows of label, fused_tokens, batch, ratio, gain."""
    cost = llama_13b_on_a6000()
    rows: list[dict[str, Any]] = []
    for label in labels:
        batch = LARGEST[label]
        for fused in CHUNKS:
            reached = gain(cost, Workload.balanced(TOTALS[label], fused, batch), fused)
            ratio = balanced_ratio(fused, batch)
            rows.append({"label": label, "fused_tokens": fused, "batch": batch, "ratio": ratio, "gain": reached})
    return pd.DataFrame(rows)


def beside_orca(fused_tokens: int = FUSED_TOKENS) -> pd.DataFrame:
    """Baseline, Orca-best and SARATHI at the balance of the largest batch (Fig. 11a): label, scheme, gain."""
    cost = llama_13b_on_a6000()
    rows: list[dict[str, Any]] = []
    for label, total in TOTALS.items():
        work = Workload.balanced(total, fused_tokens, LARGEST[label])
        gains = {"baseline": 1.0, "Orca-best": gain(cost, work, None), "SARATHI": gain(cost, work, fused_tokens)}
        rows += [{"label": label, "scheme": scheme, "gain": each} for scheme, each in gains.items()]
    return pd.DataFrame(rows)


def closed_rounds() -> dict[str, float]:
    """Seconds of a round for 1K in the steady state, by scheme, at the balance of the largest batch."""
    cost, work = llama_13b_on_a6000(), Workload.balanced(TOTALS["1K"], FUSED_TOKENS, LARGEST["1K"])
    return {
        "baseline": separate_round(cost, work).seconds,
        "Orca-best": piggyback_round(cost, work).seconds,
        "SARATHI": piggyback_round(cost, work, FUSED_TOKENS).seconds,
    }


def account_sweep() -> pd.DataFrame:
    """How much cheaper a decode gets beside a chunk, by three accounts (SARATHI Fig. 8 is the first).

    Returns:
        Rows of label, batch, alone_ms, and the speed-ups marginal, by_token, by_order.
    """
    cost = llama_13b_on_a6000()
    rows: list[dict[str, Any]] = []
    for label, total in TOTALS.items():
        for batch in (b for b in (2, 4, 6, 8, 10, 14, 18) if b <= LARGEST[label]):
            found = decode_accounts(cost, fused_tokens=FUSED_TOKENS, batch=batch, context_tokens=total)
            rows.append(
                {
                    "label": label,
                    "batch": batch,
                    "alone_ms": 1000 * found.alone_s,
                    "marginal": found.alone_s / found.marginal_s,
                    "by_token": found.alone_s / found.by_token_s,
                    "by_order": found.alone_s / found.by_order_s,
                }
            )
    return pd.DataFrame(rows)


def last_piece_matters() -> pd.DataFrame:
    """One prompt token too many costs a whole iteration (assumption B35): the printed ratio and the exact one.

    Returns:
        One row a ratio: ratio, prompt_tokens, iterations, last_piece_tokens, gain.
    """
    cost, series, total = machine(TESTBEDS[1]), f"{TESTBEDS[1]}/1K", TOTALS["1K"]
    batch = int(fact(TABLE_4, series=series, x="batch_size").value)
    printed = fact(TABLE_4, series=series, x="prefill_to_decode_ratio").value
    rows: list[dict[str, float]] = []
    for ratio in (printed, balanced_ratio(FUSED_TOKENS, batch)):
        work = Workload.of_length(total, ratio, batch)
        chunk = FUSED_TOKENS - (batch - 1)
        iterations = -(-work.prompt_tokens // chunk)
        rows.append(
            {
                "ratio": ratio,
                "prompt_tokens": work.prompt_tokens,
                "iterations": iterations,
                "last_piece_tokens": work.prompt_tokens - (iterations - 1) * chunk,
                "gain": gain(cost, work),
            }
        )
    return pd.DataFrame(rows)


def time_per_token(batches: Sequence[int] = (1, 2, 4, 8, 12, 18), tokens: int = 1024) -> pd.DataFrame:
    """Milliseconds a token by operator, prefill and decode, over batch size (SARATHI Fig. 3).

    The linear time is split among its operators by their weights, which is how bytes and FLOPs both split.

    Returns:
        Rows of stage, batch, operator, ms.
    """
    cost, shares = llama_13b_on_a6000(), operator_shares()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        stages = {
            "prefill": (batch * tokens, batch * cost.chunk_attention_s(tokens)),
            "decode": (batch, cost.decode_attention_s(batch * tokens)),
        }
        for stage, (count, attention_s) in stages.items():
            linear_s = cost.linear.seconds(count)
            parts = {name: share * linear_s for name, share in shares.items()} | {"attention": attention_s}
            rows += [
                {"stage": stage, "batch": batch, "operator": name, "ms": 1000 * seconds / count}
                for name, seconds in parts.items()
            ]
    return pd.DataFrame(rows)


def operator_shares() -> dict[str, float]:
    """The share of each linear operator in the weights of a layer of LLaMA-13B."""
    shape = model_shape("llama-13b")
    weights = {
        "preproj": shape.width * (shape.query_width + 2 * shape.kv_width),
        "postproj": shape.width * shape.query_width,
        "ffn1": (shape.ffn_matrices - 1) * shape.width * shape.ffn_width,
        "ffn2": shape.width * shape.ffn_width,
    }
    return {name: count / shape.layer_parameters for name, count in weights.items()}


def sawtooth(most_tokens: int = 1024) -> pd.DataFrame:
    """Iteration time over its tokens, with tiles and without (SARATHI Fig. 7): tokens, tiles, ms."""
    rows: list[dict[str, Any]] = []
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles)
        rows += [{"tokens": n, "tiles": tiles, "ms": 1000 * cost.step_s(n, 0)} for n in range(1, most_tokens + 1)]
    return pd.DataFrame(rows)


def breakdown(chunks: Sequence[int] = (256, 512)) -> pd.DataFrame:
    """Where the time of a round goes, with and without piggybacking, at the balance (SARATHI Fig. 10).

    Returns:
        Rows of label, batch, fused_tokens, scheme, part, seconds.
    """
    cost = llama_13b_on_a6000()
    rows: list[dict[str, Any]] = []
    for fused in chunks:
        for label, total in TOTALS.items():
            batch = LARGEST[label]
            work = Workload.balanced(total, fused, batch)
            rounds = {"baseline": separate_round(cost, work), "SARATHI": piggyback_round(cost, work, fused)}
            for scheme, each in rounds.items():
                parts = {name: value for name, value in asdict(each).items() if name.endswith("_s")}
                rows += [
                    {
                        "label": label, "batch": batch, "fused_tokens": fused, "scheme": scheme,
                        "part": name.removesuffix("_s").replace("_", " "), "seconds": seconds,
                    }
                    for name, seconds in parts.items()
                ]  # fmt: skip  # one row of a table
    return pd.DataFrame(rows)
