"""How large to run: every chapter, experiment and batch run knows the same four scales."""

from typing import Final

SCALES: Final = ("smoke", "classroom", "full", "gpu")
"""Seconds, for CI; what the book shows; the paper's setting; needs a device."""


def check_scale(scale: str) -> str:
    """The scale itself.

    Raises:
        ValueError: when it is not one of `SCALES`.
    """
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; allowed are {', '.join(SCALES)}")
    return scale
