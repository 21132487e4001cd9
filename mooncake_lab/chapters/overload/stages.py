"""The four-stage sketch of arXiv Fig. 10, small enough for paper and pencil."""

from collections.abc import Iterator
from typing import NamedTuple


class Stage(NamedTuple):
    """Both loads in one stage, as shares of full."""

    number: int
    decode: float
    """Load of the requests that decode in this stage."""
    prefill: float
    """Load of the requests that were admitted in this stage, and decode in the next."""


def stages(offered: float, limit: float, *, predicted: bool, count: int = 8) -> Iterator[Stage]:
    """A cluster in which prefill takes one stage and decoding takes one stage.

    With early rejection, all arriving requests are admitted while the decode load of this stage is below the
    limit, and otherwise none. With prediction, as many are admitted as the next stage has room for.

    Args:
        offered: load that arrives in each stage.
        limit: decode load from which requests are refused.
        predicted: whether to look at the next stage instead of this one.
        count: how many stages.
    """
    decode = 0.0
    for number in range(1, count + 1):
        admitted = min(offered, limit) if predicted else offered * (decode < limit)
        yield Stage(number, decode, admitted)
        decode = admitted
