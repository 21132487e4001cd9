"""Rotary position embedding: one table of cosines and sines, computed once."""

import math
from dataclasses import dataclass

import torch

from mooncake_lab.engine.config import LlamaConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines of every position, float32, shape (positions, head_width / 2)."""

    cosines: torch.Tensor
    sines: torch.Tensor


def make_rope(config: LlamaConfig, positions: int, device: torch.device) -> Rope:
    """The rotary table of a model for positions 0 up to `positions`."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config))
    return Rope(angles.cos().to(device), angles.sin().to(device))


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Radians each pair of elements turns per position, float32, shape (head_width / 2,)."""
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # 1: a fast pair, kept; 0: a slow one, divided
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0) if low < high else (turns >= low).float()
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn heads by their positions' angles; pairs are elements `i` and `i + head_width / 2`, as in Hugging Face.

    Args:
        heads: shape (tokens, heads, head_width).
        cosines: shape (tokens, head_width / 2).
        sines: the same shape.
    """
    first, second = heads.float().chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(heads.dtype)
