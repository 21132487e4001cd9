"""Prefills by a crew, put together: first token, whole KVCache, busy times of each worker, and bytes sent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.pipeline.crew import Crew
from mooncake_lab.engine.pipeline.jobs import CppJob, Job, Prompt, RunaheadJob, Share
from mooncake_lab.perf import chunk_sizes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Together:
    """A prefill that several processes did."""

    first_token: int
    kv: tuple[torch.Tensor, ...]
    """A layer: (2, tokens, kv_heads, head_width), keys then values."""
    shares: tuple[Share, ...]
    """What each process did, by rank."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that went from process to process."""
        return sum(share.sent_bytes for share in self.shares)

    @property
    def seconds(self) -> float:
        """From the first thing that any process did to the last."""
        times = [(each.start_s, each.end_s) for share in self.shares for each in share.activities]
        return max(end for _, end in times) - min(start for start, _ in times)

    def span(self, fingerprint: bytes) -> KVSpan:
        """The KVCache as an engine takes it."""
        return KVSpan(fingerprint=fingerprint, start=0, tokens=self.kv[0].shape[1], layers=self.kv)


def cpp_prefill(crew: Crew, tokens: Prompt, *, chunk_tokens: int, processes: int | None = None) -> Together:
    """Prefill a prompt in chunks, each process holding a run of layers.

    Args:
        crew: the processes.
        tokens: the prompt.
        chunk_tokens: of each chunk but the last.
        processes: how many take part; None takes all.

    Raises:
        ValueError: when there is nothing to cut, or more processes than layers or than the crew has.
        ProcessDiedError: when a process dies or fails.
    """
    prompt = np.asarray(tokens, dtype=np.int64)
    sizes = tuple(chunk_sizes(len(prompt), chunk_tokens))
    return _together(crew, CppJob(tokens=prompt, sizes=sizes, processes=processes or crew.spec.processes))


def runahead_prefill(crew: Crew, tokens: Prompt, *, bounds: Sequence[int]) -> Together:
    """Prefill a prompt in runs of tokens that end at `bounds`, a process each.

    Raises:
        ValueError: when a run is empty or there are more than the crew has processes.
        ProcessDiedError: when a process dies or fails.
    """
    return _together(crew, RunaheadJob(tokens=np.asarray(tokens, dtype=np.int64), bounds=tuple(bounds)))


def _together(crew: Crew, job: Job) -> Together:
    shares = crew.run(job)
    (token,) = [share.first_token for share in shares if share.first_token is not None]
    dtype = DTYPES[crew.spec.dtype]
    layers = [layer for share in sorted(shares, key=lambda each: each.first_layer) for layer in share.kv]
    kv = tuple(torch.from_numpy(layer).view(dtype).squeeze(-1) for layer in layers)
    return Together(first_token=token, kv=kv, shares=tuple(shares))


def overlap_share(shares: Sequence[Share]) -> float:
    """Share of the time with any process computing in which two or more of them were.

    Raises:
        ValueError: when no worker computed.
    """
    edges = sorted(
        edge
        for share in shares
        for each in share.activities
        if each.what == "compute"
        for edge in ((each.start_s, 1), (each.end_s, -1))
    )
    if not edges:
        raise ValueError(f"none of {len(shares)} processes computed anything; there is no overlap to measure")
    busy_s = together_s = 0.0
    computing, since_s = 0, edges[0][0]
    for at_s, change in edges:
        busy_s += (at_s - since_s) * (computing >= 1)
        together_s += (at_s - since_s) * (computing >= 2)
        computing, since_s = computing + change, at_s
    return together_s / busy_s if busy_s else 0.0
