"""Virtual time: the order of callbacks, and where a run ends."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.simulation import EventLoop


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=20))
def test_callbacks_run_in_order_of_time_first_in_first_out(delays):
    """Callbacks run in order of their times; those of one time run in the order in which they were scheduled."""
    loop, ran = EventLoop(), []
    for i, delay_s in enumerate(delays):
        loop.call_later(delay_s, lambda i: ran.append((loop.now_s, i)), i)
    loop.run()
    assert ran == sorted((delay_s, i) for i, delay_s in enumerate(delays))
    assert loop.scheduled == len(delays)


def test_a_run_ends_before_its_horizon():
    """What is due at the horizon is left for the next run, and the present is the horizon."""
    loop, ran = EventLoop(), []
    for at_s in (1.0, 2.0, 3.0):
        loop.call_later(at_s, ran.append, at_s)
    loop.run(2.0)
    assert (ran, loop.now_s) == ([1.0], 2.0)
    loop.run()
    assert (ran, loop.now_s) == ([1.0, 2.0, 3.0], 3.0)
