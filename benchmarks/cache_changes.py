"""What it costs a prefill worker to report what a finished prompt changed in its cache, by the size of the cache.

    python benchmarks/cache_changes.py

Prompts of four new blocks end in a full cache of 1,000 blocks and in one of 100,000, in turn; each evicts as many
blocks. The table has the median time of a report and the memory that one report takes at most. The last line has
the ratios of the large cache to the small one: 1 says that a prompt costs the same in both.
"""  # noqa: INP001  # scripts, not a package

import sys
import tracemalloc
from functools import partial
from typing import Final

import torch

from mooncake_lab.bench.rounds import alternating_rounds, timed
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.engine import KVSpan
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.serving import LiveOptions
from mooncake_lab.serving.prefix_cache import PrefixCache
from mooncake_lab.serving.spec import worker_spec

SIZES: Final = (1_000, 100_000)
PROMPTS: Final = 300
PROMPT_BLOCKS: Final = 4
BLOCK_TOKENS: Final = 16
LAYOUT: Final = KVLayout(
    fingerprint=b"model", layers=1, kv_heads=1, head_width=32, dtype=torch.float32, block_tokens=BLOCK_TOKENS
)
"""A block takes one page of 4 KiB."""


def full_cache(blocks: int) -> PrefixCache:
    """A full cache of so many blocks, all of which are reported."""
    spec = ClusterSpec.small(cache_tokens=blocks * BLOCK_TOKENS)
    cache = PrefixCache(worker_spec(spec, LiveOptions(), "prefill-0", bytes(16)), LAYOUT)
    for number in range(blocks // PROMPT_BLOCKS):
        finish_prompt(cache, number)
    cache.news()
    return cache


def finish_prompt(cache: PrefixCache, number: int) -> None:
    """Keep the blocks of a new prompt."""
    keys = [b"%024d %06d" % (number, index) for index in range(PROMPT_BLOCKS)]
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    span = KVSpan(fingerprint=b"model", start=0, tokens=tokens, layers=(torch.zeros(2, tokens, 1, 32),))
    cache.keep(keys, span)


def report_peak_bytes(cache: PrefixCache) -> int:
    """The memory that a report takes at most."""
    tracemalloc.start()
    cache.news()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak_bytes


def main() -> None:
    """Print the costs in both caches and their ratios."""
    caches = [full_cache(size) for size in SIZES]

    def report_s(cache: PrefixCache, number: int) -> float:
        finish_prompt(cache, 10**9 + number)
        return timed(cache.news)

    works = {size: partial(report_s, cache) for size, cache in zip(SIZES, caches, strict=True)}
    taken = alternating_rounds(works, PROMPTS, warm_up=0)
    peaks = list[int]()
    for cache in caches:
        finish_prompt(cache, 2 * 10**9)
        peaks.append(report_peak_bytes(cache))
        cache.close()
    lines = ["blocks    report (us)    memory (KB)"]
    for size, peak in zip(SIZES, peaks, strict=True):
        lines.append(f"{size:7,}   {1e6 * taken.median_s(size):11,.1f}    {peak / 1e3:11,.1f}")
    ratio = taken.ratio(SIZES[1], SIZES[0]).median
    lines.append(f"ratio     {ratio:11.1f}    {peaks[1] / peaks[0]:11.1f}")
    lines.append(f"load average {taken.load_average:.1f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
