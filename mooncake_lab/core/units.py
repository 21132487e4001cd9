"""Units: SI inside (seconds, bytes, tokens), named constants for what people say."""

from typing import Final

KIB: Final = 1024
"""Bytes in a KiB."""
MIB: Final = 1024**2
"""Bytes in a MiB."""
GIB: Final = 1024**3
"""Bytes in a GiB."""
GB: Final = 10**9
"""Bytes in a decimal gigabyte, the unit of bandwidths."""
TERA: Final = 10**12
"""The T of TFLOP/s."""


def gbps(gigabits_per_s: float) -> float:
    """Bytes per second of a link whose rate is given in decimal gigabits per second."""
    return gigabits_per_s * 1e9 / 8


def blocks_for(tokens: int, block_size_tokens: int) -> int:
    """KVCache blocks that `tokens` tokens occupy, the last one possibly partial.

    Raises:
        ValueError: when `tokens` is negative or `block_size_tokens` is not positive.
    """
    if tokens < 0 or block_size_tokens < 1:
        raise ValueError(
            f"cannot count blocks of {block_size_tokens} tokens in {tokens} tokens:"
            " the block size must be at least 1 and the tokens at least 0"
        )
    return -(-tokens // block_size_tokens)
