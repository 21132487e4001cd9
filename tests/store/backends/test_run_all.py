"""Two things at once: both end before anybody goes on, and nothing is done twice."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_lab.store.backends.ssd import run_all


@pytest.fixture
def helpers():
    """One helper thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_helper_that_does_not_come_is_not_waited_for(helpers):
    """While the only helper is busy the caller does both, on its own thread."""
    over, begun = threading.Event(), threading.Event()
    helpers.submit(lambda: (begun.set(), over.wait(30)))
    assert begun.wait(30)
    ran = []
    run_all(helpers, [lambda: ran.append(threading.get_ident())] * 2)
    assert ran == [threading.get_ident()] * 2
    over.set()


@pytest.mark.parametrize("who", ["helper", "caller"])
def test_an_error_waits_for_the_other_one(helpers, who):
    """Whoever fails, neither runs any more when the error arrives: buffers may be given back."""
    caller = threading.get_ident()
    ended, begun = [], threading.Event()

    def task():
        if (threading.get_ident() == caller) == (who == "caller"):
            begun.wait(30)
            raise OSError("injected")
        begun.set()
        threading.Event().wait(0.1)
        ended.append(True)

    with pytest.raises(OSError, match="injected"):
        run_all(helpers, [task, task])
    assert ended == [True]


def test_a_failed_task_is_the_last_that_begins(helpers):
    """Its error is raised, and what was left is not begun."""
    done = []

    def fail():
        raise OSError("injected")

    tasks = [fail, *(lambda number=number: done.append(number) for number in range(1000))]
    helpers.submit(threading.Event().wait, 0.2)  # so that the caller takes the first one
    with pytest.raises(OSError, match="injected"):
        run_all(helpers, tasks)
    assert done == []


def test_what_could_not_be_started_never_runs_late():
    """Where no thread can be started, the task that stayed queued is cancelled when a helper comes by."""
    done = []

    class NoThreads(ThreadPoolExecutor):
        def submit(self, task, /):
            queued.append(task)
            raise RuntimeError("can't start new thread")

    queued = []
    with NoThreads(1) as helpers:
        run_all(helpers, [lambda: done.append("first"), lambda: done.append("second")])
    queued[0]()
    assert done == ["first", "second"]
