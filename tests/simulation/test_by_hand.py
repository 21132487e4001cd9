"""An example worked by hand: what a pencil says about four requests, the simulator says too."""

import pytest
from by_hand import four_requests

from mooncake_lab.core import Finished, Moved, Placed, Prefilled
from mooncake_lab.metrics import check_log, token_times_s
from mooncake_lab.simulation import Cluster

FETCH_S = 500 / (10_000 - 0.9 * 2000 / 0.5)
"""500 tokens over a card of 10,000 a second; nine of ten layers of 2,000 tokens leave by it in half a second."""


@pytest.fixture(scope="module")
def log():
    spec, model, requests = four_requests()
    return Cluster(spec, model).run(requests)


def test_who_goes_where(log):
    """Request 0 is first, 1 avoids its queue, 2 follows its prefix, and 3 has that prefix fetched.

    Fetching takes 0.05 s if the card were free; the queue at the holder is 0.4 s.
    """
    placed = {
        r.request_id: (r.prefill_instance, r.reused_tokens, r.fetched_tokens) for r in log if type(r) is Placed
    }
    assert placed == {
        0: ("prefill-0", 0, 0),
        1: ("prefill-1", 0, 0),
        2: ("prefill-1", 1500, 0),
        3: ("prefill-0", 1500, 500),
    }


def test_when_each_prompt_is_computed(log):
    """A millisecond for each token that is not reused; request 3 waits for its blocks."""
    spans = {r.request_id: (r.start_s, r.at_s) for r in log if isinstance(r, Prefilled)}
    expected = {0: (0.0, 1.0), 1: (0.5, 2.0), 2: (3.0, 3.5), 3: (3.1 + FETCH_S, 4.1 + FETCH_S)}
    assert spans == {i: pytest.approx(span) for i, span in expected.items()}


def test_two_flows_share_a_card(log):
    """The fetch has what request 2's stream to the decode node leaves of prefill-1's card."""
    (fetched,) = [r for r in log if isinstance(r, Moved) and r.destination == "prefill-0"]
    assert (fetched.start_s, fetched.at_s) == (pytest.approx(3.1), pytest.approx(3.1 + FETCH_S))


def test_every_token(log):
    """First tokens come after the last layer and the load; steps last 0.15 s alone and 0.2 s in pairs."""
    times = {i: list(t) for i, t in token_times_s(log)}
    first = 1.0 + 100 / (10_000 - 900) + 0.05
    third = 3.5 + 200 / (10_000 - 2250) + 0.1
    alone = [third + 0.15 * k for k in range(6)]  # request 3 is there at 4.33 s and waits for the step to end
    expected = {
        0: [first, first + 0.15, first + 0.3],
        1: [2.09, 2.24],
        2: [*alone, third + 0.95, third + 1.15],
        3: [third + 0.75, third + 0.95, third + 1.15, third + 1.3],
    }
    assert times == {i: pytest.approx(t) for i, t in expected.items()}


def test_the_end(log):
    """All is over after 4.93 s, and every request got what it was to get."""
    assert check_log(log) == ()
    assert {r.request_id: r.output_tokens for r in log if isinstance(r, Finished)} == {0: 3, 1: 2, 2: 8, 3: 4}
    assert log[-1].at_s == pytest.approx(3.5 + 200 / (10_000 - 2250) + 0.1 + 1.3)
