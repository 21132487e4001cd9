"""What the cluster asks its workers."""

import asyncio
from types import SimpleNamespace

import pytest

from mooncake_lab.perf.specs import model_shape
from mooncake_lab.serving import WorkerError
from mooncake_lab.serving.pending_calls import PendingCalls


class Process:
    """One whose reason is known when it was waited for."""

    ended = False

    def wait(self, _timeout_s):
        self.ended = True
        return True

    def reason(self):
        return "no room for 5 GB" if self.ended else "unknown"


def test_a_worker_that_ends_while_it_is_measured_says_why():
    """The error of a start has the worker's name and the reason for which its process ended."""
    ready = SimpleNamespace(port=1, shape=model_shape("lab-tiny"))
    link = SimpleNamespace(ready=ready, process=Process(), send=lambda _: calls.exited("coupled-0"))
    calls = PendingCalls(SimpleNamespace(connections={"coupled-0": link}), 1.0)
    with pytest.raises(WorkerError, match=r"^coupled-0 ended while it was measured: no room for 5 GB$"):
        asyncio.run(calls.measure({"coupled-0": "coupled"}))
