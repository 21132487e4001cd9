"""Sums of floats that have the same bits on every Python."""

from collections.abc import Iterable
from functools import reduce
from operator import add


def sum_in_order(values: Iterable[float]) -> float:
    """The sum of floats, added one after the other and rounded after each: 0.0 without any.

    The builtin `sum` does this up to Python 3.11 and compensates rounding errors from 3.12 on, so that logs and
    results would depend on the Python that wrote them. Whole numbers are exact either way: the builtin adds those.
    """
    return reduce(add, values, 0.0)
