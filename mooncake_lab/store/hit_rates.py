"""What share was reused: four answers to one question, from the hits of each request.

A hit rate needs a definition. Counting blocks flatters nobody but overweights the last, partly filled block;
counting tokens weights long prompts as their prefill does; averaging over requests weights users equally; and the
released traces, whose blocks have 512 tokens, hide reuse inside a block that a cache with small blocks would find.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.replay import Replay

Ints: TypeAlias = npt.NDArray[np.int64]
"""A vector of whole numbers, one a request."""


def token_hit_rate(hits: Ints, input_tokens: Ints, *, block_size_tokens: int = 512) -> float:
    """Reused tokens per input token, when a hit saves a whole block (definition D2).

    Args:
        hits: shape (requests,), blocks found, prefix or not.
        input_tokens: shape (requests,), the length of each prompt; a partial last block counts what it holds.
        block_size_tokens: tokens of a full block.
    """
    reused = np.minimum(block_size_tokens * hits, input_tokens)
    return float(reused.sum() / input_tokens.sum())


def mean_request_hit_rate(hits: Ints, input_tokens: Ints, *, block_size_tokens: int = 512) -> float:
    """The mean over requests of the reused share of their tokens: every user counts the same."""
    return float(np.mean(np.minimum(block_size_tokens * hits, input_tokens) / input_tokens))


def fine_grained_hit_rate(
    replay: Replay,
    input_tokens: Ints,
    *,
    remainder_tokens: int,
    first_block_remainder_tokens: int | Ints | None = None,
    block_size_tokens: int = 512,
) -> float:
    """Reused tokens per input token as a cache of much smaller blocks would have them (definition D3).

    It is the one that matches FAST'25 Fig. 9. A request whose first `k` blocks match shares some tokens of block
    `k` too, which a trace of large blocks cannot show. They are assumed: `remainder_tokens` more, none when
    nothing matches, and never the whole prompt, since a prefill has to compute at least the last token.

    Args:
        replay: from `replay_tokens`, where the last block costs only what it holds.
        input_tokens: shape (requests,), the length of each prompt.
        remainder_tokens: assumed further tokens when at least one block matches (an even guess: half a block).
        first_block_remainder_tokens: the same when exactly one block matches, where a system prompt known to end
            inside the second block says more; one number, or one a request. `None` is `remainder_tokens`.
        block_size_tokens: tokens of a full block.
    """
    matched = replay.prefix_hits_by_request
    after_first = remainder_tokens if first_block_remainder_tokens is None else first_block_remainder_tokens
    remainder = np.where(matched == 1, after_first, remainder_tokens)
    reused = np.where(matched > 0, block_size_tokens * matched + remainder, 0)
    return float(np.minimum(reused, input_tokens - 1).sum() / input_tokens.sum())
