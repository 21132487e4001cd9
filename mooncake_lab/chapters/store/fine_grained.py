"""Reuse inside a block: what a trace of large blocks hides, put back by a stated assumption."""

import numpy as np
import numpy.typing as npt


def fine_grained_reuse(
    prefix_hits: npt.NDArray[np.int64],
    input_tokens: npt.NDArray[np.int64],
    *,
    remainder_tokens: int,
    after_first_tokens: int | npt.NDArray[np.int64] | None = None,
    block_size_tokens: int = 512,
) -> npt.NDArray[np.int64]:
    """Tokens each request would reuse in a cache of much smaller blocks, shape (requests,); for FAST'25 Fig. 9.

    A request whose first `k` blocks match shares some tokens of the next one too, which the released traces, in
    blocks of 512 tokens, cannot show. They are assumed: `remainder_tokens` more when something matches, and
    never the whole prompt, since a prefill has to compute at least the last token.

    Args:
        prefix_hits: shape (requests,), matching blocks from the start.
        input_tokens: shape (requests,), the length of each prompt.
        remainder_tokens: assumed further tokens (an even guess: half a block).
        after_first_tokens: the same when exactly one block matches, where a system prompt known to end inside the
            second block says more; one number, or one a request. `None` is `remainder_tokens`.
        block_size_tokens: tokens of a full block.

    Raises:
        ValueError: when the vectors differ in length.
    """
    if prefix_hits.shape != input_tokens.shape:
        raise ValueError(f"{prefix_hits.shape} prefix hits and {input_tokens.shape} prompts; one each is needed")
    after_first = remainder_tokens if after_first_tokens is None else after_first_tokens
    remainder = np.where(prefix_hits == 1, after_first, remainder_tokens)
    reused = np.where(prefix_hits > 0, block_size_tokens * prefix_hits + remainder, 0)
    return np.minimum(reused, input_tokens - 1)
