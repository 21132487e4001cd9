"""The time of every token: a run log keeps stretches of decode steps, and these functions expand them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from mooncake_lab.core import DecodeStretch, Finished, FirstToken, Record


def step_ends_s(stretch: DecodeStretch) -> list[float]:
    """The times at which the steps of a stretch ended, in seconds since the run began.

    Step k from 0 lasts `first_step_s + k * step_growth_s`, so step k ends at
    `start_s + (k + 1) * first_step_s + k * (k + 1) / 2 * step_growth_s`.
    """
    start_s, first_s, growth_s, steps = stretch.start_s, stretch.first_step_s, stretch.step_growth_s, stretch.steps
    counts = _PREPARED[:steps] if steps <= len(_PREPARED) else _counts(steps)
    return [start_s + done * first_s + grown * growth_s for done, grown in counts]


def _counts(steps: int) -> list[tuple[float, float]]:
    """`k + 1` and `k * (k + 1) / 2` for each step."""
    return [(float(k + 1), k * (k + 1) / 2) for k in range(steps)]


_PREPARED: Final = _counts(4096)  # a log has many stretches, most of them short


def token_times_s(records: Iterable[Record]) -> Iterator[tuple[int, list[float]]]:
    """Every request that received a token, with the times of all its tokens in seconds.

    The first is the time of its `FirstToken` record; each decode step of the request gives one more. A request is
    returned when it finishes, so that the token times of a long log are never all in memory at once. Requests that
    still run at the end of the log come last, in order of their ids.
    """
    pending: defaultdict[int, list[list[float]]] = defaultdict(list)
    for record in records:
        match record:
            case FirstToken():
                pending[record.request_id].append([record.at_s])
            case DecodeStretch():
                ends = step_ends_s(record)
                for request_id in record.request_ids:
                    pending[request_id].append(ends)
            case Finished() if record.request_id in pending:
                yield record.request_id, list(chain.from_iterable(pending.pop(record.request_id)))
            case _:
                pass
    for request_id in sorted(pending):
        yield request_id, list(chain.from_iterable(pending[request_id]))
