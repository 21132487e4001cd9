"""What every worker has at hand, whatever its duty: a model, its identity, a voice and couriers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake_lab.batching.policies import CHUNKED_POLICIES
from mooncake_lab.core import block_keys
from mooncake_lab.engine import EngineSettings, GenerationRequest, LlamaModel, Sampling
from mooncake_lab.engine.sequence import TokenCallback
from mooncake_lab.serving.arriving import Delivery
from mooncake_lab.serving.couriers import Couriers
from mooncake_lab.serving.kv import KVShape
from mooncake_lab.serving.lane import Lane
from mooncake_lab.serving.messages import Event, Generation, Order
from mooncake_lab.serving.messenger import Identity
from mooncake_lab.serving.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """A worker's belongings."""

    spec: WorkerSpec
    model: LlamaModel
    shape: KVShape
    who: Identity
    couriers: Couriers
    lane: Lane | None
    """What KVCache travels by; None is the Messenger's own connections."""
    say: Callable[[Event], None]
    """Tells the cluster."""
    note: Callable[[object], None]
    """Puts something into the worker's own inbox, from any thread."""

    def settings(self, tokens: int, *, prefix_reuse: bool = False) -> EngineSettings:
        """Those of an engine with KVCache for so many tokens."""
        spec = self.spec
        cuts_prompts = spec.role != "coupled" or spec.batching in CHUNKED_POLICIES
        widest = spec.chunk_tokens if cuts_prompts else spec.max_request_tokens
        return EngineSettings(
            block_size_tokens=spec.block_size_tokens,
            cache_blocks=max(1, tokens // spec.block_size_tokens),
            max_batch_tokens=max(widest, spec.max_requests),
            max_requests=spec.max_requests,
            max_request_tokens=spec.max_request_tokens,
            prefix_reuse=prefix_reuse,
            keep_log=spec.role == "coupled" or (spec.role == "decode" and spec.metronome is not None),
        )

    def keys(self, prompt: npt.NDArray[np.int32]) -> list[bytes]:
        """The names of a prompt's whole blocks."""
        size, name = self.spec.block_size_tokens, self.shape.fingerprint
        return block_keys(prompt, size, namespace=name, partial=False)


class Duty(Protocol):
    """What a worker does: it is given orders and deliveries, and steps while it is busy."""

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """KVCache tokens that its engine holds."""
        ...

    def take(self, item: Order | Delivery | object) -> None:
        """Take an order, a delivery, or a note to itself."""
        ...

    def step(self) -> None:
        """One iteration."""
        ...


def tokens_of(asked: Generation) -> npt.NDArray[np.int32]:
    """The prompt of a request, shape (n,)."""
    return np.frombuffer(asked.prompt, dtype="<i4").astype(np.int32)


def sampling_of(asked: Generation) -> Sampling:
    """How its tokens are chosen."""
    return Sampling(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed)


def generation_request(asked: Generation, on_token: TokenCallback) -> GenerationRequest:
    """A request as an engine takes it.

    Raises:
        ValueError: when a number of it is out of range.
    """
    return GenerationRequest(
        prompt=tokens_of(asked),
        max_new_tokens=asked.max_new_tokens,
        sampling=sampling_of(asked),
        end_tokens=asked.end_tokens,
        min_new_tokens=asked.min_new_tokens,
        on_token=on_token,
    )
