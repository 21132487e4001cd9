"""FLOPs and bytes of prefill and decode, and the roofline: no work is faster than its FLOPs or its bytes allow.

FAST'25 Eq. 1 is here twice: as the paper prints it, and as it really is. Token counts are scalars or float arrays.
Bytes are compulsory traffic only: weights once, KVCache read once and written once. Real kernels move more.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from mooncake_lab.perf.specs import Hardware, ModelShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Count = TypeVar("Count", float, "npt.NDArray[np.float64]")
"""A number of tokens, or an array of them."""

PRINTED_A: Final = 4
"""Eq. 1's attention coefficient: query times key and weight times value, 2 FLOPs each, no causal mask."""
PRINTED_B: Final = 22
"""Eq. 1's coefficient of everything linear in the tokens."""


def printed_prefill_flops(shape: ModelShape, tokens: Count, reused_tokens: Count | float = 0) -> Count:
    """FLOPs of a prefill by FAST'25 Eq. 1 exactly as printed: `l (a n^2 d + b n d^2)`, minus the prefix.

    It counts the attention of every token to every token, also to later ones that a causal model masks.
    """
    pairs = PRINTED_A * shape.width * (tokens * tokens - reused_tokens * reused_tokens)
    linear = PRINTED_B * shape.width**2 * (tokens - reused_tokens)
    return shape.layers * (pairs + linear)


def exact_prefill_flops(shape: ModelShape, tokens: Count, reused_tokens: Count | float = 0) -> Count:
    """FLOPs of a causal prefill counted from the shapes of its matrices, 2 for each multiply-add.

    The output head (one token per prompt: below 0.001 % of a 70B prefill of 8192 tokens) and
    normalisations are left out, as in Eq. 1, so that counts of consecutive pieces add up.
    """
    pairs = (tokens * (tokens + 1) - reused_tokens * (reused_tokens + 1)) / 2
    linear = 2 * shape.layer_parameters * (tokens - reused_tokens)
    return shape.layers * (4 * shape.query_width * pairs + linear)


def decode_flops(shape: ModelShape, batch: Count, context_tokens: Count | float) -> Count:
    """FLOPs of one decode step of `batch` requests that together attend to `context_tokens` cached tokens."""
    linear = 2 * (shape.layers * shape.layer_parameters + shape.head_parameters)
    return batch * linear + 4 * shape.query_width * shape.layers * (context_tokens + batch)


def kv_bytes(shape: ModelShape, tokens: Count) -> Count:
    """KVCache bytes of a prefix: `p l (2 d / gqa) s` (FAST'25 §2.2)."""
    return tokens * shape.kv_bytes_per_token


def reuse_bandwidth_bytes_per_s(shape: ModelShape, prefix_tokens: Count, flops_per_s: float) -> Count:
    """FAST'25 Eq. 2: the bandwidth above which loading a prefix is faster than computing it again.

    `B / G > 2 d s / (gqa (a p d + b d^2))`: it falls with the prefix (attention makes long prefixes
    dear) and with the width of the model, and grows with the speed of its devices.
    """
    flops_per_token = shape.layers * shape.width * (PRINTED_A * prefix_tokens + PRINTED_B * shape.width)
    return flops_per_s * shape.kv_bytes_per_token / flops_per_token


def reuse_crossover_tokens(shape: ModelShape, bytes_per_s: float, flops_per_s: float) -> float:
    """The shortest prefix worth loading at this bandwidth by Eq. 2; 0 when every prefix is.

    Raises:
        ValueError: when a rate is not positive.
    """
    if not (bytes_per_s > 0 and flops_per_s > 0):
        raise ValueError(f"rates are {bytes_per_s!r} B/s and {flops_per_s!r} FLOP/s; both must be positive")
    flops_needed = flops_per_s * shape.kv_bytes_per_token / bytes_per_s
    linear = PRINTED_B * shape.layers * shape.width**2
    return max(0.0, (flops_needed - linear) / (PRINTED_A * shape.layers * shape.width))


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage must compute and move at the least."""

    flops: float
    bytes: float

    @property
    def intensity_flops_per_byte(self) -> float:
        """Arithmetic intensity: FLOPs for each byte that must move."""
        return self.flops / self.bytes

    def floor_s(self, hardware: Hardware, dtype: str = "bfloat16") -> float:
        """The shortest possible time on this hardware: the slower of computing and moving."""
        return max(self.flops / hardware.flops_per_s(dtype), self.bytes / hardware.memory_bytes_per_s)


def prefill_work(shape: ModelShape, tokens: int, reused_tokens: int = 0) -> Work:
    """The work of a causal prefill of `tokens` tokens of which a prefix is already in device memory."""
    flops = exact_prefill_flops(shape, tokens, reused_tokens)
    return Work(flops, shape.layers * shape.layer_parameters * shape.bytes_per_element + kv_bytes(shape, tokens))


def decode_work(shape: ModelShape, batch: int, context_tokens: int) -> Work:
    """The work of one decode step of `batch` requests with `context_tokens` cached tokens in all."""
    flops = decode_flops(shape, batch, context_tokens)
    return Work(flops, shape.streamed_weight_bytes + kv_bytes(shape, context_tokens + batch))


def kernel_work(shape: ModelShape, tokens: int, context_tokens: int, pairs: float) -> dict[str, Work]:
    """The work of every kernel of one layer in an iteration, by the names of the engine's operations.

    Each kernel reads its inputs and weights once and writes its outputs once. What a kernel keeps between its
    parts, such as the partial sums of split decode attention, is not counted.

    Args:
        shape: of the model.
        tokens: new tokens of the iteration.
        context_tokens: tokens whose keys and values attention reads, in all.
        pairs: pairs of a query and a key: `context_tokens` for decodes, `p (p + 1) / 2` for a prompt of `p`.
    """
    size, query, kv = shape.bytes_per_element, shape.query_width, shape.kv_width
    matrices = {
        "qkv": (shape.width, query + 2 * kv),
        "output": (query, shape.width),
        "gate and up": (shape.width, (shape.ffn_matrices - 1) * shape.ffn_width),
        "down": (shape.ffn_width, shape.width),
    }
    angle_bytes = 4 * shape.head_width + 16  # cosines and sines in float32; position and slot in 64 bits
    return {
        "add_norm": Work(5 * tokens * shape.width, size * (4 * tokens + 1) * shape.width),
        **{name: Work(2 * tokens * a * b, size * (a * b + tokens * (a + b))) for name, (a, b) in matrices.items()},
        "rotate_and_store": Work(3 * tokens * (query + kv), tokens * (2 * size * (query + 2 * kv) + angle_bytes)),
        "attention": Work(4 * query * pairs, size * 2 * (context_tokens * kv + tokens * query)),
        "silu_and_multiply": Work(5 * tokens * shape.ffn_width, 3 * size * tokens * shape.ffn_width),
    }


def attainable_flops_per_s(hardware: Hardware, intensity_flops_per_byte: float, dtype: str = "bfloat16") -> float:
    """The roof at one arithmetic intensity: peak FLOP/s, or what memory can feed."""
    return min(hardware.flops_per_s(dtype), intensity_flops_per_byte * hardware.memory_bytes_per_s)


def ridge_flops_per_byte(hardware: Hardware, dtype: str = "bfloat16") -> float:
    """The intensity at which computing takes over from memory as the limit."""
    return hardware.flops_per_s(dtype) / hardware.memory_bytes_per_s
