"""The view on which the Conductor decides: plain values, taken at one moment, for one request.

The runtime builds a view without changing any state. A view may be old, and its values may have changed since. A
policy only reads it. Views are msgspec structs, because a replay of one hour of traffic makes about 250,000.
"""

from typing import Any, Self

import msgspec

from mooncake_lab.conductor.history import LengthHistogram, RecentView


class _View(msgspec.Struct, frozen=True, gc=False):
    """What all views have in common."""

    def replace(self, **changes: Any) -> Self:
        """The view with other values in some fields."""
        return msgspec.structs.replace(self, **changes)


class PrefillView(_View, frozen=True, gc=False):
    """One prefill instance."""

    name: str
    backlog_s: float
    """Computation that is queued or running there, by the Conductor's own estimates (T_queue of Algorithm 1)."""
    queued_requests: int
    """Requests queued or running."""
    assigned_requests: int
    """Requests ever sent there."""
    matched_blocks: int
    """How many leading blocks of *this* request's prompt it holds."""
    outgoing_flows: int = 0
    """Transfers that it sends at the full rate of the network; another transfer shares the network card with them.
    KVCache that is streamed layer by layer is slower and not counted."""
    matched_on_ssd: int = 0
    """Matched blocks that it has to read from SSD."""
    matched_in_dram: int = 0
    """Leading blocks that it reuses where it computes again what is on SSD; stated where something is."""


class ServedView(_View, frozen=True, gc=False):
    """One request that decodes, or will after its prefill. Its output length is not part of the type."""

    request_id: int
    input_tokens: int
    starts_s: float
    """When it began to decode; while it is loaded into GPU memory, when its KVCache had arrived; for a request on
    its way, when the Conductor expected it to decode, at its placement."""


class DecodeView(_View, frozen=True, gc=False):
    """One decode instance."""

    name: str
    requests: int
    """Requests decoding there, or on their way."""
    context_tokens: int
    """KVCache tokens of those requests."""
    capacity_tokens: int
    """KVCache tokens that fit into its GPU memory."""
    decoding: tuple[ServedView, ...] = ()
    """Requests that are present: they passed the second check, and decode or are being loaded into GPU memory."""
    coming: tuple[ServedView, ...] = ()
    """Requests that are on their way, up to the second check."""

    @property
    def present_requests(self) -> int:
        """Number of requests that are present."""
        return self.requests - len(self.coming)

    @property
    def present_tokens(self) -> int:
        """KVCache tokens that are present."""
        return self.context_tokens - sum(served.input_tokens for served in self.coming)


class ClusterView(_View, frozen=True, gc=False):
    """The whole cluster at one moment, for one request."""

    taken_at_s: float
    prefill: tuple[PrefillView, ...]
    decode: tuple[DecodeView, ...]
    answer_lengths: LengthHistogram | None = LengthHistogram()
    """See `lengths`; None where they are not counted."""
    recent: RecentView = RecentView()

    @property
    def lengths(self) -> LengthHistogram:
        """Lengths of the answers that have finished.

        Raises:
            LookupError: when they are not counted, as no policy of the cluster declares that it needs them.
        """
        if self.answer_lengths is None:
            raise LookupError(
                "ClusterView.lengths is not counted in this cluster; it is where the placement or the admission"
                " policy declares that it needs it: needs = frozenset({'lengths'})"
            )
        return self.answer_lengths
