"""Linear operators on CPU: weights in panels, read front to back once for all tokens of a step.

A panel holds `LANES` outputs: for each input their weights side by side, as a vector of the processor. Every
output of every token is one sum in the order of the inputs, so panels give a token the same bits in any batch.
"""

# numba's decorators are untyped, and it adds an intrinsic's first argument
# pyright: basic, reportCallIssue=false
# digest of the kernels that numba compiles into these: 89cb499f0a56cafb

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange

from mooncake_lab.engine.backends.cpu_kernels import Floats, Stored
from mooncake_lab.engine.backends.cpu_threads import reserve_threads, share_out
from mooncake_lab.engine.backends.cpu_tiles import LANES, ROWS, SET, multiply_tile
from mooncake_lab.engine.backends.onednn import bfloat16_linear, multiplies_bfloat16
from mooncake_lab.engine.backends.protocol import Linear

FEW_TOKENS: Final = 8
"""Up to here a product is bound by reading weights; beyond it bfloat16 instructions are used if there are any."""
_BLOCK_TOKENS: Final = 128
"""Tokens that go through all panels together: their inputs stay in a core's cache."""
_PART_PANELS: Final = 4
"""What a thread takes at once; more would leave threads without a share of a small weight."""
_AHEAD_BYTES: Final = 2048
"""How far before their use weights are prefetched; measured: 1 to 4 KiB are alike, none costs a tenth."""


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight (outputs, inputs) in panels; where the processor multiplies bfloat16, also in oneDNN's order."""

    stack: Stored
    """(layers, panels, inputs, `LANES`): this weight and those of the other layers."""
    layer: int
    outputs: int
    dtype: torch.dtype
    many: Linear | None
    """For more tokens than `FEW_TOKENS`; None means the panels too."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """(tokens, inputs) to (tokens, outputs); sums are float32 and rounded once."""
        if self.many is not None and len(inputs) > FEW_TOKENS:
            return self.many(inputs)
        wide, out = inputs.float().contiguous(), torch.empty((len(inputs), self.outputs), dtype=torch.float32)
        panels = self.stack[self.layer]
        share_out(panels.size)
        if not len(out):  # a chunk in the middle of a prompt wants no logits
            return out.to(self.dtype)
        for rows, to in zip(wide.split(_BLOCK_TOKENS), out.split(_BLOCK_TOKENS), strict=True):
            linear(view(rows), panels, view(to))
        return out.to(self.dtype)


def cpu_linears(weights: Sequence[torch.Tensor]) -> tuple[CpuLinear, ...]:
    """Linear operators of float32 or bfloat16 weights of one shape; their panels lie in one piece of memory."""
    reserve_threads()
    first = weights[0]
    wide = first.dtype == torch.bfloat16 and multiplies_bfloat16()
    count = -(-len(first) // LANES)
    stack = np.zeros((len(weights), count, first.shape[1], LANES), view(first).dtype)
    for panels, weight in zip(stack, weights, strict=True):
        _fill(panels, view(weight))
    return tuple(
        CpuLinear(stack, layer, len(first), first.dtype, bfloat16_linear(weight) if wide else None)
        for layer, weight in enumerate(weights)
    )


def _fill(panels: Stored, weight: Stored) -> None:
    """Put a weight (outputs, inputs) into zeroed panels; what the last one lacks stays zero."""
    for panel, vectors in enumerate(panels):
        rows = weight[panel * LANES : (panel + 1) * LANES]
        vectors[:, : len(rows)] = rows.T


@njit(parallel=True, fastmath=True, error_model="numpy", nogil=True, cache=True)
def linear(inputs: Floats, panels: Stored, out: Floats) -> None:
    """`out = inputs @ weight.T`; each thread takes a run of panels."""
    for part in prange((len(panels) + _PART_PANELS - 1) // _PART_PANELS):
        for panel in range(part * _PART_PANELS, min((part + 1) * _PART_PANELS, len(panels))):
            _multiply_panel(inputs, panels, panel, out)


@njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
def _multiply_panel(inputs: Floats, panels: Stored, panel: int, out: Floats) -> None:
    """A panel's outputs of all tokens, in groups of nearly one size."""
    column = panel * LANES
    tokens, depth, ahead = len(out), panels.shape[1], _AHEAD_BYTES // panels.itemsize
    tile = np.empty((ROWS, LANES), np.float32)
    groups = (tokens + ROWS - 1) // ROWS
    size = (tokens + groups - 1) // groups
    for row in range(0, tokens, size):
        rows = min(size, tokens - row)
        multiply_tile(inputs, row, 0, rows, depth, panels, column * depth, LANES, ahead, tile, 0, 0, SET)
        for r in range(rows):
            for lane in range(min(LANES, out.shape[1] - column)):
                out[row + r, column + lane] = tile[r, lane]


def view(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory for numba, which knows bfloat16 only by its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
