"""How many KVCache blocks are reserved for a request: those of its known tokens, or of the worst case."""

from collections.abc import Callable
from typing import TypeAlias

from mooncake_lab.batching.plan import Limits, Progress, Refusal

Reservation: TypeAlias = Callable[[Progress, Limits], int]
"""Blocks that a running request may count on; blocks reserved for one are not given to another."""


def known_blocks(request: Progress, limits: Limits) -> int:
    """Blocks for the tokens that exist: the whole prompt at once, then block by block (paged allocation).

    Nothing is reserved for tokens to come, so a cache may run short and a request must be preempted.
    """
    return -(-(request.prompt_tokens + request.generated_tokens) // limits.block_size_tokens)


def worst_case_blocks(request: Progress, limits: Limits) -> int:
    """Blocks for the longest the request may become (Orca's slots, FasterTransformer's static cache).

    No request is ever preempted. Where neither the client nor the model states a limit, that is the whole cache.
    """
    block = limits.block_size_tokens
    tokens = limits.capacity_blocks * block
    window, cap = limits.max_request_tokens, request.max_new_tokens
    if window is not None and window < tokens:
        tokens = window
    # The last token is never read again, so its keys and values are never written.
    if cap is not None and request.prompt_tokens + cap - 1 < tokens:
        tokens = request.prompt_tokens + cap - 1
    known = request.prompt_tokens + request.generated_tokens
    return -(-(max(known, tokens)) // block)


def refusal(request: Progress, limits: Limits) -> Refusal | None:
    """Why no iteration can ever finish this request, or None where one may."""
    window = limits.max_request_tokens
    if window is not None and request.prompt_tokens > window:
        return Refusal(
            request.request_id, f"a prompt of {request.prompt_tokens} tokens; the model's window is {window}"
        )
    longest = request.num_tokens
    if request.max_new_tokens is not None:
        stated = request.prompt_tokens + request.max_new_tokens - 1
        longest = max(longest, stated if window is None else min(stated, window))
    return too_large(request, longest, limits)


def whole_prompt_refusal(request: Progress, limits: Limits) -> Refusal | None:
    """The same for a policy that never cuts a prompt: what it computes must fit into one iteration."""
    if not request.generated_tokens and request.pending_tokens > limits.max_batch_tokens:
        return Refusal(
            request.request_id,
            f"{request.pending_tokens} tokens of its prompt have to be computed at once;"
            f" an iteration computes at most {limits.max_batch_tokens}",
        )
    return refusal(request, limits)


def too_large(request: Progress, tokens: int, limits: Limits) -> Refusal | None:
    """The refusal of a request that would hold `tokens` tokens, where the whole KVCache cannot."""
    capacity_tokens = limits.capacity_blocks * limits.block_size_tokens
    if tokens <= capacity_tokens:
        return None
    return Refusal(
        request.request_id,
        f"it needs {tokens} tokens of KVCache ({request.prompt_tokens} of them its prompt);"
        f" the whole cache holds {capacity_tokens}",
    )
