"""Classes of requests: a share of them is more urgent than the others."""

from dataclasses import replace

from mooncake_lab.core import TracedRequest, keyed_uniform


def in_class(traced: TracedRequest, urgent_share: float, *, seed: int = 0) -> TracedRequest:
    """The request with priority 1 for a share of requests, else 0; it does not depend on the other requests.

    Args:
        traced: the request.
        urgent_share: from 0 (no request) to 1 (every request).
        seed: of the draw.
    """
    urgent = keyed_uniform(seed, "urgent", traced.request.id) < urgent_share
    return replace(traced, request=replace(traced.request, priority=int(urgent)))
