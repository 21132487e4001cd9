"""Faults in the middle of work: nothing that was accepted is lost or answered wrongly, and capacity comes back."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mooncake_lab.metrics import check_log

FAULTS = {
    "prefill worker killed": lambda live: live.kill("prefill-0"),
    "decode worker killed": lambda live: live.kill("decode-0"),
    "messenger connections broken": lambda live: (live.sever("prefill-0"), live.sever("decode-0")),
}


@pytest.fixture(scope="module")
def cluster(open_cluster):
    """Two workers of each kind."""
    with open_cluster(prefill_nodes=2, decode_nodes=2) as live:
        yield live


def until(condition, seconds=60.0):
    """Whether a condition came true in time."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_or_wrong(cluster, traced, expected, fault):
    """After a kill or a broken connection under load, every request has the tokens of an undisturbed run."""
    cluster.forget()
    requests = traced(24, output_tokens=24)
    timer = threading.Timer(0.15, FAULTS[fault], (cluster,))
    timer.start()
    log = cluster.run(requests)
    timer.join()
    assert cluster.outputs == expected(requests)
    assert check_log(log) == ()
    assert until(lambda: len(cluster.pids()) == 4)


def test_capacity_returns(cluster, traced, expected):
    """With every decode worker dead, requests wait; they are served when workers are born again."""
    requests = traced(6)
    for name in ("decode-0", "decode-1"):
        cluster.kill(name)
    cluster.run(requests)
    assert cluster.outputs == expected(requests)
    assert until(lambda: len(cluster.pids()) == 4)


@pytest.mark.slow
def test_dead_nursery_is_replaced(cluster, traced, expected):
    """When the process that bears workers is killed, they go with it and all come back."""
    before = cluster.pids()
    nursery = _parent(before["prefill-0"])
    os.kill(nursery, signal.SIGKILL)
    assert until(lambda: len(cluster.pids()) == 4 and not set(before.values()) & set(cluster.pids().values()), 180)
    requests = traced(4)
    cluster.run(requests)
    assert cluster.outputs == expected(requests)


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
