"""Few bits an element: asymmetric rounding in groups, packed into bytes (KIVI: Liu et al., ICML 2024)."""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowBit:
    """A tensor as codes of 2, 4 or 8 bits, a scale and a smallest value a group of its last dimension."""

    codes: torch.Tensor
    """uint8, packed: the first code of a byte is its lowest bits."""
    scale: torch.Tensor
    """float16, one a group."""
    lowest: torch.Tensor
    """float16, one a group."""
    bits: int
    shape: torch.Size
    group: int

    @classmethod
    def of(cls, tensor: torch.Tensor, bits: int, group: int) -> Self:
        """Round to the nearest of `2**bits` levels between each group's smallest and largest.

        Raises:
            ValueError: when bits do not pack into bytes or the last dimension is no multiple of the group.
        """
        if bits not in {2, 4, 8} or tensor.shape[-1] % group or group % (8 // bits):
            raise ValueError(f"{bits} bits in groups of {group} of {tensor.shape[-1]}: 2, 4 or 8 and whole groups")
        grouped = tensor.float().unflatten(-1, (-1, group))
        lowest, highest = grouped.amin(dim=-1).half(), grouped.amax(dim=-1)
        scale = ((highest - lowest.float()) / (2**bits - 1)).clamp(min=1e-6).half()
        levels = ((grouped - lowest.float()[..., None]) / scale.float()[..., None]).round().clamp(0, 2**bits - 1)
        codes = levels.to(torch.uint8).reshape(-1, 8 // bits)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=tensor.device)
        packed = (codes << shifts).sum(dim=-1).to(torch.uint8)
        return cls(codes=packed, scale=scale, lowest=lowest, bits=bits, shape=tensor.shape, group=group)

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and smallest values."""
        return self.codes.nbytes + self.scale.nbytes + self.lowest.nbytes

    def restore(self) -> torch.Tensor:
        """The rounded tensor, float32."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=self.codes.device)
        levels = ((self.codes[:, None] >> shifts) & (2**self.bits - 1)).float()
        grouped = levels.view(*self.scale.shape, self.group)
        return (grouped * self.scale.float()[..., None] + self.lowest.float()[..., None]).view(self.shape)
