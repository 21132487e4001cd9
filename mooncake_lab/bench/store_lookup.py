"""How long it takes to know what of a prompt is stored: its keys, and the match over instances and in a store."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import xxhash

from mooncake_lab.core import block_keys
from mooncake_lab.store.index import PrefixIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Medians over rounds, for a prompt that every instance holds whole: the longest walk there is."""

    tokens: int
    block_tokens: int
    instances: int
    keys_s: float
    """The chained hashes of all blocks."""
    floor_s: float
    """One hash of the prompt's bytes as a whole."""
    match_s: float
    """The match over all instances."""


def measure_lookup(
    tokens: int = 131_072, *, block_tokens: int = 512, instances: int = 8, rounds: int = 51
) -> Lookup:
    """Time both for a random prompt (FAST'25 §4.1: the hash computation of the Conductor's prefix match)."""
    prompt = np.random.default_rng(0).integers(0, 128_000, tokens).astype(np.int32)
    index = PrefixIndex()
    for number in range(instances):
        index.update(index.join(f"prefill-{number}"), block_keys(prompt, block_tokens))
    keys_s, floor_s, match_s = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        times = [time.perf_counter()]
        keys = block_keys(prompt, block_tokens)
        times.append(time.perf_counter())
        xxhash.xxh3_128_digest(prompt.tobytes())
        times.append(time.perf_counter())
        index.matches(keys)
        times.append(time.perf_counter())
        for into, seconds in zip((keys_s, floor_s, match_s), np.diff(times).tolist(), strict=True):
            into.append(seconds)
    return Lookup(
        tokens=tokens,
        block_tokens=block_tokens,
        instances=instances,
        keys_s=statistics.median(keys_s),
        floor_s=statistics.median(floor_s),
        match_s=statistics.median(match_s),
    )
