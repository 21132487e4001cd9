"""How long a cluster takes to recover, as the fault table reports it."""

import threading
import time

from mooncake_lab.bench.faults import strike
from mooncake_lab.core import Moved


class Spec:
    """Of two workers."""

    roles = ("prefill-0", "decode-0")


class LateRun:
    """A cluster whose runs begin late, and whose killed worker is back at once.

    KVCache moves at once after the fault, and again when the next request comes, long after.
    """

    spec, in_flight, outputs, late_s = Spec(), 1, {}, 0.2

    def __init__(self):
        self.killed, self.workers, self.began_s = threading.Event(), {"prefill-0": 1, "decode-0": 2}, 0.0

    @property
    def now_s(self):
        """Of the run."""
        return time.monotonic() - self.began_s

    def run(self, requests):
        """Until the fault was noticed."""
        del requests
        time.sleep(self.late_s)
        self.began_s = time.monotonic()
        assert self.killed.wait(60)
        struck_s = self.now_s
        moves = [(struck_s + 0.001, struck_s + 0.01), (struck_s + 50, struck_s + 51)]
        return [
            Moved(at_s=end_s, request_id=0, source="prefill-0", destination="decode-0", start_s=start_s, bytes=1)
            for start_s, end_s in moves
        ]

    def kill(self, name):
        """Another process takes its place a moment later."""
        self.killed.set()
        del self.workers[name]
        threading.Timer(0.02, self.workers.update, ({name: 3},)).start()

    def pids(self):
        """Of those that are up."""
        return dict(self.workers)


def test_recovery_counts_from_the_fault_not_from_its_plan():
    """A run that begins late moves the fault to an earlier moment of it; the moves that follow still count."""
    report = strike(LateRun(), [], "kill -9 a decode worker", at_s=0.3, expected={})
    assert report.recovery_s < 40
