"""The queue of a prefill worker."""

from collections import deque

import pytest

from mooncake_lab.serving.roles import PrefillRole, Prompt


def prompt(*, is_ready):
    """A request that waits, for its prefix too or only for its turn."""
    return Prompt(order=None, keys=[], is_ready=is_ready)


def role(*waiting):
    """A prefill worker with nothing but a queue."""
    made = object.__new__(PrefillRole)
    made._waiting, made._running = deque(waiting), {}
    return made


def test_a_prompt_that_is_ready_can_begin():
    """Nothing keeps the first of the queue once its prefix is there; an empty queue is no work."""
    assert role(prompt(is_ready=True)).busy
    assert not role().busy


@pytest.mark.xfail(
    strict=True,
    reason="a fetch has no deadline: a stalled holder keeps a whole worker for the timeout of its peer",
)
def test_a_stalled_holder_does_not_keep_the_worker():
    """While the first prompt waits for a prefix from elsewhere, the next one can begin."""
    assert role(prompt(is_ready=False), prompt(is_ready=True)).busy
