"""The log of a live run as tables: the steps of one request, its timeline, and the timelines of a burst."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from mooncake_lab.core import (
    Arrived,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
)
from mooncake_lab.metrics import request_table


def steps(log: Sequence[Record]) -> pd.DataFrame:
    """The one request of a log, by the steps of FAST'25 Fig. 3.

    Returns:
        Rows by step: names of its records, from_ms and to_ms since arrival, and what the records say.
    """
    zero_s = _arrival_s(log)
    rows = [
        {
            "step": step,
            "records": names,
            "from_ms": 1e3 * (start_s - zero_s),
            "to_ms": 1e3 * (end_s - zero_s),
            "what the log says": said,
        }
        for step, names, start_s, end_s, said in _life(log)
    ]
    return pd.DataFrame(rows).set_index("step")


def timeline(log: Sequence[Record], layers: int) -> pd.DataFrame:
    """Rows of where, what, layer, start_ms and end_ms since arrival: every recorded event of one request.

    A piece of KVCache is one layer of a stretch of the prompt; a worker sends the layers of a stretch in order,
    from which `layer` follows.

    Args:
        log: with a record for each layer's move.
        layers: of the model.
    """
    zero_s, moves, rows = _arrival_s(log), 0, list[dict[str, Any]]()
    for record in log:
        start_s, layer = getattr(record, "start_s", record.at_s), -1
        match record:
            case Placed():
                where, what, start_s = "Conductor", "decide", zero_s
            case Prefilled():
                where, what = record.instance, "prefill"
            case Moved():
                where, what, layer = "Messenger", "move", moves % layers
                moves += 1
            case DecodeStretch():
                where, what = record.instance, "decode"
            case FirstToken() | Finished():
                where, what = "client", type(record).__name__
            case _:
                continue
        rows.append({"where": where, "what": what, "layer": layer} | _span_ms(start_s, record.at_s, zero_s))
    return pd.DataFrame(rows)


def lanes(log: Sequence[Record]) -> pd.DataFrame:
    """Rows of request, what (wait, prefill, hand over, decode), start_ms and end_ms since the first arrival."""
    zero_s, since, rows = _arrival_s(log), dict[int, float](), list[dict[str, Any]]()

    def add(key: int, what: str, start_s: float, end_s: float) -> None:
        rows.append({"request": key, "what": what} | _span_ms(start_s, end_s, zero_s))

    for record in log:
        match record:
            case Arrived():
                since[record.request_id] = record.at_s
            case Prefilled():
                add(record.request_id, "wait", since[record.request_id], record.start_s)
                add(record.request_id, "prefill", record.start_s, record.at_s)
                since[record.request_id] = record.at_s
            case FirstToken():
                add(record.request_id, "hand over", since[record.request_id], record.at_s)
            case DecodeStretch():
                for key in record.request_ids:
                    add(key, "decode", record.start_s, record.at_s)
            case _:
                pass
    return pd.DataFrame(rows)


def latencies(log: Sequence[Record]) -> pd.DataFrame:
    """Rows by request: input_tokens, reused_tokens, output_tokens, ttft_ms, tbt_ms (the mean gap)."""
    table = request_table(log)
    reused = {r.request_id: r.reused_tokens for r in log if isinstance(r, Prefilled)}
    return pd.DataFrame(
        {
            "input_tokens": table["input_tokens"],
            "reused_tokens": [reused[key] for key in table.index],
            "output_tokens": table["output_tokens"],
            "ttft_ms": 1e3 * table["ttft_s"],
            "tbt_ms": 1e3 * table["tbt_arxiv_s"],
        },
        index=table.index,
    )


def _life(log: Sequence[Record]) -> Iterable[tuple[str, str, float, float, str]]:
    """Step, the names of its records, when it began and ended, and what they say."""
    placed = next(r for r in log if isinstance(r, Placed))
    prefilled = next(r for r in log if isinstance(r, Prefilled))
    first = next(r for r in log if isinstance(r, FirstToken))
    moves = [r for r in log if isinstance(r, Moved)]
    decoded = [r for r in log if isinstance(r, DecodeStretch)]
    early = sum(r.at_s < prefilled.at_s for r in moves)
    chosen = f"{placed.prefill_instance}, then {placed.decode_instance}"
    yield "choose", "Arrived, Placed", _arrival_s(log), placed.at_s, chosen
    # the reused layers are the first to be sent on: by then they have been read, but sending is another thread's
    sent_s = min(r.start_s for r in moves) if prefilled.reused_tokens else prefilled.start_s
    read_s = min(sent_s, prefilled.at_s)
    reused = f"{prefilled.reused_tokens} prompt tokens found in the store"
    yield "1 KVCache reuse", "Prefilled", prefilled.start_s, read_s, reused
    computed = f"{prefilled.computed_tokens} prompt tokens computed"
    yield "2 incremental prefill", "Prefilled", read_s, prefilled.at_s, computed
    moved = f"{len(moves)} pieces, {sum(r.bytes for r in moves):,} bytes; {early} during prefill"
    yield "3 KVCache transfer", "Moved", min(r.start_s for r in moves), max(r.at_s for r in moves), moved
    shown = f"the first token, then {sum(r.steps for r in decoded)} steps"
    yield "4 decode", "FirstToken, DecodeStretch, Finished", first.at_s, log[-1].at_s, shown


def _arrival_s(log: Iterable[Record]) -> float:
    return next(record.at_s for record in log if isinstance(record, Arrived))


def _span_ms(start_s: float, end_s: float, zero_s: float) -> dict[str, float]:
    return {"start_ms": 1e3 * (start_s - zero_s), "end_ms": 1e3 * (end_s - zero_s)}
