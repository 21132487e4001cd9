"""Clients that wait for their answers: when turns are sent, what they contain, and what refused clients do."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from drawn import REALISTIC
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import EarlyRejection
from mooncake_lab.core import (
    SLO,
    Arrived,
    Finished,
    FirstToken,
    Moved,
    Prefilled,
    Rejected,
    Request,
    TracedRequest,
    answer_keys,
    blocks_for,
)
from mooncake_lab.metrics import check_log
from mooncake_lab.simulation import Cluster, Failure, SimulatedClients, SimulationOptions
from mooncake_lab.workload import ClientRules, ClientSession, chat_sessions, sessions_of


def apart(nodes=2, options=None, **settings):
    """A cluster of as many prefill as decode nodes."""
    return Cluster(
        ClusterSpec.disaggregated(prefill_nodes=nodes, decode_nodes=nodes, **settings), REALISTIC, options
    )


def together(nodes=2, options=None, **settings):
    """A cluster of coupled nodes with prefix caching."""
    return Cluster(ClusterSpec.coupled(nodes=nodes, prefix_caching=True, **settings), REALISTIC, options)


CLUSTERS = pytest.mark.parametrize("make", [apart, together])


def turn(i, session, tokens, *, at_s=0.0, delay_s=None, wait_for=(), output_tokens=20, family=None):
    """A turn whose blocks are those of its family, by default its session."""
    keys = tuple(hash(family or session) % 1000 * 1000 + k for k in range(blocks_for(tokens, 512)))
    request = Request(
        id=i,
        arrival_s=at_s,
        input_tokens=tokens,
        block_keys=keys,
        session=session,
        wait_for=wait_for,
        delay_s=delay_s,
    )
    return TracedRequest(request, output_tokens)


@st.composite
def drawn_sessions(draw):
    """Up to five sessions of up to six turns; each waits for one or two turns of its session, or for none."""
    made, count = [], 0
    for session in range(draw(st.integers(1, 5))):
        begins_s, turns = draw(st.floats(0, 5)), []
        for place in range(draw(st.integers(1, 6))):
            waits = draw(st.sets(st.sampled_from(turns), max_size=2)) if place else set()
            delay_s = draw(st.sampled_from([None, 0.0, 0.5, 1.25]))
            tokens = draw(st.integers(1, 3000)) + 700 * place
            made.append(
                turn(
                    count,
                    None if place and not waits and draw(st.booleans()) else str(session),
                    tokens,
                    at_s=begins_s + place,
                    delay_s=delay_s if waits else None,
                    wait_for=tuple(sorted(waits)),
                    output_tokens=draw(st.integers(2, 60)),
                )
            )
            turns.append(count)
            count += 1
    return sessions_of(made)


def times(log, kind):
    """When each request had its record of this kind."""
    return {record.request_id: record.at_s for record in log if isinstance(record, kind)}


@CLUSTERS
@settings(max_examples=30, deadline=None)
@given(sessions=drawn_sessions(), concurrency=st.sampled_from([None, 1, 2]))
def test_no_turn_comes_before_what_it_waits_for(make, sessions, concurrency):
    """Each turn arrives its delay after the last answer that it waits for, and every turn gets all its tokens."""
    cluster = make()
    clients = SimulatedClients(cluster, sessions, concurrency=concurrency)
    log = cluster.run()
    assert check_log(log) == ()
    arrived, finished = times(log, Arrived), times(log, Finished)
    turns = [turn for session in sessions for turn in session.turns]
    assert arrived.keys() == finished.keys() == {turn.request.id for turn in turns}
    for each in turns:
        request = each.request
        answers_s = max((finished[waits] for waits in request.wait_for), default=0.0)
        assert arrived[request.id] >= answers_s + ((request.delay_s or 0.0) if request.wait_for else 0.0) - 1e-9
        if request.wait_for and request.delay_s is not None:
            assert arrived[request.id] == pytest.approx(answers_s + request.delay_s)
    given_out = {record.request_id: record.output_tokens for record in log if isinstance(record, Finished)}
    assert given_out == {turn.request.id: turn.output_tokens for turn in turns}
    assert clients.served.keys() == given_out.keys()


@CLUSTERS
@settings(max_examples=30, deadline=None)
@given(sessions=drawn_sessions(), concurrency=st.sampled_from([None, 2]))
def test_an_open_loop_at_the_same_times_gives_the_same_log(make, sessions, concurrency):
    """What clients sent, replayed at the times at which they sent it, gives the log of the closed loop."""
    cluster = make()
    clients = SimulatedClients(cluster, sessions, concurrency=concurrency)
    log = cluster.run()
    assert make().run(clients.sent) == log


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4000), st.integers(1, 40)), min_size=1, max_size=12))
def test_a_trace_without_sessions_is_a_set_of_sessions_of_one_turn(rows):
    """Requests of no session arrive at their recorded times, as in an open loop."""
    requests = [turn(i, None, tokens, at_s=at_s, output_tokens=out) for i, (at_s, tokens, out) in enumerate(rows)]
    requests.sort(key=lambda traced: traced.request.arrival_s)
    sessions = sessions_of(requests)
    assert [len(session.turns) for session in sessions] == [1] * len(rows)
    cluster = apart()
    SimulatedClients(cluster, sessions)
    assert cluster.run() == apart().run(requests)


@pytest.mark.parametrize("concurrency", [1, 3, 5])
def test_so_many_sessions_are_played_at_once(concurrency):
    """The next session begins when one has ended: at most as many run, and as many while enough are left."""
    sessions, cluster = chat_sessions(8, 3, mean_think_s=1.0), apart()
    clients = SimulatedClients(cluster, sessions, concurrency=concurrency)
    log = cluster.run()
    first, last = times(log, Arrived), times(log, Finished)
    spans = [(first[s.turns[0].request.id], last[s.turns[-1].request.id]) for s in sessions]
    at_once = [sum(begin <= at_s < end for begin, end in spans) for at_s, _ in spans]
    assert max(at_once) == concurrency
    assert len(clients.served) == 24
    with pytest.raises(ValueError, match="at least 1"):
        SimulatedClients(cluster, sessions, concurrency=0)


def test_sub_agents_and_forks_wait_for_one_another():
    """Turns of several sessions that wait for one another are one session, and the last waits for all of them."""
    main = [turn(0, "main", 1000), turn(4, "main", 2000, wait_for=(0, 2, 3), at_s=9.0, delay_s=0.0)]
    agents = [
        turn(1, "a", 600, wait_for=(0,), at_s=1.0, delay_s=0.0),
        turn(2, "a", 1200, at_s=2.0, delay_s=3.0),
        turn(3, "b", 700, wait_for=(0,), at_s=1.5, delay_s=1.0),
    ]
    sessions = sessions_of([main[0], *agents, main[1], turn(5, "other", 100, at_s=9.5)])
    assert [[each.request.id for each in session.turns] for session in sessions] == [[0, 1, 2, 3, 4], [5]]
    assert sessions[0].turns[2].request.wait_for == (1,)  # the turn before it in its session
    cluster = apart()
    SimulatedClients(cluster, sessions)
    log = cluster.run()
    arrived, finished = times(log, Arrived), times(log, Finished)
    assert arrived[4] == max(finished[i] for i in (0, 2, 3))
    assert arrived[2] == pytest.approx(finished[1] + 3.0)


def test_a_turn_waits_only_for_turns_before_it():
    """A session without a turn, or one whose turn waits for what does not come before it, is refused."""
    with pytest.raises(ValueError, match="waits for 7"):
        ClientSession((turn(0, "s", 100, wait_for=(7,)),))
    with pytest.raises(ValueError, match="at least one"):
        ClientSession(())


@given(st.integers(1, 3000), st.integers(0, 2000), st.integers(0, 2000), st.sampled_from([16, 512]))
def test_keys_of_an_answer(prompt, first, more, size):
    """They name the prompt and the number of tokens: whole blocks stay when more tokens come."""
    keys = tuple(range(blocks_for(prompt, size)))
    short, long = (answer_keys(keys, prompt, answer, size) for answer in (first, first + more))
    assert len(long) == blocks_for(prompt + first + more, size) == len(set(long))
    whole = (prompt + first) // size
    assert long[:whole] == short[:whole]
    assert long[: prompt // size] == keys[: prompt // size]
    assert first + more == 0 or more == 0 or (prompt + first) % size == 0 or long[whole] != short[whole]
    other = answer_keys((*keys[:-1], -1), prompt, first + more, size)
    assert not set(other[prompt // size :]) & set(long[prompt // size :]) or first + more == 0


def test_the_next_turn_contains_the_answer():
    """Its prompt begins with prompt and answer of the turn before, under the keys of that answer."""
    (session,) = chat_sessions(1, 3, first_tokens=900, new_tokens=300, answer_tokens=400)
    for before, after in zip(session.turns, session.turns[1:], strict=False):
        tokens = before.request.input_tokens + before.output_tokens
        assert after.request.input_tokens == tokens + 300
        given = answer_keys(before.request.block_keys, before.request.input_tokens, before.output_tokens, 512)
        assert after.request.block_keys[: tokens // 512] == given[: tokens // 512]


def test_an_answer_is_prefilled_by_the_next_turn():
    """Without kept answers, a turn reuses the whole blocks of the prompt before it (assumption B10)."""
    (session,) = chat_sessions(1, 6, first_tokens=900, new_tokens=300, answer_tokens=400)
    cluster = apart(1)
    SimulatedClients(cluster, [session])
    log = cluster.run()
    reused = [record.reused_tokens for record in log if isinstance(record, Prefilled)]
    whole = [each.request.input_tokens // 512 * 512 for each in session.turns]
    assert reused == [0, *whole[:-1]]


@pytest.mark.parametrize("shared_cache", [False, True])
def test_a_kept_answer_is_reused_by_the_next_turn(shared_cache):
    """A turn reuses the whole blocks of prompt and answer before it; the last token has no KVCache."""
    (session,) = chat_sessions(1, 6, first_tokens=900, new_tokens=300, answer_tokens=400)
    cluster = apart(1, keep_answers=True, shared_cache=shared_cache)
    SimulatedClients(cluster, [session])
    log = cluster.run()
    assert check_log(log) == ()
    reused = [record.reused_tokens for record in log if isinstance(record, Prefilled)]
    held = [(each.request.input_tokens + each.output_tokens - 1) // 512 for each in session.turns]
    assert reused == [0, *(512 * blocks for blocks in held[:-1])]
    back = {
        record.request_id: record for record in log if isinstance(record, Moved) and record.source == "decode-0"
    }
    for each, blocks in zip(session.turns, held, strict=True):
        sent = blocks - each.request.input_tokens // 512
        moved = back.get(each.request.id)
        assert (0 if moved is None else moved.bytes) == sent * 512 * REALISTIC.shape.kv_bytes_per_token
        if moved is not None:
            seconds = moved.bytes / REALISTIC.transfer.bytes_per_s
            assert moved.at_s - moved.start_s == pytest.approx(seconds, rel=1e-6)


def test_an_answer_is_kept_over_a_failure():
    """After a failure in the middle of an answer, the next turn still reuses all of it."""
    (session,) = chat_sessions(1, 2, first_tokens=900, new_tokens=300, answer_tokens=1500, mean_think_s=5.0)
    for failures in ((), (Failure("decode-0", session.begins_s + 5.0),)):
        cluster = apart(2, SimulationOptions(failures=failures), keep_answers=True)
        SimulatedClients(cluster, [session])
        log = cluster.run()
        assert check_log(log) == ()
        last = [record for record in log if isinstance(record, Prefilled) and record.request_id == 1]
        assert [record.reused_tokens for record in last] == [(900 + 1500 - 1) // 512 * 512]


def test_keeping_answers_needs_a_cache():
    """Where prefill nodes keep no prompts, they keep no answers either."""
    with pytest.raises(ValueError, match="keep_answers needs"):
        ClusterSpec.disaggregated(keep_answers=True, prefix_caching=False)


def refusing(**changes):
    """A cluster that refuses what it cannot serve in time, and more traffic than that."""
    made = apart(1, admission=EarlyRejection(), slo=SLO(ttft_s=1.5, tbt_s=0.05), **changes)
    return made, chat_sessions(25, 3, first_tokens=9000, sessions_per_s=20.0, mean_think_s=0.5)


def test_refused_turns_are_sent_again_after_the_time_that_they_were_told():
    """A turn that is refused for load comes again after `Retry-After`, as a request of its own."""
    cluster, sessions = refusing()
    clients = SimulatedClients(cluster, sessions, ClientRules(retries=2))
    log = cluster.run()
    assert check_log(log) == ()
    rejected, arrived = times(log, Rejected), times(log, Arrived)
    again = [traced.request for traced in clients.sent if traced.request.retry_of is not None]
    assert again
    for request in again:
        waited_s = arrived[request.id] - rejected[request.retry_of]
        assert round(waited_s) >= 1
        assert waited_s == pytest.approx(round(waited_s))
    tries = Counter(traced.request.session for traced in clients.sent)
    assert max(tries.values()) <= 9
    # each refusal but the last of a turn is followed by a retry
    given_up = [served for served in clients.served.values() if not served.is_answered]
    assert len(rejected) == len(again) + len(given_up)


def test_a_session_ends_with_a_turn_that_is_not_answered():
    """No turn that waits for an answer that does not come is sent; each turn is served, given up, or not sent."""
    cluster, sessions = refusing()
    clients = SimulatedClients(cluster, sessions)
    cluster.run()
    assert clients.not_sent
    assert len(clients.served) + clients.not_sent == 75
    unanswered = {i for i, served in clients.served.items() if not served.is_answered}
    assert unanswered
    for session in sessions:
        for each in session.turns:
            if each.request.id in clients.served:
                assert not unanswered & set(each.request.wait_for)


@CLUSTERS
def test_a_client_without_patience_leaves(make):
    """Patience up to the first token spares those that have it; patience up to the end does not."""
    sessions = chat_sessions(30, 1, first_tokens=6000, answer_tokens=200, sessions_per_s=20.0)
    for rules, what in (
        (ClientRules(first_token_patience_s=2.0), "first token"),
        (ClientRules(answer_patience_s=5.0), "answer"),
    ):
        cluster = make()
        SimulatedClients(cluster, sessions, rules)
        log = cluster.run()
        assert check_log(log) == ()
        arrived, left, first = times(log, Arrived), times(log, Rejected), times(log, FirstToken)
        assert left
        assert all(what in record.reason for record in log if isinstance(record, Rejected))
        patience_s = min(rules.first_token_patience_s, rules.answer_patience_s)
        for i, at_s in arrived.items():
            waited_s = left.get(i, math.inf) - at_s
            assert waited_s >= patience_s - 1e-9
            if what == "first token":
                assert (i in left) == (i not in first or first[i] > at_s + patience_s)
        assert not cluster.coordinator.requests


@pytest.mark.parametrize(
    "rules", [{"retries": -1}, {"first_token_patience_s": 0.0}, {"answer_patience_s": math.nan}]
)
def test_rules_of_clients_are_checked(rules):
    """Numbers of retries from 0, and positive times."""
    (name,) = rules
    with pytest.raises(ValueError, match=name):
        ClientRules(**rules)


def test_a_submitted_request_ends_with_what_was_served():
    """The event has the answer's length and time, or why there is none; an id in flight is refused."""
    cluster, seen = (
        apart(1, SimulationOptions(failures=(Failure("decode-0", 30.0), Failure("prefill-0", 30.0)))),
        [],
    )

    def client():
        first = cluster.submit(turn(7, None, 1000))
        with pytest.raises(ValueError, match="id of its own"):
            cluster.submit(turn(7, None, 1000))
        seen.append((yield first))
        yield cluster.env.timeout(40.0 - cluster.env.now)
        seen.append((yield cluster.submit(turn(8, None, 1000))))

    cluster.env.process(client())
    log = cluster.run()
    answered, refused = seen
    assert (answered.output_tokens, answered.is_answered) == (20, True)
    assert answered.at_s == times(log, Finished)[7]
    assert (refused.stage, refused.output_tokens, refused.retry_after_s) == ("capacity", 0, None)
    assert refused.request == replace(turn(8, None, 1000).request, arrival_s=40.0)


def test_failures_come_before_arrivals_of_the_same_moment():
    """A node that fails at a moment serves no request of that moment, whoever schedules which first."""
    for at_s in (0.0, 2.0):
        cluster = apart(2)

        def client(cluster=cluster, at_s=at_s):
            yield cluster.env.timeout(at_s)
            yield cluster.submit(turn(0, None, 1000))

        def failure(cluster=cluster, at_s=at_s):
            yield cluster.env.timeout(at_s)
            cluster.fail("decode-0")

        cluster.env.process(client())
        cluster.env.process(failure())
        log = cluster.run()
        assert [record.at_s for record in log if isinstance(record, Arrived)] == [at_s]
        assert [record.decode_instance for record in log if type(record).__name__ == "Placed"] == ["decode-1"]
    with pytest.raises(ValueError, match="no instance 'decode-9'"):
        apart().fail("decode-9")
