"""The GPU memory of a coupled instance: which KVCache blocks its requests hold, own and share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from mooncake_lab.batching import Limits, Progress
from mooncake_lab.conductor import ServedView
from mooncake_lab.core import BlockKey, TracedRequest
from mooncake_lab.simulation.device_cache import DeviceCache


@dataclass(slots=True, eq=False)
class Resident:
    """A request at an instance; it changes as its tokens are computed."""

    traced: TracedRequest
    rank: int
    """Order of arrival at the instance."""
    believed_s: float
    """How long the Conductor thinks its prefill takes."""
    served: ServedView
    """It as the Conductor sees it: when it began to decode here, or is expected to."""
    max_tokens: int
    """The most tokens of its answer, as its client states it, or by default."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    shown_tokens: int = 0
    """Those of the generated tokens that its user has from an instance that died."""
    reused_tokens: int = 0
    """Prompt tokens that it found in the cache when it was first admitted.

    A preempted request may find its own blocks again: that saves computation, and is no hit of the workload.
    """
    admitted: bool = False
    """Whether it was ever given a place; a preempted request stays admitted."""
    begun: bool = False
    """Whether some of its prompt has been computed."""
    keys: tuple[BlockKey, ...] = field(default=())
    """Blocks it shares through the device cache."""

    @property
    def is_queued(self) -> bool:
        """Whether what it brought here, its prompt above all, is still to be computed."""
        return self.generated_tokens == self.shown_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens it generates in all; prefill gives one even where the trace says none."""
        return max(1, self.traced.output_tokens)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Counts blocks in the unit of the instance's limits, with or without a cache for prefixes."""

    limits: Limits
    cache: DeviceCache | None

    @property
    def capacity_tokens(self) -> int:
        """KVCache tokens that fit."""
        return self.limits.capacity_blocks * self.limits.block_size_tokens

    def limits_now(self, running: Iterable[Resident]) -> Limits:
        """The limits with the blocks that are free now; blocks kept only for reuse count as free."""
        pinned = 0 if self.cache is None else self.cache.pinned_tokens // self.limits.block_size_tokens
        free = self.limits.capacity_blocks - pinned - self._private_blocks(running)
        return msgspec.structs.replace(self.limits, free_blocks=max(0, free))

    def progress(self, resident: Resident) -> Progress:
        """A request as its policy may see it."""
        request, block = resident.traced.request, self.limits.block_size_tokens
        cached, held, shared = resident.cached_tokens, -(-resident.cached_tokens // block), 0
        if self.cache is not None:
            whole = request.block_size_tokens // block
            if cached:
                shared = self.cache.pinned_among(resident.keys, times=2) * whole
            else:
                matched = self.cache.matched(request)
                cached = matched * request.block_size_tokens
                held = self.cache.pinned_among(request.block_keys[:matched]) * whole
        return Progress(
            request_id=request.id,
            arrival=resident.rank,
            prompt_tokens=request.input_tokens,
            cached_tokens=cached,
            generated_tokens=resident.generated_tokens,
            held_blocks=held,
            shared_blocks=shared,
            max_new_tokens=resident.max_tokens,
        )

    def enter(self, resident: Resident) -> None:
        """A request got a place: what the cache holds of its prompt is its own now."""
        if self.cache is not None:
            request = resident.traced.request
            resident.keys = self.cache.acquire(request, self.cache.matched(request))
            resident.cached_tokens = len(resident.keys) * request.block_size_tokens
            resident.reused_tokens = 0 if resident.admitted else resident.cached_tokens
        resident.admitted = True

    def computed(self, resident: Resident) -> None:
        """A request's prompt is complete: others may use it."""
        if self.cache is not None:
            resident.keys = self.cache.keep(resident.traced.request, resident.keys)

    def leave(self, resident: Resident) -> None:
        """A request gives up its blocks."""
        if self.cache is not None:
            self.cache.release(resident.keys)
        resident.keys, resident.begun = (), False
        resident.cached_tokens = resident.reused_tokens = 0

    def settle(self, running: Sequence[Resident]) -> None:
        """What is kept only for reuse makes room for what the running requests need."""
        if self.cache is not None:
            self.cache.make_room(self._private_blocks(running) * self.limits.block_size_tokens)

    def _private_blocks(self, running: Iterable[Resident]) -> int:
        """Blocks that belong to one running request alone."""
        block = self.limits.block_size_tokens
        return sum(
            -(-r.cached_tokens // block) - len(r.keys) * (r.traced.request.block_size_tokens // block)
            for r in running
        )
