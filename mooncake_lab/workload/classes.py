"""Classes of requests: a share of them is more urgent than the others."""

from dataclasses import replace

from mooncake_lab.core import TracedRequest, keyed_uniform


def in_class(traced: TracedRequest, urgent_share: float, *, seed: int = 0) -> TracedRequest:
    """The request with priority 1 if it is of so large a share, else 0; who else comes does not matter.

    Args:
        traced: the request.
        urgent_share: from 0, nobody, to 1, everybody.
        seed: of the draw.
    """
    urgent = keyed_uniform(seed, "urgent", traced.request.id) < urgent_share
    return replace(traced, request=replace(traced.request, priority=int(urgent)))
