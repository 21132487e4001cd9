"""What the Conductor sees when it decides: plain values, taken at one moment, about one request.

A view is built by whoever runs the cluster, by peeking. How old it is, and whether what it says is
still true, is that builder's business; a policy only reads it. Views are named tuples because a
replay of an hour of traffic makes a quarter of a million of them.
"""

from typing import NamedTuple


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
    """Transfers it is sending now; they share its network card."""


class DecodeView(NamedTuple):
    """One decode instance."""

    name: str
    requests: int
    """Requests decoding there, or on their way."""
    context_tokens: int
    """KVCache tokens of those requests."""
    capacity_tokens: int
    """KVCache tokens that fit into its GPU memory."""


class ClusterView(NamedTuple):
    """The whole cluster, as seen for one request."""

    taken_at_s: float
    prefill: tuple[PrefillView, ...]
    decode: tuple[DecodeView, ...]
