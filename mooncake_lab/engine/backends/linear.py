"""Linear operators on CPU: weights reordered once for oneDNN, and the plain linear where that is not to be had.

A plain linear reorders its weight at every call, which at 1 to 8 tokens is most of its time. The reordering
operator of torch is private; `prepacked_linear_available` asks it to prove itself before anything relies on it.
"""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.engine.backends.protocol import Linear

_TOKENS_HINT = 16
"""Batch size the reordering is tuned for; measured: as good at 1 and 2048 tokens as a hint of their own."""

_FEWEST_ROWS = 4
"""float32 inputs are padded to this number of rows: measured, oneDNN reads weights 1.5 times as fast for 4."""


def plain_linear(weight: torch.Tensor) -> Linear:
    """The weight as it is."""
    return lambda inputs: F.linear(inputs, weight)


def prepacked_linear(weight: torch.Tensor) -> Linear:
    """The weight in oneDNN's own order; the caller may drop the original."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS_HINT)  # noqa: SLF001  # no public name in torch
    run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001  # likewise
    if weight.dtype != torch.float32:
        return lambda inputs: run(inputs, packed, None, "none", [], "")

    def padded(inputs: torch.Tensor) -> torch.Tensor:
        tokens = len(inputs)
        if tokens >= _FEWEST_ROWS:
            return run(inputs, packed, None, "none", [], "")
        return run(F.pad(inputs, (0, 0, 0, _FEWEST_ROWS - tokens)), packed, None, "none", [], "")[:tokens]

    return padded


def widened_linear(weight: torch.Tensor) -> Linear:
    """A bfloat16 linear computed in float32 and rounded at its end, as a product in bfloat16 is.

    Where the processor does not multiply bfloat16 this is four times as fast; it holds the weight in four bytes.
    """
    wide = cpu_linear(weight.float())
    return lambda inputs: wide(inputs.float()).to(weight.dtype)


def cpu_linear(weight: torch.Tensor) -> Linear:
    """The fastest linear operator this machine has for a weight (outputs, inputs)."""
    if weight.dtype == torch.bfloat16 and not multiplies_bfloat16():
        return widened_linear(weight)
    return (prepacked_linear if prepacked_linear_available(weight.dtype) else plain_linear)(weight)


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@cache
def prepacked_linear_available(dtype: torch.dtype) -> bool:
    """Whether this torch reorders weights of a type, and computes with them what the plain linear does."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, inputs = torch.linspace(-1, 1, 24).view(6, 4).to(dtype), torch.linspace(-1, 1, 12).view(3, 4).to(dtype)
    try:
        packed = prepacked_linear(weight)(inputs)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(packed, plain_linear(weight)(inputs), atol=1e-5 if dtype == torch.float32 else 1e-1)
