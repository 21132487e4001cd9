"""Virtual time: the order of callbacks, where a run ends, and what it leaves behind."""

import gc
import math

import pytest
import simpy
from families import requests_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import SarathiServe
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import SLO, RunEnded
from mooncake_lab.metrics import check_log, run_summary, token_times_s
from mooncake_lab.simulation import Cluster, EventLoop
from mooncake_lab.simulation.clock import Steady, delay_until


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


def test_what_is_never_due_keeps_no_run_going():
    """A callback an infinite time from now never runs; one before now, or at no time, is refused."""
    loop = EventLoop()
    loop.call_later(math.inf, lambda: pytest.fail("it ran"))
    loop.call_later(1.0, lambda: None)
    loop.run()
    assert loop.now_s == 1.0
    for delay_s in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"the delay of a callback is {delay_s} s; allowed are 0 and more"):
            loop.call_later(delay_s, lambda: None)


def test_a_run_leaves_no_garbage_in_cycles():
    """What a request was on its way is freed when the request is done, not by a search for garbage."""
    requests = requests_of([(0.1 * i, 3000, 20, i % 2) for i in range(30)])
    cluster = Cluster(ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2), paper_node_latency())
    gc.collect()
    gc.disable()
    try:
        cluster.run(requests)
        assert gc.collect() == 0
    finally:
        gc.enable()


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1e-3), st.floats(0.0, 100.0))
def test_iterations_within_a_time_are_the_last_that_ends_in_it(first_s, growth_s, budget_s):
    """That many iterations fit and one more does not; those that take no time are refused."""
    assume(budget_s / first_s < 1e6)
    pace = Steady(first_s, growth_s)
    steps = pace.steps_within(budget_s)
    assert pace.seconds(steps) <= budget_s < pace.seconds(steps + 1)
    with pytest.raises(ValueError, match="positive"):
        Steady(0.0).steps_within(budget_s)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1e-3), st.integers(1, 3000))
def test_an_iteration_that_ends_at_the_limit_ends_in_time(first_s, growth_s, steps):
    """As many iterations fit into their own duration, and one fewer into the next shorter one."""
    pace = Steady(first_s, growth_s)
    end_s = pace.seconds(steps)
    assert pace.steps_within(end_s) == steps
    assert pace.steps_within(math.nextafter(end_s, 0)) == steps - 1


def test_a_cluster_shares_the_time_of_a_callers_environment():
    """In a caller's environment the log is that of a run, and a process of the caller's sees it grow."""
    requests = requests_of([(0.5 * i, 3000, 20, i % 2) for i in range(20)])
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2)
    for horizon_s in (None, 4.0):
        expected = Cluster(spec, paper_node_latency()).run(requests, horizon_s)
        env, seen = simpy.Environment(), []
        cluster = Cluster(spec, paper_node_latency(), env=env)

        def look(env=env, cluster=cluster, seen=seen):
            for _ in range(3):
                yield env.timeout(1.0)
                seen.append((env.now, len(cluster.log)))

        env.process(look())
        cluster.start(requests, horizon_s)
        env.run(horizon_s)
        if horizon_s is not None:
            cluster.close()
        assert cluster.log == expected
        assert seen == [(at_s, sum(record.at_s < at_s for record in expected)) for at_s in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize("coupled", [False, True])
@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 12.0))
def test_a_run_is_closed_at_any_moment(coupled, at_s):
    """The log of a run whose horizon was not known has the tokens up to that moment, and keeps the laws."""
    requests = requests_of([(0.5 * i, 3000, 120, i % 2) for i in range(12)])
    spec = (
        ClusterSpec.coupled(nodes=2, batching=SarathiServe(chunk_tokens=256))
        if coupled
        else ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2)
    )
    cut = Cluster(spec, paper_node_latency()).run(requests, at_s)
    env = simpy.Environment()
    cluster = Cluster(spec, paper_node_latency(), env=env)
    cluster.start(requests)
    env.run(at_s)
    cluster.close(at_s)
    assert check_log(cluster.log) == ()
    assert cluster.log[-1].at_s == cut[-1].at_s == at_s
    assert cluster.log[-1].tokens == pytest.approx(cut[-1].tokens, abs=1)
    times = ({i: pytest.approx(each, abs=1e-6) for i, each in token_times_s(log)} for log in (cluster.log, cut))
    assert next(times).keys() == next(times).keys()
    with pytest.raises(ValueError, match="let time pass"):
        cluster.close(at_s + 1.0)
    env.run()  # what is closed can go on
    whole = [record for record in cluster.log if not isinstance(record, RunEnded)]
    assert run_summary(whole, SLO())["output_tokens"] == 12 * 120


def test_what_comes_last_comes_after_all_else_that_is_due_then():
    """Also after what is scheduled later for the same moment, and at exactly its moment."""
    loop, ran = EventLoop(), []
    loop.call_later(0.1, lambda: None)
    loop.call_last_at(0.3, lambda: ran.append(("last", loop.now_s)))
    loop.run(0.2)
    loop.call_last_at(0.7, lambda: ran.append(("last", loop.now_s)))
    for delay_s in (0.3 - 0.2, 0.7 - 0.2):
        loop.call_later(delay_s, lambda: loop.call_later(0.0, lambda: ran.append(("now", None))))
    loop.run()
    assert [at_s for what, at_s in ran if what == "last"] == [0.3, 0.7]


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_moment_is_reached_exactly(now_s, at_s):
    """The delay until a moment, added to now, is the moment, or the float below it; a past one is now."""
    reached_s = now_s + delay_until(at_s, now_s)
    assert reached_s in {at_s, math.nextafter(at_s, 0.0)} if at_s > now_s else reached_s == now_s
