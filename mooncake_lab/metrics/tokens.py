"""When every token came: run logs keep stretches of decoding, this expands them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import DecodeStretch, Finished, FirstToken, Record


def step_ends_s(stretch: DecodeStretch) -> npt.NDArray[np.float64]:
    """The times at which the steps of a stretch ended, shape (steps,), in seconds since the run began.

    Step k from 0 lasts `first_step_s + k * step_growth_s`, so step k ends at
    `start_s + (k + 1) * first_step_s + k * (k + 1) / 2 * step_growth_s`.
    """
    steps = stretch.steps
    done, grown = (_DONE[:steps], _GROWN[:steps]) if steps <= _PREPARED else _counts(steps)
    return stretch.start_s + done * stretch.first_step_s + grown * stretch.step_growth_s


def _counts(steps: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """`k + 1` and `k * (k + 1) / 2` for each step."""
    done = np.arange(1.0, steps + 1)
    return done, (done - 1) * done / 2


_PREPARED: Final = 4096
_DONE, _GROWN = _counts(_PREPARED)  # stretches are many and mostly short


def token_times_s(records: Iterable[Record]) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Every request that received a token, with the times of all its tokens, shape (tokens,), in seconds.

    The first is the time of its `FirstToken` record; each decode step it took part in gives one more.
    A request comes out when it finishes, so that a long log never lies expanded in memory as a whole;
    those still running at the end of the log come last, in order of their ids.
    """
    pending: defaultdict[int, list[npt.NDArray[np.float64]]] = defaultdict(list)
    for record in records:
        match record:
            case FirstToken():
                pending[record.request_id].append(np.array([record.at_s]))
            case DecodeStretch():
                ends = step_ends_s(record)
                for request_id in record.request_ids:
                    pending[request_id].append(ends)
            case Finished() if record.request_id in pending:
                yield record.request_id, np.concatenate(pending.pop(record.request_id))
            case _:
                pass
    for request_id in sorted(pending):
        yield request_id, np.concatenate(pending[request_id])
