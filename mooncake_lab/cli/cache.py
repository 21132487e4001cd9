"""`mooncake-lab cache`: what the hit rate of a trace would be with another cache."""

import math
from typing import Annotated, Any, Literal

import msgspec
import typer

from mooncake_lab.cli.options import (
    LARGEST,
    NO_HIT_RATE,
    BlockSize,
    Format,
    Json,
    Lenient,
    TraceFile,
    fail,
    one_of,
    read_or_fail,
)
from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.replay import replay


def _capacity(text: str) -> float:
    """A whole number from 0, or infinity (typer takes `None` for a missing option)."""
    if text == "inf":
        return math.inf
    if not text.isdecimal() or float(text) > LARGEST:
        allowed = f"whole numbers from 0 to {LARGEST}, and inf"
        raise typer.BadParameter(f"{text!r} is not a capacity; allowed are {allowed}")
    return int(text)


def cache(
    file: TraceFile,
    capacity: Annotated[
        float, typer.Option(parser=_capacity, metavar="N|inf", help="Size of the cache; inf is unlimited.")
    ],
    policy: Annotated[
        str,
        typer.Option(
            parser=one_of(EVICTION_POLICIES),
            metavar="|".join(EVICTION_POLICIES),
            help="Which block a full cache evicts; belady is the optimum.",
        ),
    ] = "lru",
    unit: Annotated[
        Literal["blocks", "tokens"], typer.Option(help="Unit of the capacity; tokens are rounded down to blocks.")
    ] = "blocks",
    format_: Format = None,
    block_size: BlockSize = None,
    lenient: Lenient = False,
    json_: Json = False,
) -> None:
    """Replay a trace through one cache and print its hit rate.

    Every hash id of a request is one access, from front to back; an id after another prefix is another block.
    Prefix hits are the hits before the first miss of
    a request; only these save prefill.

    Example: mooncake-lab cache data/traces/conversation_trace.jsonl --policy lru --capacity 10000 --json
    """
    trace = read_or_fail("cache", file, lenient=lenient, block_size_tokens=block_size, format=format_)
    if trace.ids == "none":
        fail("cache", f"{file} has no block ids: {NO_HIT_RATE}")
    block_size = trace.block_size_tokens if unit == "tokens" else 1
    blocks = None if math.isinf(capacity) else int(capacity) // block_size
    found = replay([traced.request.block_keys for traced in trace.requests()], policy, blocks)
    if json_:
        numbers: dict[str, Any] = {
            "file": str(file),
            "policy": policy,
            "capacity_blocks": blocks,
            "block_size_tokens": trace.block_size_tokens,
            "requests": len(trace),
            "skipped": trace.skipped,
            "renamed_blocks": trace.renamed_blocks,
            "accesses": found.accesses,
            "hits": found.hits,
            "hit_rate": found.hit_rate,
            "prefix_hits": found.prefix_hits,
            "prefix_hit_rate": found.prefix_hit_rate,
        }
        typer.echo(msgspec.json.encode(numbers))
    else:
        size = "unlimited" if blocks is None else f"{blocks:,} blocks of {trace.block_size_tokens} tokens"
        typer.echo(f"{policy}, {size}: {len(trace):,} requests, {found.accesses:,} accesses")
        typer.echo(f"hit rate        {found.hit_rate:.4f}  ({found.hits:,} hits)")
        typer.echo(f"prefix hit rate {found.prefix_hit_rate:.4f}  ({found.prefix_hits:,} prefix hits)")
