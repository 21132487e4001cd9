"""How much of loading and storing KVCache the computation hides (arXiv Fig. 7), measured with a DRAM tier.

Each round computes serialized, layer by layer, and without any transfer. Results are medians, and medians of what
was paired within a round.
"""  # noqa: INP001  # scripts, not a package

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mooncake_lab.bench.media import prefill_engine
from mooncake_lab.bench.rounds import in_order, paired_rounds, timed
from mooncake_lab.core import MIB
from mooncake_lab.engine.layerwise.prefill import LayerwisePrefill
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.sequence import GenerationRequest
from mooncake_lab.store.backends import DramBackend, StorageBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

Operation = Literal["load", "store"]
OVERLAPS = {"serialized": False, "layerwise": True}
_Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseTime:
    """One operation at one length; seconds are medians over the rounds."""

    operation: Operation
    prompt_tokens: int
    moved_tokens: int
    """Tokens whose KVCache was loaded (the rest of the prompt was computed), or stored (all was computed)."""
    moved_bytes: int
    compute_s: float
    """The same prefill with nothing to load and nothing to store: the prefix lay in the engine."""
    serialized_s: float
    """Load all, then compute; or compute, then store all."""
    layerwise_s: float
    """Both at once, until the last of it is done."""
    serialized_extra_s: float
    """Median of serialized minus compute within a round: arXiv Fig. 7's latency of storing."""
    layerwise_extra_s: float
    """The same of layer-wise."""
    hidden_share: float
    """1 - layer-wise extra / serialized extra, of those medians: 1 hides everything, 0 nothing."""
    rounds: int


def measure_layerwise(
    model: LlamaModel, *, prompt_tokens: Sequence[int], new_tokens: int, block_tokens: int, rounds: int
) -> list[LayerwiseTime]:
    """Load a prefix and store a prompt, serialized and layer by layer, beside computing alone.

    Args:
        model: computes.
        prompt_tokens: lengths, each a multiple of `block_tokens`. Storing computes and stores all of it; loading
            loads all of it and computes `new_tokens` more.
        new_tokens: computed behind a loaded prefix: loading hides behind nothing else.
        block_tokens: tokens of a block in the store.
        rounds: each visits every row once; one more warms up.
    """
    longest = max(prompt_tokens) + new_tokens
    token_bytes = model.config.kv_bytes_per_token(model.embedding.dtype.itemsize)
    medium = DramBackend(3 * longest * token_bytes + 64 * MIB)
    try:
        bench = _Bench(model, medium, block_tokens, longest)
        return [
            bench.compare(operation, tokens, tokens + (new_tokens if operation == "load" else 0), rounds)
            for tokens in prompt_tokens
            for operation in ("load", "store")
        ]
    finally:
        medium.close()


class _Bench:
    """One model over one medium. Mutable: prompts are drawn anew for every round."""

    def __init__(self, model: LlamaModel, medium: StorageBackend, block_tokens: int, longest: int) -> None:
        self._model = model
        self._medium = medium
        self._block_tokens = block_tokens
        self._draw = np.random.default_rng(0)
        self._engine = prefill_engine(model, longest)
        self._token_bytes = model.config.kv_bytes_per_token(model.embedding.dtype.itemsize)

    def compare(self, operation: Operation, moved: int, tokens: int, rounds: int) -> LayerwiseTime:
        """Time the three ways in turns."""
        time_ways = self._load if operation == "load" else self._store

        def time_once(number: int) -> dict[str, float]:
            prompt = self._draw.integers(0, self._model.config.vocabulary, tokens).astype(np.int32)
            return time_ways(prompt, moved, in_order(OVERLAPS, number))

        taken = paired_rounds(time_once, rounds)
        extras = {way: taken.extra_s(way, "compute") for way in OVERLAPS}
        return LayerwiseTime(
            operation=operation,
            prompt_tokens=tokens,
            moved_tokens=moved,
            moved_bytes=moved * self._token_bytes,
            compute_s=taken.median_s("compute"),
            serialized_s=taken.median_s("serialized"),
            layerwise_s=taken.median_s("layerwise"),
            serialized_extra_s=extras["serialized"],
            layerwise_extra_s=extras["layerwise"],
            hidden_share=1 - extras["layerwise"] / extras["serialized"],
            rounds=rounds,
        )

    def _load(self, prompt: _Tokens, moved: int, ways: Sequence[str]) -> dict[str, float]:
        """A prompt whose beginning is in the store; for computing alone, in the engine's own KVCache."""
        with TieredStore([TierSettings(medium=self._medium)]) as store:
            with self._over(store, overlap=True) as filling:
                filling.prefill(prompt[:moved])
            alone = GenerationRequest(prompt=prompt, max_new_tokens=1, end_tokens=())
            # the engine kept the prefix; `prefill` would copy it out again, which the other ways do not
            seconds = {"compute": timed(lambda: self._engine.engine.generate([alone]))}
            for way in ways:
                self._forget()
                with self._over(store, overlap=OVERLAPS[way]) as prefill:
                    seconds[way] = timed(lambda prefill=prefill: prefill.prefill(prompt, keep=False))
        self._empty()
        return seconds

    def _store(self, prompt: _Tokens, _moved: int, ways: Sequence[str]) -> dict[str, float]:
        """A prompt of which the store holds nothing; every way begins with an empty one."""
        self._forget()
        seconds = {"compute": timed(lambda: self._engine.prefill(prompt))}
        for way in ways:
            self._forget()
            with (
                TieredStore([TierSettings(medium=self._medium)]) as store,
                self._over(store, overlap=OVERLAPS[way]) as prefill,
            ):
                seconds[way] = timed(lambda prefill=prefill: (prefill.prefill(prompt), prefill.flush()))
            self._empty()
        return seconds

    def _over(self, store: TieredStore, *, overlap: bool) -> LayerwisePrefill:
        return LayerwisePrefill(
            self._engine, store, block_tokens=self._block_tokens, overlap=overlap, queue_bytes=1 << 62
        )

    def _forget(self) -> None:
        """Let the engine keep nothing."""
        self._engine.engine.allocator.forget()

    def _empty(self) -> None:
        """Let the medium hold nothing."""
        self._medium.free(*self._medium.blocks())
