"""Faults in the middle of a run: what they cost, request by request, against an undisturbed run."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mooncake_lab.core import Finished, Moved, Placed, Record, TracedRequest
from mooncake_lab.serving.cluster import LiveCluster

Fault = Callable[[LiveCluster], None]
"""Does something bad to a running cluster."""


def _sever_all(cluster: LiveCluster) -> None:
    for name in cluster.pids():
        cluster.drop_connections(name)


FAULTS: Final[Mapping[str, Fault]] = MappingProxyType(
    {
        "none": lambda _: None,
        "kill -9 a prefill worker": lambda cluster: cluster.kill("prefill-0"),
        "kill -9 a decode worker": lambda cluster: cluster.kill("decode-0"),
        "break all messenger connections": _sever_all,
    }
)
"""The faults of the book's table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """What one fault did to one run."""

    fault: str
    requests: int
    in_flight: int
    """Requests under way when it struck."""
    placed_again: int
    lost: int
    """Accepted requests that did not finish."""
    wrong: int
    """Requests whose tokens differ from those of an undisturbed run."""
    recovery_s: float
    """From the fault until all workers lived again, and KVCache moved again between them."""


def strike(
    cluster: LiveCluster,
    requests: Sequence[TracedRequest],
    fault: str,
    *,
    at_s: float,
    expected: Mapping[int, tuple[int, ...]],
    patience_s: float = 120.0,
) -> FaultReport:
    """Run requests, let a fault strike at some second of the run, and compare every token.

    Args:
        cluster: an open one.
        requests: what it serves, by time of arrival.
        fault: a name in `FAULTS`.
        at_s: when, in seconds since the run began.
        expected: the tokens of an undisturbed run, by request.
        patience_s: how long to wait for workers to come back.

    Raises:
        TimeoutError: when the cluster does not come back.
    """
    workers, seen = len(cluster.spec.roles), dict[str, float]()

    def act() -> None:
        seen["in_flight"] = cluster.in_flight
        seen["began_s"], seen["struck_s"] = time.monotonic(), cluster.now_s
        FAULTS[fault](cluster)
        before = cluster.pids()
        while fault.startswith("kill") and time.monotonic() < seen["began_s"] + patience_s:
            now = cluster.pids()
            if len(now) == workers and now != before:
                break
            if len(now) < workers:
                before = now  # the death was noticed
            time.sleep(0.002)
        seen["back_s"] = time.monotonic()

    timer = threading.Timer(at_s, act)
    timer.start()
    log = cluster.run(requests)
    timer.join()
    if len(cluster.pids()) < workers:
        raise TimeoutError(f"{len(cluster.pids())} of {workers} workers live {patience_s:g} s after: {fault}")
    finished = {record.request_id for record in log if isinstance(record, Finished)}
    return FaultReport(
        fault=fault,
        requests=len(requests),
        in_flight=int(seen["in_flight"]),
        placed_again=_placed_again(log),
        lost=sum(one.request.id not in finished for one in requests),
        wrong=sum(cluster.outputs.get(key) != tokens for key, tokens in expected.items() if key in finished),
        recovery_s=0.0
        if fault == "none"
        else max(seen["back_s"] - seen["began_s"], _until_moved(log, seen["struck_s"])),
    )


def _placed_again(log: Sequence[Record]) -> int:
    placed = [record.request_id for record in log if isinstance(record, Placed)]
    return len(placed) - len(set(placed))


def _until_moved(log: Sequence[Record], at_s: float) -> float:
    """Seconds from the fault to the end of the first move that began after it; 0 where nothing had to move.

    On a loaded machine a run begins later than it was asked to. The fault is then earlier in the run than planned,
    and so are the moves that end the recovery.
    """
    after = [record.at_s for record in log if isinstance(record, Moved) and record.start_s > at_s]
    return min(after) - at_s if after else 0.0
