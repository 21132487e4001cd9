"""A model, a full KVCache and a stopwatch: what the sections of `gpu.py` measure with."""  # noqa: INP001  # scripts, not a package

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mooncake_lab.core import MIB, blocks_for
from mooncake_lab.engine.graphs import DecodeGraphs, capture_cuda
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.loop import EngineSettings, cache_blocks
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.packing import PackedBatch, Piece, pack
from mooncake_lab.engine.weights import LlamaWeights
from mooncake_lab.perf import Hardware

_ONCE_S, _TWICE_S = 6.0, 2.0
"""What takes longer runs once or twice, instead of two runs to warm up and some to count."""
Rows = list[dict[str, Any]]
"""Plain values, a measurement a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the measurements are."""

    prefill_tokens: tuple[int, ...]
    prefill_chunk_tokens: int
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    hybrid_chunks: tuple[int, ...]
    hybrid_batches: tuple[int, ...]
    hybrid_context: int
    tile_tokens: tuple[int, ...]
    chunk_prompt: int
    chunks: tuple[int, ...]
    pd_total: int
    """Tokens of a request of the P:D sweep, prompt and output together."""
    pd_batch: int
    pd_chunk: int
    pd_ratios: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    """Sizes of the copied pieces; the largest gives the peak."""
    copy_tokens: int
    layerwise_tokens: tuple[int, ...]
    """Prompts whose KVCache is loaded and stored; several of the longest have to fit beside the lab's own."""
    layerwise_new_tokens: int
    """Computed behind what is loaded: loading hides behind nothing else."""
    layerwise_block_tokens: int
    compressed_tokens: int
    """Length of a prompt whose KVCache is made smaller."""
    kept_tokens: int
    """What an eviction leaves of it."""
    peer_batch: int
    peer_prompt: int
    peer_steps: int
    worker_chunk_tokens: int
    """Of a prefill worker: on a large GPU, chunks of a few hundred tokens wait for the host that launches them."""
    repeats: int


FULL = Sizes(
    prefill_tokens=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    prefill_chunk_tokens=8192,
    decode_batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    decode_contexts=(1024, 4096, 16384),
    hybrid_chunks=(128, 256, 512, 1024),
    hybrid_batches=(1, 3, 17, 63),
    hybrid_context=1024,
    tile_tokens=tuple(base + off for base in (128, 256, 384, 512, 768, 1024) for off in (-8, -1, 0, 1, 8)),
    chunk_prompt=16384,
    chunks=(64, 128, 256, 512, 1024, 2048, 4096),
    pd_total=1024,
    pd_batch=18,
    pd_chunk=256,
    pd_ratios=(1, 5, 14, 30, 100, 200),
    copy_bytes=tuple(size * MIB for size in (1, 4, 16, 64, 256, 1024)),
    copy_tokens=8192,
    layerwise_tokens=(8192, 16384),
    layerwise_new_tokens=4096,
    layerwise_block_tokens=256,
    compressed_tokens=4096,
    kept_tokens=512,
    peer_batch=8,
    peer_prompt=512,
    peer_steps=64,
    worker_chunk_tokens=2048,
    repeats=10,
)
"""On a GPU."""

DRY = Sizes(
    prefill_tokens=(16, 64),
    prefill_chunk_tokens=32,
    decode_batches=(1, 3),
    decode_contexts=(16, 48),
    hybrid_chunks=(8,),
    hybrid_batches=(1, 3),
    hybrid_context=16,
    tile_tokens=(15, 16, 17),
    chunk_prompt=64,
    chunks=(8, 32),
    pd_total=24,
    pd_batch=3,
    pd_chunk=8,
    pd_ratios=(1, 5),
    copy_bytes=(1 << 12, 1 << 14),
    copy_tokens=32,
    layerwise_tokens=(32, 64),
    layerwise_new_tokens=16,
    layerwise_block_tokens=16,
    compressed_tokens=96,
    kept_tokens=32,
    peer_batch=2,
    peer_prompt=8,
    peer_steps=4,
    worker_chunk_tokens=512,
    repeats=2,
)
"""Anywhere, in seconds, to see that everything runs; its numbers mean nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class Lab:
    """What sections share. Mutable: the cache is written, and decode steps are recorded on first use."""

    shape: str
    """Name of the model's shape."""
    weights: LlamaWeights
    model: LlamaModel
    sizes: Sizes
    peaks: Hardware
    clock: Callable[[], float] = time.perf_counter
    block_size_tokens: int = 16
    cache: KVCache = field(init=False)
    _graphs: DecodeGraphs | None = field(init=False, default=None)
    _blocks: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = field(init=False)

    def __post_init__(self) -> None:
        device, dtype, config = self.device, self.model.embedding.dtype, self.model.config
        longest = max(*self.sizes.prefill_tokens, *self.sizes.decode_contexts) + 256
        needed = max(longest, max(self.sizes.decode_batches) * (max(self.sizes.decode_contexts) + 64))
        room = EngineSettings(block_size_tokens=self.block_size_tokens)
        # a third is left to the sections that build engines and peers of their own
        blocks = min(
            blocks_for(needed, self.block_size_tokens), cache_blocks(room, config, device, dtype) * 2 // 3
        )
        self.cache = KVCache(
            config, blocks=blocks, block_size_tokens=self.block_size_tokens, device=device, dtype=dtype
        )
        self._blocks = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        if device.type == "cuda" and self.model.backend.name == "cuda":
            self._graphs = DecodeGraphs(self.model, self.cache, blocks_for(longest, 16), capture_cuda)

    def release(self) -> None:
        """Free weights and KVCache, for workers that have their own; nothing else can be measured afterwards."""
        del self.weights, self.model, self.cache
        self._graphs = None
        gc.collect()
        torch.cuda.empty_cache()

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.model.embedding.device

    @property
    def capacity_tokens(self) -> int:
        """Tokens the KVCache holds."""
        return self.cache.blocks * self.block_size_tokens

    @property
    def gemm_flops_per_s(self) -> float:
        """The measured rate of a matrix product in the model's type."""
        wide = self.model.embedding.dtype.itemsize == 4
        return self.peaks.float32_flops_per_s if wide else self.peaks.bfloat16_flops_per_s

    def batch(self, requests: Sequence[tuple[int, int]]) -> PackedBatch:
        """One iteration: a request a pair, (new tokens, tokens before them), each on blocks of its own."""
        pieces: list[Piece] = []
        begin = 0
        for new, cached in requests:
            count = blocks_for(new + cached, self.block_size_tokens)
            tokens = np.full(new, 1, dtype=np.int64)
            pieces.append(Piece(tokens, cached, self._blocks[begin : begin + count], emits=True))
            begin += count
        if begin > len(self._blocks):
            raise ValueError(f"{begin} KVCache blocks are needed, {len(self._blocks)} are there")
        return pack(pieces, self.block_size_tokens, self.device)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits, through recorded steps where a batch is decodes only."""
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.forward(batch)
        return self.model.forward(batch, self.cache)

    def iteration_s(self, requests: Sequence[tuple[int, int]], repeats: int | None = None) -> float:
        """Seconds of one iteration, the median."""
        batch = self.batch(requests)
        return self.median_s(lambda: self.forward(batch), repeats)

    def recorded_s(self, requests: Sequence[tuple[int, int]]) -> float:
        """The same of an iteration that is recorded as a CUDA graph, where there are graphs.

        Below some hundred tokens a device waits for what the host launches; a recorded iteration shows the device.
        """
        batch = self.batch(requests)
        if self._graphs is None or self._graphs.fits(batch):
            return self.iteration_s(requests)
        return self.median_s(capture_cuda(lambda: self.model.forward(batch, self.cache)))

    def median_s(self, work: Callable[[], object], repeats: int | None = None) -> float:
        """Seconds of something that may run on the device, the median after two runs that do not count.

        Of what takes seconds the second run counts, and of what takes longer still the first: warming up changes
        little of that.
        """
        first = self.seconds(work)
        if first > _ONCE_S:
            return first
        second = self.seconds(work)
        if second > _TWICE_S:
            return second
        return float(np.median([self.seconds(work) for _ in range(repeats or self.sizes.repeats)]))

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one run."""
        self._wait()
        start = self.clock()
        work()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
