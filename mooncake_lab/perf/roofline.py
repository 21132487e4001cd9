"""The roofline: no work is faster than its FLOPs at peak speed, or its bytes at peak bandwidth.

Bytes are compulsory traffic only: weights once, KVCache read once and written once. Real kernels move
more, so times from here are floors, and `perf.floor` uses them as such.
"""

from dataclasses import dataclass

from mooncake_lab.perf.flops import decode_flops, exact_prefill_flops, kv_bytes
from mooncake_lab.perf.hardware import Hardware
from mooncake_lab.perf.models import ModelShape


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


def attainable_flops_per_s(hardware: Hardware, intensity_flops_per_byte: float, dtype: str = "bfloat16") -> float:
    """The roof at one arithmetic intensity: peak FLOP/s, or what memory can feed."""
    return min(hardware.flops_per_s(dtype), intensity_flops_per_byte * hardware.memory_bytes_per_s)


def ridge_flops_per_byte(hardware: Hardware, dtype: str = "bfloat16") -> float:
    """The intensity at which computing takes over from memory as the limit."""
    return hardware.flops_per_s(dtype) / hardware.memory_bytes_per_s
