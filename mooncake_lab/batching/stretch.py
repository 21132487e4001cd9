"""How long a plan of decodes stays the plan: what lets a simulator skip ahead without losing a token."""

from collections.abc import Sequence

from mooncake_lab.batching.plan import Limits, Progress


def decode_stretch_steps(decoding: Sequence[Progress], limits: Limits) -> int:
    """Iterations for which a plan of nothing but decodes stays the same, for every policy here.

    It is the number of steps until the free blocks run out. Within it only a change of membership ends the
    stretch (an arrival, a request that is done or cancelled), and whoever acts on the plan knows those: a head of
    the queue that could not come in cannot do so while the others only grow.

    Args:
        decoding: all requests that run, each decoding.
        limits: what the instance may spend now.

    Raises:
        ValueError: when no request runs, or one is not decoding.
    """
    if not decoding:
        raise ValueError("a stretch of decodes needs at least one request")
    for request in decoding:
        if not request.decoding:
            raise ValueError(
                f"request {request.request_id} has {request.pending_tokens} tokens pending, not a decode"
            )
    # What is left in the blocks of each request is used up first; then they take turns in taking free ones.
    block = limits.block_size_tokens
    slack = [request.held_blocks * block - request.cached_tokens for request in decoding]
    rounds = limits.free_blocks // len(decoding)
    low, high = max(rounds * block + min(slack), 0), max(rounds * block + max(slack), 0)
    while low < high:
        middle = (low + high + 1) // 2
        if _missing_blocks(slack, middle, block) <= limits.free_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _missing_blocks(slack: Sequence[int], steps: int, block: int) -> int:
    """Blocks the requests need beyond those they hold to make that many steps."""
    return sum(-((left - steps) // block) for left in slack if steps > left)
