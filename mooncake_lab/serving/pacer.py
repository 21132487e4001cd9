"""A pacer: engines compute real tokens, but each iteration lasts as long as a latency model says.

Processes, sockets, KVCache, schedulers and tokens stay real; chapter 12 calls it a metronome. Workers that share a
few cores then are nodes of their own, and a measurement says what the system does at that pace. It works while the
machine computes faster than the pace; a late iteration is not made up for, and shows in the log.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import msgspec

from mooncake_lab.batching import Plan
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, PrefillLatency


class Pacer(msgspec.Struct, frozen=True, kw_only=True):
    """How long computing takes, whatever the machine."""

    prefill: PrefillLatency
    decode: DecodeLatency
    hybrid: HybridLatency

    @classmethod
    def of(cls, model: LatencyModel) -> "Pacer":
        """The pace of a latency model."""
        return cls(prefill=model.prefill, decode=model.decode, hybrid=model.hybrid)

    def paced(self, model: LatencyModel) -> LatencyModel:
        """A latency model whose engines compute at this pace."""
        return replace(model, prefill=self.prefill, decode=self.decode, hybrid=self.hybrid)

    def hold_prefill(self, start_s: float, prompts: Sequence[tuple[int, int]]) -> None:
        """Return when prompts that began together then would be computed; they share the constant part.

        Args:
            start_s: when they began (monotonic clock).
            prompts: tokens and reused tokens of each.
        """
        seconds = self.prefill.constant_s * (1 - len(prompts))
        for tokens, reused_tokens in prompts:
            seconds += float(self.prefill.seconds(float(tokens), float(reused_tokens)))
        _hold(start_s + seconds)

    def hold_iteration(self, start_s: float, plan: Plan, begun: int = 0) -> None:
        """Return when an iteration of prompts and decodes that began then would be over.

        Args:
            start_s: when it began (monotonic clock).
            plan: what it computed.
            begun: prompts of which it was the first piece.
        """
        if plan.segments:
            _hold(start_s + self.hybrid.batch_s(*plan.work) + begun * self.prefill.constant_s)

    def hold_decode(self, start_s: float, plan: Plan) -> None:
        """Return when a decode step that began then would be over; with a prompt to recompute, an iteration."""
        pieces, decodes, context_tokens = plan.work
        if pieces:
            self.hold_iteration(start_s, plan)
        elif decodes:
            _hold(start_s + float(self.decode.step_s(float(decodes), float(context_tokens))))


@final
class PacedLink:
    """A worker's network card, as slow as one that is to be studied. Mutable: it is busy until it has sent all.

    Args:
        bytes_per_s: that it carries; None is as many as the network of this machine does.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def hold(self, size_bytes: int) -> None:
        """Return when these bytes are carried, behind those of all other threads."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            until_s = self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self._bytes_per_s
        _hold(until_s)


def _hold(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))
