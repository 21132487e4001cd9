"""Names and numbers that a hash decides: the keys of blocks, and draws that depend on names, not on order.

A block key names a block of tokens *and* everything before it (arXiv §3, Fig. 3): `key[i] = H(key[i-1] || tokens
of block i)` with XXH3 of 128 bits as `H`, so two prompts share key `i` exactly when their first `i + 1` blocks
are equal. The chain starts from a namespace (the model's fingerprint), so that a block computed by one model is
never found by another.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from mooncake_lab.core.request import BlockKey
from mooncake_lab.core.units import blocks_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def block_keys(
    tokens: "npt.NDArray[np.int32]",
    block_size_tokens: int = 512,
    *,
    namespace: bytes = b"",
    partial: bool = True,
) -> list[bytes]:
    """The chained keys of a prompt, one a block, front to back.

    Args:
        tokens: shape (n,), token ids as int32.
        block_size_tokens: tokens per block.
        namespace: what else must be equal for a block to be reusable (model weights, dtype, rope).
        partial: whether a last block with fewer tokens gets a key too (the traces: yes; engines that
            reuse only whole blocks: no).

    Raises:
        ValueError: when the tokens are not a vector of int32, or a parameter is out of range.
    """
    if tokens.ndim != 1 or tokens.dtype != "int32":
        raise ValueError(f"tokens have shape {tokens.shape} and type {tokens.dtype}; a vector of int32 is needed")
    digest = xxhash.xxh3_128_digest
    blocks = blocks_for(len(tokens), block_size_tokens)
    if not partial:
        blocks = len(tokens) // block_size_tokens
    raw = tokens.tobytes()
    step = block_size_tokens * tokens.itemsize
    key = digest(namespace)
    keys: list[bytes] = []
    for start in range(0, blocks * step, step):
        key = digest(key + raw[start : start + step])
        keys.append(key)
    return keys


def answer_keys(
    prompt_keys: Sequence[BlockKey], input_tokens: int, answer_tokens: int, block_size_tokens: int
) -> tuple[BlockKey, ...]:
    """The keys of a prompt with a simulated answer behind it, whose tokens nobody knows.

    The last key of the prompt names all of it, and equal prompts have equal answers. So the key of a block of the
    answer follows from that key and from how many tokens end with the block.

    Args:
        prompt_keys: of the prompt, one per block.
        input_tokens: of the prompt.
        answer_tokens: of the answer, or of its beginning.
        block_size_tokens: tokens per block.
    """
    whole, tokens = input_tokens // block_size_tokens, input_tokens + answer_tokens
    if not answer_tokens:
        return tuple(prompt_keys)
    last = prompt_keys[-1]
    raw = last if isinstance(last, bytes) else str(last).encode()
    blocks = range(whole, blocks_for(tokens, block_size_tokens))
    ends = [min((block + 1) * block_size_tokens, tokens) for block in blocks]
    digest = xxhash.xxh3_128_digest
    return (*prompt_keys[:whole], *(digest(raw + end.to_bytes(8, "little")) for end in ends))


def keyed_uniform(seed: int, *names: int | str | bytes) -> float:
    """A number uniform in [0, 1) that only the seed and the names decide.

    Policies use it instead of a random generator, so that they hold no state and their decisions replay.
    """
    digest = xxhash.xxh3_64(seed=seed % 2**64)
    for name in names:
        raw = name if isinstance(name, bytes) else str(name).encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return (digest.intdigest() >> 11) / 2**53
