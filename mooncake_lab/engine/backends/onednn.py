"""Products in bfloat16 by oneDNN, for processors that have instructions for them.

A plain linear reorders its weight at every call. The operator of torch that reorders it once is private;
`bfloat16_linear` asks it to prove itself before anything relies on it.
"""

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.engine.backends.protocol import Linear

_TOKENS_HINT = 16
"""Batch size the reordering is tuned for; measured: as good at 1 and 2048 tokens as a hint of their own."""


def bfloat16_linear(weight: torch.Tensor) -> Linear:
    """The fastest product of torch with a bfloat16 weight (outputs, inputs)."""
    return _prepacked(weight) if _prepacks() else lambda inputs: F.linear(inputs, weight)


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _prepacked(weight: torch.Tensor) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS_HINT)  # noqa: SLF001  # no public name in torch
    run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001  # likewise
    return lambda inputs: run(inputs, packed, None, "none", [], "")


@cache
def _prepacks() -> bool:
    """Whether this torch reorders weights, and computes with them what the plain linear does."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, inputs = (torch.linspace(-1, 1, 4 * rows).view(rows, 4).bfloat16() for rows in (6, 3))
    try:
        found = _prepacked(weight)(inputs)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(found, F.linear(inputs, weight), atol=1e-1)
