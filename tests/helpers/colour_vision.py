"""How far colours are apart for readers with and without one kind of cone, and how they contrast."""

import numpy as np

LEAST_APART = 6.5
"""Of two colours in one figure, in hundredths of Oklab; about three times what can just be told apart."""
_CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
_OKLAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])
_DEFICIENCIES = {  # Machado, Oliveira and Fernandes 2009, severity 1
    "none": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}  # fmt: skip


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG defines it, 1 to 21."""
    dim, bright = sorted(float(_linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (bright + 0.05) / (dim + 0.05)


def apart(one: str, other: str) -> float:
    """The least distance of two colours in Oklab over all kinds of colour vision."""
    return min(float(np.linalg.norm(_seen(one, sight) - _seen(other, sight))) for sight in _DEFICIENCIES.values())


def _seen(colour: str, sight: object) -> np.ndarray:
    return 100 * _OKLAB @ np.cbrt(_CONES @ np.clip(np.array(sight) @ _linear(colour), 0, 1))


def _linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
