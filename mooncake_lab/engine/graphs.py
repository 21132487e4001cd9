"""Decode steps recorded once as CUDA graphs, one a batch size, and replayed: a launch a step instead of hundreds.

A graph fixes its tensors, so a batch is copied into the tensors of the next larger recorded size. Rows without a
request have an empty context and a negative slot: they read nothing, store nothing, and their logits are dropped.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.packing import PackedBatch

Forward = Callable[[], torch.Tensor]
"""Runs a model on tensors it already has; the logits."""
Capture = Callable[[Forward], Forward]
"""Turns a forward pass into something faster that does the same."""

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Recorded batch sizes: padding wastes less than half."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    batch: PackedBatch
    replay: Forward


class DecodeGraphs:
    """Recorded decode steps of a model on its KVCache. Mutable: sizes are recorded when first needed.

    Args:
        model: what computes.
        cache: whose blocks it reads and writes.
        table_blocks: most blocks of a request.
        capture: how a step is recorded.
        sizes: batch sizes, rising.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        table_blocks: int,
        capture: Capture,
        sizes: Sequence[int] = GRAPH_SIZES,
    ) -> None:
        self._model = model
        self._cache = cache
        self._table_blocks = table_blocks
        self._capture = capture
        self._sizes = tuple(sizes)
        self._recorded: dict[int, _Recorded] = {}

    def fits(self, batch: PackedBatch) -> bool:
        """Whether a batch is decodes only, few enough, and all of them want their logits."""
        return not batch.spans and len(batch.logit_rows) == batch.singles <= self._sizes[-1]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits of a batch that fits, in rows of their own."""
        size = next(size for size in self._sizes if size >= batch.singles)
        if size not in self._recorded:
            self._recorded[size] = self._record(size)
        recorded = self._recorded[size]
        _fill(recorded.batch, batch)
        return recorded.replay()[batch.logit_rows]

    def prepare(self, most: int) -> None:
        """Record every size that batches of up to `most` requests need, so that no step waits for it."""
        for size in reversed(self._sizes[: bisect_left(self._sizes, most) + 1]):
            if size not in self._recorded:
                self._recorded[size] = self._record(size)

    def _record(self, size: int) -> _Recorded:
        device = self._model.embedding.device
        rows = torch.arange(size, device=device)
        batch = PackedBatch(
            tokens=torch.zeros_like(rows),
            positions=torch.zeros_like(rows),
            slots=torch.full_like(rows, -1),
            tables=torch.zeros((size, self._table_blocks), dtype=torch.int32, device=device),
            lengths=torch.zeros(size, dtype=torch.int32, device=device),
            singles=size,
            spans=(),
            logit_rows=rows,
            context=None,
        )
        return _Recorded(batch, self._capture(lambda: self._model.forward(batch, self._cache)))


def capture_cuda(forward: Forward) -> Forward:
    """Record a forward pass as a CUDA graph, after running it enough that every kernel is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: meanwhile other threads may pin memory and copy KVCache; by default that breaks the recording
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = forward()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def _fill(recorded: PackedBatch, batch: PackedBatch) -> None:
    """Copy a batch into recorded tensors; rows beyond it are emptied."""
    rows, width = batch.tables.shape
    recorded.tokens[:rows] = batch.tokens
    recorded.positions[:rows] = batch.positions
    recorded.slots[:rows] = batch.slots
    recorded.slots[rows:] = -1
    recorded.lengths[:rows] = batch.lengths
    recorded.lengths[rows:] = 0
    recorded.tables[:rows, :width] = batch.tables
