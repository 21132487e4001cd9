"""One process of KV-Runahead: a run of tokens through all layers, on keys and values that come down the chain."""

import time

import numpy as np
import torch

from mooncake_lab.core import blocks_for
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.pipeline.cpp import BLOCK_TOKENS
from mooncake_lab.engine.pipeline.jobs import RunaheadJob
from mooncake_lab.engine.pipeline.wire import Coming, Wire


def run_runahead(model: LlamaModel, job: RunaheadJob, wire: Wire) -> tuple[int | None, range, list[torch.Tensor]]:
    """This process's part: the first token and all KVCache on the last process, nothing elsewhere."""
    start = job.bounds[wire.rank - 1] if wire.rank else 0
    stop, last = job.bounds[wire.rank], wire.rank + 1 == job.processes
    blocks = np.arange(blocks_for(stop, BLOCK_TOKENS), dtype=np.int32)
    place = model.embedding
    cache = KVCache(
        model.config, blocks=len(blocks), block_size_tokens=BLOCK_TOKENS, device=place.device, dtype=place.dtype
    )
    chain = _Chain(wire, cache, blocks.tolist(), start, stop, last)
    batch = pack([Piece(job.tokens[start:stop], start, blocks, last)], BLOCK_TOKENS, place.device)
    logits = model.forward(batch, cache, chain.pass_on)
    token = int(logits[0].argmax()) if last else None
    wire.note("compute", model.config.layers, chain.since_s)
    wire.flush()
    layers = range(model.config.layers if last else 0)
    return token, layers, [cache.read(layer, chain.blocks, 0, stop) for layer in layers]


class _Chain:
    """The hook of a forward pass: called once the keys and values of a layer's own tokens are in the cache.

    It waits for those of all tokens before, puts them into the cache too, and sends all of them on, before the
    layer attends. Mutable: it asks for a layer ahead.
    """

    def __init__(self, wire: Wire, cache: KVCache, blocks: list[int], start: int, stop: int, last: bool) -> None:
        self.wire, self.cache, self.blocks = wire, cache, blocks
        self.start, self.stop, self.last = start, stop, last
        self.since_s = time.perf_counter()
        self.coming = self._ask()

    def pass_on(self, layer: int) -> None:
        self.wire.note("compute", layer, self.since_s)
        if self.coming is not None:
            prefix = self.wire.receive(self.coming, layer)
            self.cache.write(layer, self.blocks, 0, prefix)
            self.coming = self._ask() if layer + 1 < len(self.cache.layers) else None
        self.since_s = time.perf_counter()
        if not self.last:
            self.wire.send(self.cache.read(layer, self.blocks, 0, self.stop))

    def _ask(self) -> Coming | None:
        if not self.start:
            return None
        _, _, heads, _, width = self.cache.data.shape[1:]
        return self.wire.expect((2, self.start, heads, width))
