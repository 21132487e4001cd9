"""TTFT of the second turn of a conversation, by the place where its prefix lies, beside recomputation.

    python benchmarks/second_turn.py --model random:lab-30m --tokens 1024 --rounds 5

Each place has a live cluster of its own. A round is a first turn, requests that move its KVCache to the place, the
second turn, and a prompt of the same length that shares no prefix. The medians over the rounds are printed beside
the prediction of the latency model that the cluster measured at its start. Only ratios of one row may be compared,
because other processes use the same cores.
"""  # noqa: INP001  # scripts, not a package

import dataclasses
import json
import statistics
import tempfile
import time
from typing import Annotated, Any

import typer

from mooncake_lab.conductor import ClusterView, Estimator, LatencyEstimator, Placement
from mooncake_lab.core import Arrived, FirstToken, Moved, Request, TracedRequest
from mooncake_lab.serving import LiveCluster, LiveSpec

BLOCK = 64
NEW_TOKENS = BLOCK + 1
"""Of the second turn: what is not in the first."""
PLACES: dict[str, tuple[str, ...]] = {
    "dram": (),
    "worker": (),
    "ssd": ("prefill-0/ssd",),
    "remote": ("pool",),
    "mooncake": ("pool",),
}
"""Where a prefix may lie, and which source its bytes must come from."""


@dataclasses.dataclass(frozen=True)
class TakeTurns:
    """Prefill on worker `id % workers`, and fetch what another holds more."""

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The worker whose turn it is."""
        here = view.prefill[request.id % len(view.prefill)]
        best = max(view.prefill, key=lambda each: each.matched_blocks)
        local, most = (min(each.matched_blocks * BLOCK, request.input_tokens - 1) for each in (here, best))
        return Placement(
            request_id=request.id,
            prefill=here.name,
            decode=view.decode[0].name,
            reused_tokens=most,
            fetch_from=best.name if most > local else None,
            fetched_tokens=most - local,
            expected_ttft_s=estimate.prefill_s(request.id, request.input_tokens, most),
            expected_tbt_s=0.0,
            reason="in turns",
        )


def spec_of(place: str, model: str, tokens: int, folder: str) -> LiveSpec:
    """A cluster whose first worker soon evicts a conversation to this place."""
    small = {"cache_tokens": 3 * tokens}
    changes: dict[str, Any] = {
        "dram": {},
        "worker": {"prefill_nodes": 2},
        "ssd": {**small, "ssd_dir": folder, "ssd_tokens": 100 * tokens},
        "remote": {**small, "pool": "remote", "pool_tokens": 100 * tokens},
        "mooncake": {**small, "pool": "mooncake", "pool_tokens": 100 * tokens},
    }[place]
    return LiveSpec(
        model=model, device="cpu", block_size_tokens=BLOCK, placement=TakeTurns(), fetch_timeout_s=30.0, **changes
    )


class Conversations:
    """Requests of conversations, each with ids and keys of its own. Mutable: it counts."""

    def __init__(self) -> None:
        self._count = 0

    def turn(self, conversation: int, tokens: int, *, on_worker: int = 0) -> TracedRequest:
        """A prompt that begins as all others of its conversation."""
        self._count += 2
        keys = tuple(10_000 * conversation + k for k in range(-(-tokens // BLOCK)))
        asked = Request(
            id=self._count + on_worker,
            arrival_s=0.0,
            input_tokens=tokens,
            block_keys=keys,
            block_size_tokens=BLOCK,
        )
        return TracedRequest(asked, 2)


def ttft_s(live: LiveCluster, turn: TracedRequest, source: tuple[str, ...] = ()) -> float:
    """Serve one request alone; its time to first token. Its prefix must come from `source`."""
    log = live.run([turn])
    begun = {type(record): record.at_s for record in log if isinstance(record, (Arrived, FirstToken))}
    sources = {record.source for record in log if isinstance(record, Moved)}
    if not sources.issuperset(source):
        raise RuntimeError(f"the prefix came from {sorted(sources)}; it was to come from {source}")
    return begun[FirstToken] - begun[Arrived]


def measure(place: str, model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """The medians of one place."""
    made, second_s, computed_s = Conversations(), list[float](), list[float]()
    long = tokens + NEW_TOKENS
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveCluster(spec_of(place, model, tokens, folder)) as live,
    ):
        estimate = LatencyEstimator(live.model)
        for number in range(rounds + 1):
            conversation = 100 * (number + 1)
            live.run([made.turn(conversation, tokens)])
            if place not in {"dram", "worker"}:
                for other in range(1, 16):  # slowly, so that no block is dropped on its way down
                    live.run([made.turn(conversation + other, tokens // 2)])
                    time.sleep(0.1)
            asked = made.turn(conversation, long, on_worker=int(place == "worker"))
            source = ("prefill-0",) if place == "worker" else PLACES[place]
            second_s.append(ttft_s(live, asked, source))
            computed_s.append(ttft_s(live, made.turn(conversation + 50, long)))
        fetched = tokens if place in {"worker", "remote", "mooncake"} else 0
        predicted_s = estimate.prefill_s(0, long, tokens) + (estimate.transfer_s(fetched, 0) if fetched else 0.0)
        whole_s = estimate.prefill_s(0, long, 0)
    ours_s, base_s = statistics.median(second_s[1:]), statistics.median(computed_s[1:])  # the first round warms up
    return {
        "place": place,
        "second_turn_ms": 1e3 * ours_s,
        "recomputed_ms": 1e3 * base_s,
        "ratio": base_s / ours_s,
        "predicted_ratio": whole_s / predicted_s,
    }


def main(
    model: Annotated[str, typer.Option(help="A Llama shape; its weights are random.")] = "random:lab-30m",
    tokens: Annotated[int, typer.Option(min=BLOCK, help="Tokens of the first turn.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the medians are printed.")] = 5,
    places: Annotated[str, typer.Option(help=f"Some of {','.join(PLACES)}.")] = ",".join(PLACES),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the places that are asked for, and print a table or JSON."""
    rows = [measure(place, model, tokens, rounds) for place in places.split(",")]
    if json_:
        typer.echo(json.dumps({"model": model, "tokens": tokens, "rows": rows}))
        return
    typer.echo(f"{'prefix in':10} {'second turn':>12} {'recomputed':>12} {'ratio':>7} {'predicted':>10}")
    for row in rows:
        typer.echo(
            f"{row['place']:10} {row['second_turn_ms']:9.1f} ms {row['recomputed_ms']:9.1f} ms"
            f" {row['ratio']:7.2f} {row['predicted_ratio']:10.2f}"
        )


if __name__ == "__main__":
    typer.run(main)
