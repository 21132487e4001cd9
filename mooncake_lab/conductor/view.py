"""What the Conductor sees when it decides: plain values, taken at one moment, about one request.

A view is built by whoever runs the cluster, by peeking. How old it is, and whether what it says is
still true, is that builder's business; a policy only reads it. Views are named tuples because a
replay of an hour of traffic makes a quarter of a million of them.
"""

from typing import NamedTuple

from mooncake_lab.conductor.lengths import LengthBook


class PrefillView(NamedTuple):
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
    """Transfers it is sending as fast as the network lets it; the next one shares the card with them. KVCache that
    leaves for decode as its layers are computed is slower, and not counted."""
    matched_on_ssd: int = 0
    """Those of the matched blocks that it would have to read from SSD."""


class ServedView(NamedTuple):
    """One request that decodes, or will when its prefill is done. How long is unknown, by type."""

    request_id: int
    input_tokens: int
    starts_s: float
    """When it began to decode; for one on its way, when the Conductor expected it to, as it was placed."""


class DecodeView(NamedTuple):
    """One decode instance."""

    name: str
    requests: int
    """Requests decoding there, or on their way."""
    context_tokens: int
    """KVCache tokens of those requests."""
    capacity_tokens: int
    """KVCache tokens that fit into its GPU memory."""
    decoding: tuple[ServedView, ...] = ()
    """Those of its requests that are there."""
    coming: tuple[ServedView, ...] = ()
    """Those that are on their way."""

    @property
    def present_requests(self) -> int:
        """Requests that are there."""
        return self.requests - len(self.coming)

    @property
    def present_tokens(self) -> int:
        """KVCache tokens that are there."""
        return self.context_tokens - sum(served.input_tokens for served in self.coming)


class RecentView(NamedTuple):
    """What became of the requests that reached a decode instance lately."""

    window_s: float = 60.0
    received: int = 0
    """Requests whose KVCache arrived in the last `window_s` seconds."""
    refused: int = 0
    """Those of them that failed the double check: their prefill was wasted."""


class ClusterView(NamedTuple):
    """The whole cluster, as seen for one request."""

    taken_at_s: float
    prefill: tuple[PrefillView, ...]
    decode: tuple[DecodeView, ...]
    lengths: LengthBook = LengthBook()
    """Answers that have finished so far."""
    recent: RecentView = RecentView()
