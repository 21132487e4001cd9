"""MiniCache: two neighbouring layers share one direction a token (Liu et al., NeurIPS 2024, arXiv 2405.14366).

Layers from the middle of the model on are merged in pairs: each token's two vectors become one direction between
them (spherical interpolation) and their two lengths; tokens whose directions differ most keep their originals. As
printed, the paper's rule for retention keeps the *most similar* tokens; here the share `retained` of largest
angles stays, which is what its text wants. A merged cache may be held in few bits an element
(`LowBit`): asymmetric rounding in groups, packed into bytes (KIVI: Liu et al., ICML 2024).
"""

from dataclasses import dataclass
from typing import Self

import torch

from mooncake_lab.compression.held import LayerPool, PagedLayer, PrefilledPrompt, Restore, RestoredLayer


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


_NEARLY_OPPOSITE = 0.999 * torch.pi
"""Beyond this angle there is no direction between two vectors; such tokens are always retained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCache:
    """Merge pairs of layers from `start` of the depth on.

    Raises:
        ValueError: when a share is outside 0 to 1.
    """

    towards: float = 0.6
    """Where between the two directions the shared one lies: 0 at the shallower layer's, 1 at the deeper's."""
    retained: float = 0.05
    """Share of tokens that keep both originals: those with the largest angles."""
    start: float = 0.5
    bits: int | None = None
    """Bits an element of the shared directions and of the layers that are not merged; None rounds nothing."""

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in (self.towards, self.retained, self.start)):
            raise ValueError(f"{self}: towards, retained and start must lie between 0 and 1")

    @property
    def window(self) -> int:
        """It asks no queries."""
        return 0

    def pairs(self, layers: int) -> list[int]:
        """The shallower layer of each merged pair."""
        first = max(1, int(self.start * layers))
        return list(range(first - 1, layers - 1, 2)) if self.start < 1 else []

    def hold(self, prefilled: PrefilledPrompt, pool: LayerPool) -> tuple[RestoredLayer | PagedLayer, ...]:
        """Merged pairs, and the other layers as they are or in few bits."""
        layers: dict[int, RestoredLayer | PagedLayer] = {}
        for shallow in self.pairs(len(prefilled.keys)):
            sides = [(side[shallow], side[shallow + 1]) for side in (prefilled.keys, prefilled.values)]
            merged = [self.merge(*pair) for pair in sides]
            tokens, size = prefilled.keys[shallow].shape[1], merged[0].bytes + merged[1].bytes
            for which in (0, 1):
                layers[shallow + which] = RestoredLayer(
                    _restorer(merged, which), tokens, 0 if which else size, PagedLayer(pool, [], 0)
                )
        for layer in set(range(len(prefilled.keys))) - set(layers):
            layers[layer] = self._alone(prefilled.keys[layer], prefilled.values[layer], pool)
        return tuple(layers[layer] for layer in range(len(layers)))

    def merge(self, shallow: torch.Tensor, deep: torch.Tensor) -> "Merged":
        """One direction for two layers' keys (or values), each (kv_heads, tokens, head_width)."""
        lengths = torch.stack((shallow, deep)).float().norm(dim=-1)
        first, second = torch.stack((shallow, deep)).float() / lengths.clamp(min=1e-12)[..., None]
        angles = angle(first, second)
        worst = angles.mean(dim=0)
        kept = worst.topk(round(self.retained * len(worst))).indices
        opposite = (angles.amax(dim=0) > _NEARLY_OPPOSITE).nonzero()[:, 0]
        kept = torch.cat((kept, opposite)).unique()
        direction = slerp(first, second, self.towards)
        rows = torch.stack((shallow[:, kept], deep[:, kept]))
        if self.bits is None:
            stored = direction.to(shallow.dtype)
        else:
            stored = LowBit.of(direction, self.bits, direction.shape[-1])
        return Merged(direction=stored, lengths=lengths.to(shallow.dtype), kept=kept, rows=rows)

    def few_bits(self, side: torch.Tensor) -> LowBit:
        """Keys or values of a layer that is not merged, in `bits` bits.

        Raises:
            ValueError: when no number of bits is set.
        """
        if self.bits is None:
            raise ValueError(f"{self} rounds nothing; bits must be a number")
        return LowBit.of(side, self.bits, side.shape[-1])

    def _alone(self, keys: torch.Tensor, values: torch.Tensor, pool: LayerPool) -> RestoredLayer | PagedLayer:
        if self.bits is None:
            return PagedLayer.of(pool, keys, values)
        small = [self.few_bits(side) for side in (keys, values)]
        size = small[0].bytes + small[1].bytes
        return RestoredLayer(
            lambda: (small[0].restore(), small[1].restore()), keys.shape[1], size, PagedLayer(pool, [], 0)
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Merged:
    """Keys (or values) of two layers in the space of little more than one."""

    direction: torch.Tensor | LowBit
    """(kv_heads, tokens, head_width), of length 1."""
    lengths: torch.Tensor
    """(2, kv_heads, tokens)."""
    kept: torch.Tensor
    """int64 (retained,): tokens that keep their originals."""
    rows: torch.Tensor
    """(2, kv_heads, retained, head_width)."""

    @property
    def bytes(self) -> int:
        """Bytes of all stored tensors."""
        direction = self.direction.bytes if isinstance(self.direction, LowBit) else self.direction.nbytes
        return direction + self.lengths.nbytes + self.kept.nbytes + self.rows.nbytes

    def restore(self, which: int) -> torch.Tensor:
        """The shallower (0) or deeper (1) layer's, (kv_heads, tokens, head_width)."""
        direction = self.direction.restore() if isinstance(self.direction, LowBit) else self.direction
        vectors = (direction * self.lengths[which][..., None]).to(self.rows.dtype)
        vectors[:, self.kept] = self.rows[which]
        return vectors


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Between unit vectors of the last dimension (radians), accurate for small angles too."""
    return 2 * torch.atan2((first - second).norm(dim=-1), (first + second).norm(dim=-1))


def slerp(first: torch.Tensor, second: torch.Tensor, towards: float) -> torch.Tensor:
    """The unit vectors a share of the way from first to second along the sphere; straight where they coincide."""
    between = angle(first, second)[..., None]
    sine = between.sin()
    flat = sine.abs() < 1e-6
    safe = torch.where(flat, torch.ones_like(sine), sine)
    weight_first = torch.where(flat, torch.full_like(sine, 1 - towards), ((1 - towards) * between).sin() / safe)
    weight_second = torch.where(flat, torch.full_like(sine, towards), (towards * between).sin() / safe)
    mixed = weight_first * first + weight_second * second
    return mixed / mixed.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _restorer(merged: list[Merged], which: int) -> Restore:
    return lambda: (merged[0].restore(which), merged[1].restore(which))
