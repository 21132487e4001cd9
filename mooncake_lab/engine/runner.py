"""Runs work: packs segments, calls the model, samples; and copies KVCache in and out of its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_lab.batching import Segment
from mooncake_lab.engine.graphs import DecodeGraphs
from mooncake_lab.engine.kvcache import KVCache, KVSpan
from mooncake_lab.engine.layerwise.loader import LayerLoader
from mooncake_lab.engine.model import LayerHook, LlamaModel
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.sampling import sample, without
from mooncake_lab.engine.sequence import RunningRequest

Work = Sequence[tuple[RunningRequest, Segment]]
"""Requests and what of them is computed in an iteration."""


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """A model and its KVCache. It knows nothing of policies."""

    model: LlamaModel
    cache: KVCache
    fingerprint: bytes
    graphs: DecodeGraphs | None = None
    """Recorded decode steps, on devices that have them."""

    def run(self, work: Work) -> list[int]:
        """Compute the segments; the next token of each that emits, in their order."""
        pieces = [_piece(request, segment) for request, segment in work]
        batch = pack(pieces, self.cache.block_size_tokens, self.model.embedding.device)
        stream = self._stream(work)
        if self.graphs is not None and stream is None and self.graphs.fits(batch):
            logits = self.graphs.forward(batch)
        else:
            logits = self.model.forward(batch, self.cache, stream)
        for request, _ in work:
            request.kv_loader = None  # the last layer has waited for its last layer
        emitting = [request for request, segment in work if segment.emits]
        if not emitting:
            return []
        how = [request.request.sampling for request in emitting]
        positions = [request.known for request in emitting]
        return sample(without(logits, [self._banned(request) for request in emitting]), how, positions)

    def _banned(self, request: RunningRequest) -> Sequence[int]:
        """Tokens that must not come next: those that would end the output before it may end."""
        asked = request.request
        if request.generated >= asked.min_new_tokens:
            return ()
        return self.model.config.end_tokens if asked.end_tokens is None else asked.end_tokens

    def export(self, request: RunningRequest, start: int, stop: int) -> KVSpan:
        """A copy of a running request's positions `start` up to `stop`."""
        table = self.cache.table(request.blocks)
        layers = tuple(self.cache.read(layer, table, start, stop) for layer in range(len(self.cache.layers)))
        return KVSpan(fingerprint=self.fingerprint, start=start, tokens=stop - start, layers=layers)

    def restore(self, request: RunningRequest) -> None:
        """Write a request's swapped KVCache into its blocks."""
        table = self.cache.table(request.blocks)
        for span in request.swapped_kv:
            for layer, tensor in enumerate(span.layers):
                self.cache.write(layer, table, span.start, tensor)
        request.swapped_kv = ()

    def accept(self, spans: Sequence[KVSpan | LayerLoader]) -> int:
        """Check that spans are this model's and follow each other from position 0; how many tokens they hold.

        Raises:
            ValueError: saying what does not fit.
        """
        tokens = 0
        for span in spans:
            if span.fingerprint != self.fingerprint:
                raise ValueError(
                    "this KVCache was made by another model or type of numbers; it cannot be used here"
                )
            if span.start != tokens:
                raise ValueError(
                    f"KVCache from position {span.start} on follows {tokens} tokens; no gap is allowed"
                )
            tokens += span.tokens
        return tokens

    def _stream(self, work: Work) -> LayerHook | None:
        """A hook that hands out new keys and values and waits for given ones, or None where it is not needed."""
        listening = [
            (request.request.on_kv, self.cache.table(request.blocks), segment)
            for request, segment in work
            if request.request.on_kv is not None
        ]
        loading = [(request.kv_loader, segment.cached_tokens) for request, segment in work if request.kv_loader]
        if not listening and not loading:
            return None

        def on_layer(layer: int) -> None:
            for prefix, tokens in loading:
                prefix.wait(layer, tokens)
            for on_kv, table, segment in listening:  # after the prefix, so that a layer leaves from the front
                start = segment.cached_tokens
                on_kv(layer, start, self.cache.read(layer, table, start, start + segment.new_tokens))

        return on_layer


def _piece(request: RunningRequest, segment: Segment) -> Piece:
    start = segment.cached_tokens
    tokens = request.tokens[start : start + segment.new_tokens].astype(np.int64)
    return Piece(tokens, start, request.blocks, segment.emits)
