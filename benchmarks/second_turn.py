"""TTFT of the second turn of a conversation, by the place where its prefix lies, beside recomputation.

    python benchmarks/second_turn.py --out data/measured/second_turn.json

Each place has live clusters of its own, whose worker processes are those of the place before. A round is requests
that move the KVCache of a prefix to the place, a second turn that begins with it, and the same prompt after all
caches were emptied, whose tokens must be the same; it leaves the prefix where the next round begins. Medians over
the rounds stand beside the prediction of a latency model that a cluster measured at its start.

A second cluster (`ClusterSpec.streams_layers` off) loads all of the prefix before it computes. The load is hidden
as far as the first cluster's prefill is shorter: the difference of the prefills is divided by the seconds that the
second cluster took to read the prefix. A prefill begins when the first layer of what is fetched is there. On one
machine the network is as fast as memory, so `paced-worker` and `paced-remote` have one of `--network-mb-per-s`.
Only ratios of one row may be compared, because other processes use the same cores.
"""  # noqa: INP001  # scripts, not a package

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from speed import provenance

from mooncake_lab.bench.rounds import in_turns, same
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import ClusterView, Estimator, Placement
from mooncake_lab.conductor.placement import fetched_prefill_s, local_prefill
from mooncake_lab.core import Arrived, FirstToken, Moved, Prefilled, Request, TracedRequest
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving import LiveCluster, LiveOptions, WorkerProcesses

BLOCK = 64
PROCESSES = 6
"""Workers of two clusters at once, each with two that prefill and one that decodes."""
FILLERS = 4
"""Requests that push a prefix out of DRAM."""
SETTLE_S = 0.15
"""Until what the last of them evicted is in its place; where that takes longer, the round is repeated."""
MOST_TRIES = 4
"""Of a round: on a busy machine a block may be dropped on its way down, and is then computed."""
SOURCES: dict[str, str] = {
    "dram": "",
    "ssd": "prefill-0/ssd",
    "worker": "prefill-0",
    "paced-worker": "prefill-0",
    "remote": "pool",
    "paced-remote": "pool",
    "mooncake": "pool",
}
"""Where a prefix may lie, and the source of its bytes in the log (a worker's own DRAM has none)."""


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
            expected_ttft_s=fetched_prefill_s(request, here, best, estimate)
            if most > local
            else local_prefill(request, here, estimate)[0],
            expected_tbt_s=0.0,
            reason="in turns",
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: str
    tokens: int
    """Of the prefix, which is the first turn."""
    new_tokens: int
    """Of a second turn, behind it."""
    rounds: int
    network_mb_per_s: float
    """Of the places with a paced network."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the log says of one request that was alone in its cluster."""

    ttft_s: float
    prefill_s: float
    """From its begin at the worker, which is after a fetch."""
    read_s: float
    """From the first byte of its prefix to the last one; 0 where the log has no such record."""
    tokens: tuple[int, ...]


READ = ("read_ms", "hidden_share")
"""What a row of DRAM does not have."""


class PrefixElsewhereError(RuntimeError):
    """A prefix did not come, or not whole, from the place where it was to lie."""


def spec_of(place: str, sizes: Sizes, folder: str, *, layerwise: bool) -> tuple[ClusterSpec, LiveOptions]:
    """A cluster whose first worker soon evicts a prefix to this place."""
    small = {"cache_tokens": 3 * sizes.tokens // 2}
    paced_at = place.removeprefix("paced-")
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "dram": ({}, {}),
        "ssd": ({**small, "ssd_tokens": 20 * sizes.tokens}, {"ssd_dir": folder}),
        "worker": ({"prefill_nodes": 2}, {}),
        "remote": (small, {"shared_store": "remote", "shared_store_tokens": 20 * sizes.tokens}),
        "mooncake": (small, {"shared_store": "mooncake", "shared_store_tokens": 20 * sizes.tokens}),
    }
    of_spec, of_runtime = ways[paced_at]
    if place != paced_at:
        of_runtime["network_bytes_per_s"] = 1e6 * sizes.network_mb_per_s
    spec = ClusterSpec.small(
        block_size_tokens=BLOCK, placement=TakeTurns(), fetch_timeout_s=30.0, device_tokens=4 * sizes.tokens,
        streams_layers=layerwise, **of_spec,
    )  # fmt: skip
    return spec, LiveOptions(model=sizes.model, device="cpu", spares=0, **of_runtime)


@dataclasses.dataclass
class Bench:
    """One cluster, whose first worker holds the prefix before each round. Mutable: it counts requests."""

    live: LiveCluster
    place: str
    sizes: Sizes
    ids: int = 0

    def turns(self) -> tuple[Turn, Turn]:
        """A second turn, and its prompt computed from scratch."""
        for attempt in range(MOST_TRIES):
            if not self.ids or attempt:
                self.live.reset_prefix_cache()
                self._serve(0, self.sizes.tokens)
            try:
                return self._turns()
            except PrefixElsewhereError:
                if attempt == MOST_TRIES - 1:
                    raise
        raise AssertionError

    def _turns(self) -> tuple[Turn, Turn]:
        tokens, long = self.sizes.tokens, self.sizes.tokens + self.sizes.new_tokens
        if self.place not in {"dram", "worker", "paced-worker"}:
            for filler in range(1, FILLERS + 1):
                # DRAM holds 9/8 of `tokens`, and 3/8 on their way down: what one evicts is gone before the next
                self._serve(filler, 9 * tokens // (8 * FILLERS), new_tokens=1)
            time.sleep(SETTLE_S)
        suffix = 10_000 + self.ids
        second = self._serve(0, long, suffix, source=SOURCES[self.place], on_worker=int("worker" in self.place))
        self.live.reset_prefix_cache()
        return second, self._serve(0, long, suffix)

    def _serve(
        self, begins: int, tokens: int, ends: int = 0, *, source: str = "", on_worker: int = 0, new_tokens: int = 8
    ) -> Turn:
        """Serve one request alone; all of its prefix must come from `source`.

        Args:
            begins: names its first `Sizes.tokens`.
            tokens: of the prompt.
            ends: names the rest.
            source: as in the log; empty where nothing is to be fetched or read.
            on_worker: the prefill worker.
            new_tokens: of the answer.
        """
        self.ids += 2
        prefix = self.sizes.tokens // BLOCK
        keys = tuple(1000 * (begins if k < prefix else ends) + k for k in range(-(-tokens // BLOCK)))
        asked = Request(
            id=self.ids + on_worker, arrival_s=0.0, input_tokens=tokens, block_keys=keys, block_size_tokens=BLOCK
        )
        log = self.live.run([TracedRequest(asked, new_tokens)])
        at_s = {type(record): record.at_s for record in log if isinstance(record, (Arrived, FirstToken))}
        (prefilled,) = (record for record in log if isinstance(record, Prefilled))
        moved = [record for record in log if isinstance(record, Moved)]
        read = [record for record in moved if record.source == source]
        sent_bytes = sum(record.bytes for record in moved if record.destination.startswith("decode"))
        if source and sum(record.bytes for record in read) * tokens != sent_bytes * self.sizes.tokens:
            raise PrefixElsewhereError(
                f"{sum(record.bytes for record in read)} bytes of a prefix of {self.sizes.tokens} tokens came from"
                f" {source}; all were to come from there"
            )
        return Turn(
            ttft_s=at_s[FirstToken] - at_s[Arrived],
            prefill_s=prefilled.at_s - prefilled.start_s,
            read_s=sum(record.at_s - record.start_s for record in read),
            tokens=self.live.outputs[asked.id],
        )


class Measurements:
    """Rows of places, from clusters that share their worker processes. Mutable: it keeps latency models."""

    def __init__(self, sizes: Sizes, workers: WorkerProcesses) -> None:
        self._sizes = sizes
        self._workers = workers
        self._models = dict[str, LatencyModel]()  # by what is not common to all clusters: devices, the network

    def row(self, place: str) -> dict[str, Any]:
        """The row of one place."""
        kind = "ssd" if place == "ssd" else place.partition("-")[0] if "-" in place else ""
        benches = dict[bool, Bench]()
        with ExitStack() as stack:
            for layerwise in (True, False):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                spec, options = spec_of(place, self._sizes, folder, layerwise=layerwise)
                cluster = LiveCluster(spec, options, model=self._models.get(kind), launcher=self._workers)
                live = stack.enter_context(cluster)
                self._models[kind] = live.model
                benches[layerwise] = Bench(live, place, self._sizes)
            estimate = benches[True].live.estimate
            works = {layerwise: same(bench.turns) for layerwise, bench in benches.items()}
            seen = in_turns(works, self._sizes.rounds)
        return row_of(place, self._sizes, seen, estimate)


def row_of(
    place: str, sizes: Sizes, seen: dict[bool, list[tuple[Turn, Turn]]], estimate: Estimator
) -> dict[str, Any]:
    """Medians of the rounds of one place, beside the predictions."""
    long = sizes.tokens + sizes.new_tokens
    second, computed = zip(*seen[True], strict=True)
    second_s, computed_s = (statistics.median(turn.ttft_s for turn in turns) for turns in (second, computed))
    fetched = 0 if place in {"dram", "ssd"} else sizes.tokens
    predicted_s = estimate.prefill_s(0, long, sizes.tokens)
    if fetched:
        predicted_s = estimate.beside_load_s(predicted_s, estimate.transfer_s(fetched, 0))
    if place == "ssd":
        predicted_s = estimate.beside_ssd_s(predicted_s, sizes.tokens)
    row: dict[str, Any] = {
        "place": place,
        "second_turn_ms": 1e3 * second_s,
        "least_ms": 1e3 * min(turn.ttft_s for turn in second),
        "most_ms": 1e3 * max(turn.ttft_s for turn in second),
        "recomputed_ms": 1e3 * computed_s,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_recomputed_ms": 1e3 * estimate.prefill_s(0, long, 0),
        "same_tokens": all(one.tokens == other.tokens for pairs in seen.values() for one, other in pairs),
    }
    row["error_percent"] = 100 * (row["predicted_ms"] / row["second_turn_ms"] - 1)
    whole = [turn for turn, _ in seen[False]]
    saved_s = statistics.median(turn.prefill_s for turn in whole) - statistics.median(
        turn.prefill_s for turn in second
    )
    read_s = statistics.median(turn.read_s for turn in whole)
    hidden = {"read_ms": 1e3 * read_s, "hidden_share": saved_s / read_s} if read_s else dict.fromkeys(READ)
    return row | {"saved_ms": 1e3 * saved_s} | hidden


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines to read."""
    names = ("second turn", "recomputed", "predicted")
    yield f"{'prefix in':13}" + "".join(f"{name:>14}" for name in names) + f"{'error':>9}{'read':>12}{'hidden':>8}"
    for row in rows:
        read = "" if row["read_ms"] is None else f"{row['read_ms']:.1f} ms"
        hidden = "" if row["hidden_share"] is None else f"{100 * row['hidden_share']:.0f} %"
        yield (
            f"{row['place']:13}{row['second_turn_ms']:11.1f} ms{row['recomputed_ms']:11.1f} ms"
            f"{row['predicted_ms']:11.1f} ms{row['error_percent']:+7.0f} %{read:>12}{hidden:>8}"
            + ("" if row["same_tokens"] else "  TOKENS DIFFER")
        )


def main(
    model: Annotated[str, typer.Option(help="A Llama shape; its weights are random.")] = "random:lab-30m",
    tokens: Annotated[int, typer.Option(min=BLOCK, help="Tokens of the first turn.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the second turn behind them.")] = 257,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the medians are printed.")] = 4,
    network_mb_per_s: Annotated[float, typer.Option(min=1, help="Of the paced places.")] = 100.0,
    places: Annotated[str, typer.Option(help=f"Some of {','.join(SOURCES)}.")] = ",".join(SOURCES),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON into this file.")] = None,
) -> None:
    """Measure the places that are asked for."""
    sizes = Sizes(model, tokens, new_tokens, rounds, network_mb_per_s)
    measured = provenance() | dataclasses.asdict(sizes)  # the load average is that before the run
    asked = places.split(",")
    with WorkerProcesses(spec_of("dram", sizes, "", layerwise=True)[1]).start(PROCESSES) as workers:
        measurements = Measurements(sizes, workers)
        rows = [measurements.row(place) for place in asked]
    measured["rows"] = rows
    text = json.dumps(measured, indent=1) + "\n"
    if out is not None:
        out.write_text(text, "utf-8")
    typer.echo(text if as_json else "\n".join(table(rows)))


if __name__ == "__main__":
    typer.run(main)
