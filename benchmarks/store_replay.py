"""How long one pass of a trace through one cache takes, here and in libCacheSim.

Two ways into libCacheSim are timed. `get` asks its cache about one access at a time from Python, as a simulator
would; `process` hands it the whole trace as a file in its own binary format, so that no Python runs at all. Rounds
are interleaved and medians compared, because machines drift. Hits must agree, or the benchmark fails; S3-FIFO runs
with libCacheSim's warm-up so that they do. Its hash table has 2**24 places unless told otherwise.
"""  # noqa: INP001  # scripts, not a package

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import libcachesim
import numpy as np
import typer

from mooncake_lab.bench.rounds import Rounds, alternating_rounds
from mooncake_lab.store.eviction import EVICTION_POLICIES, S3FIFO
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import load

THEIRS = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "arc": libcachesim.ARC,
    "s3fifo": libcachesim.S3FIFO,
    "sieve": libcachesim.Sieve,
    "belady": libcachesim.Belady,
}
RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def main(
    workload: Annotated[str, typer.Option(help="conversation or synthetic.")] = "conversation",
    capacity: Annotated[int, typer.Option(min=50, help="Blocks.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    hash_power: Annotated[int, typer.Option(help="Of libCacheSim's table; 24 is its own choice.")] = 24,
    policy: Annotated[
        list[str] | None, typer.Option(help="One policy; again for more; all when left out.")
    ] = None,
) -> None:
    """Print medians in ms and the ratios ours / libCacheSim for every policy that both have."""
    trace = load(workload)
    requests = [trace.blocks_of(i).tolist() for i in range(len(trace))]
    typer.echo(
        f"{trace.source}: {len(trace.block_ids):,} accesses, {capacity:,} blocks, median of {rounds} rounds"
    )
    typer.echo(f"{'policy':10} {'ours':>8} {'get':>8} {'process':>8} {'ours/get':>9} {'ours/process':>13}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.oracleGeneral"
        next_use = write_their_trace(trace.block_ids, path)
        for name in policy or THEIRS:
            ours = EVICTION_POLICIES[name] if name != "s3fifo" else s3fifo_like_theirs
            make = partial(THEIRS[name], capacity, hashpower=hash_power)
            contenders: dict[str, Callable[[], int]] = {
                "ours": lambda ours=ours: replay(requests, ours, capacity).hits,
                "get": lambda make=make: asked_one_by_one(make(), trace.block_ids.tolist(), next_use),
                "process": lambda make=make: processed(make(), path, len(trace.block_ids)),
            }
            taken = interleaved(contenders, rounds)
            shown = " ".join(f"{1000 * taken.median_s(way):8.1f}" for way in contenders)
            beside = [taken.ratio("ours", way).median for way in ("get", "process")]
            typer.echo(
                f"{name:10} {shown} {beside[0]:9.2f} {beside[1]:13.2f}  load average {taken.load_average:.1f}"
            )


def s3fifo_like_theirs(capacity_blocks: int) -> S3FIFO:
    """S3-FIFO with libCacheSim's warm-up."""
    return S3FIFO(capacity_blocks, fill_main_first=True)


def interleaved(contenders: Mapping[str, Callable[[], int]], rounds: int) -> Rounds[str]:
    """The seconds of each, in turns; `SystemExit` when their hits differ."""
    hits = dict[str, int]()

    def seconds(name: str, _round: int) -> float:
        start_s = time.perf_counter()
        hits[name] = contenders[name]()
        spent_s = time.perf_counter() - start_s
        if len(set(hits.values())) != 1:
            raise SystemExit(f"the hits differ: {hits}")
        return spent_s

    return alternating_rounds({name: partial(seconds, name) for name in contenders}, rounds, warm_up=0)


def asked_one_by_one(cache: Any, accesses: list[int], next_use: list[int]) -> int:
    """Hits when libCacheSim is asked about each access from Python; only its optimum is told the next use."""
    request = libcachesim.Request()
    request.obj_size = 1
    get = cache.get
    hits = 0
    if isinstance(cache, libcachesim.Belady):
        for key, following in zip(accesses, next_use, strict=True):
            request.obj_id = key
            request.next_access_vtime = following
            hits += get(request)
        return hits
    for key in accesses:
        request.obj_id = key
        hits += get(request)
    return hits


def processed(cache: Any, path: Path, accesses: int) -> int:
    """Hits when libCacheSim reads and replays the whole trace on its own."""
    parameters = libcachesim.ReaderInitParam(ignore_obj_size=True)
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, parameters)
    miss_ratio, _ = cache.process_trace(reader)
    return round((1 - miss_ratio) * accesses)


def write_their_trace(block_ids: Any, path: Path) -> list[int]:
    """Write the accesses in libCacheSim's binary format; returns the step of each access's next use."""
    never = 2**63 - 1
    steps = np.arange(len(block_ids))
    order = np.lexsort((steps, block_ids))
    same = block_ids[order[1:]] == block_ids[order[:-1]]
    next_use = np.full(len(block_ids), never)
    next_use[order[:-1][same]] = order[1:][same]
    records = np.zeros(len(block_ids), RECORD)
    records["time"], records["id"], records["size"] = steps, block_ids, 1
    records["next"] = np.where(next_use == never, -1, next_use)
    records.tofile(path)
    return next_use.tolist()


if __name__ == "__main__":
    typer.run(main)
