"""Estimators that err: by chance, and by a regression on offline measurements, as in the paper (FAST'25 §4.1)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.conductor import Estimator
from mooncake_lab.core import keyed_uniform
from mooncake_lab.perf import as_told, column_sizes

Array = npt.NDArray[np.float64]
_LEAST_INDEPENDENCE: Final = 1e-7
"""The least independence of the columns; below it, nine digits do not determine the coefficients."""


@dataclass(frozen=True, slots=True)
class NoisyEstimator:
    """Another estimator whose prefill estimates err by a factor uniform in 1 ± `relative_error`.

    The draw depends on the seed and the request alone, so that decisions replay.
    """

    inner: Estimator
    relative_error: float = 0.05
    seed: int = 0

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """The inner estimate times the request's error."""
        error = self.relative_error * (2 * keyed_uniform(self.seed, request_id) - 1)
        return self.inner.prefill_s(request_id, input_tokens, reused_tokens) * (1 + error)

    def beside_ssd_s(self, compute_s: float, ssd_tokens: int) -> float:
        """The inner estimate."""
        return self.inner.beside_ssd_s(compute_s, ssd_tokens)

    def transfer_s(self, tokens: int, flows: int) -> float:
        """The inner estimate."""
        return self.inner.transfer_s(tokens, flows)

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """The inner estimate."""
        return self.inner.decode_step_s(requests, context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialEstimator:
    """Prefill times by polynomial regression on prompt and prefix length; other times from another estimator.

    The paper says no more than "polynomial regression model fitted with offline test data"; the degree is ours
    (assumption B03). Unlike a `LatencyModel`, the polynomial has no physical meaning outside its data. A negative
    estimate is set to zero, and the errors of the fit are kept with it.
    """

    inner: Estimator
    degree: int
    scale_tokens: float
    """Lengths are divided by this before they are raised to powers."""
    coefficients: tuple[float, ...]
    """One for each `n^i p^j` with `i + j <= degree`, in the order of `powers`."""
    relative_errors: tuple[float, ...]
    """`(predicted - measured) / measured` of each point it was fitted to."""

    @classmethod
    def fit(
        cls, inner: Estimator, tokens: Array, reused_tokens: Array, measured_s: Array, *, degree: int = 2
    ) -> "PolynomialEstimator":
        """The polynomial with the least sum of squared relative errors.

        Args:
            inner: for transfers and decode steps.
            tokens: shape (points,), prompt lengths.
            reused_tokens: shape (points,), how many of them were reused.
            measured_s: shape (points,), all positive.
            degree: of the polynomial, at least 1.

        Raises:
            ValueError: when shapes differ, a time is not positive, or the points do not determine the polynomial.
        """
        if degree < 1 or not tokens.shape == reused_tokens.shape == measured_s.shape or not (measured_s > 0).all():
            raise ValueError(
                f"a polynomial of degree {degree} over {tokens.shape} lengths, {reused_tokens.shape} prefixes and"
                f" {measured_s.shape} times; allowed are degrees from 1, equal shapes and positive times"
            )
        scale = float(tokens.max())
        columns = np.stack(
            [(tokens / scale) ** i * (reused_tokens / scale) ** j for i, j in powers(degree)], axis=1
        )
        relative = columns / measured_s[:, None]
        size = column_sizes(relative)
        ones = np.ones(len(measured_s))
        solution, _, rank, _ = np.linalg.lstsq(relative / size, ones, rcond=_LEAST_INDEPENDENCE)
        if rank < columns.shape[1]:
            raise ValueError(
                f"{len(tokens)} points of rank {rank} for the {columns.shape[1]} coefficients of degree {degree};"
                " measure more lengths and prefixes, or lower the degree"
            )
        found = as_told(solution.astype(np.float64) / size)
        return cls(
            inner=inner,
            degree=degree,
            scale_tokens=scale,
            coefficients=tuple(found.tolist()),
            relative_errors=tuple((columns @ found / measured_s - 1).tolist()),
        )

    @property
    def max_relative_error(self) -> float:
        """The largest relative error at a point of the fit."""
        return max(map(abs, self.relative_errors))

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """The value of the polynomial, or 0 where it is negative."""
        del request_id
        n, p = input_tokens / self.scale_tokens, reused_tokens / self.scale_tokens
        terms = zip(self.coefficients, powers(self.degree), strict=True)
        return max(0.0, sum(c * n**i * p**j for c, (i, j) in terms))

    def beside_ssd_s(self, compute_s: float, ssd_tokens: int) -> float:
        """The inner estimate."""
        return self.inner.beside_ssd_s(compute_s, ssd_tokens)

    def transfer_s(self, tokens: int, flows: int) -> float:
        """The inner estimate."""
        return self.inner.transfer_s(tokens, flows)

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """The inner estimate."""
        return self.inner.decode_step_s(requests, context_tokens)


def powers(degree: int) -> Iterator[tuple[int, int]]:
    """The exponents of prompt and prefix length of all terms up to a degree."""
    return ((i, j) for i in range(degree + 1) for j in range(degree + 1 - i))
