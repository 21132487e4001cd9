"""The same trace in larger blocks: sharing that a coarser cache can still see."""

from dataclasses import replace

import numpy as np

from mooncake_lab.workload.trace import Trace


def with_larger_blocks(trace: Trace, factor: int) -> Trace:
    """The same requests, `factor` neighbouring blocks made one.

    A block id stands for a block and everything before it, so the id of the last of the joined blocks
    names the larger one. Smaller blocks cannot be had: what happens inside a block is not in the file.

    Raises:
        ValueError: when the factor is not at least 1.
    """
    if factor < 1:
        raise ValueError(f"cannot join {factor} blocks to one; at least 1 is needed")
    sizes = np.diff(trace.block_starts)
    position = np.arange(len(trace.block_ids)) - np.repeat(trace.block_starts[:-1], sizes)
    is_last = position == np.repeat(sizes, sizes) - 1
    return replace(
        trace,
        block_size_tokens=trace.block_size_tokens * factor,
        block_ids=trace.block_ids[is_last | (position % factor == factor - 1)],
        block_starts=np.concatenate([[0], np.cumsum(-(-sizes // factor))]),
        source=trace.source if factor == 1 else f"{trace.source}, in blocks of {trace.block_size_tokens * factor}",
    )
