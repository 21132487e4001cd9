"""Clients that wait for their answers on the live cluster: what turns reuse, and decisions as simulated."""

from dataclasses import replace

import pytest
from recorded import decisions, recording

from mooncake_lab.conductor import LatencyEstimator
from mooncake_lab.core import Arrived, Finished, Moved, Prefilled, Rejected
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import DecodeLatency, HybridLatency, PrefillLatency
from mooncake_lab.serving import Pacer
from mooncake_lab.simulation import Cluster, SimulatedClients
from mooncake_lab.workload import ClientRules, chat_sessions

BLOCK = 16
SMALL = {"first_tokens": 70, "new_tokens": 21, "answer_tokens": 25, "block_size_tokens": BLOCK}


def times(log, kind):
    """When each request had its record of this kind."""
    return {record.request_id: record.at_s for record in log if isinstance(record, kind)}


@pytest.fixture(params=[False, True], ids=["paper", "keep_answers"])
def keep_answers(request):
    """Whether the cluster keeps answers."""
    return request.param


def test_forty_sessions_reuse_what_the_block_rule_says(open_cluster, reference, keep_answers):
    """Each later turn reuses the whole blocks that are kept, and has the tokens of one engine without reuse."""
    sessions = chat_sessions(40, 3, mean_think_s=0.3, sessions_per_s=40.0, **SMALL)
    with open_cluster(prefill_nodes=1, decode_nodes=1, keep_answers=keep_answers) as live:
        log = live.play(sessions)
        clients = live.clients
    assert check_log(log) == ()
    assert len(clients.served) == 120
    assert all(served.is_answered for served in clients.served.values())
    arrived, finished = times(log, Arrived), times(log, Finished)
    reused = {record.request_id: record.reused_tokens for record in log if isinstance(record, Prefilled)}
    kept = {
        record.request_id: record.at_s for record in log if isinstance(record, Moved) and "decode" in record.source
    }
    for session in sessions:
        assert reused[session.turns[0].request.id] == 0
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            one, two = before.request, after.request
            assert arrived[two.id] >= finished[one.id] + two.delay_s
            prompt, answered = one.input_tokens, one.input_tokens + before.output_tokens - 1
            held = {answered if keep_answers else prompt}
            if keep_answers and kept.get(one.id, 0.0) >= arrived[two.id]:  # while the turn waited, or later
                held.add(prompt)
            assert reused[two.id] in {tokens // BLOCK * BLOCK for tokens in held}
            assert list(clients.prompts[two.id][: one.input_tokens]) == list(clients.prompts[one.id])
            answer = clients.prompts[two.id][one.input_tokens : one.input_tokens + before.output_tokens]
            assert tuple(answer) == clients.outputs[one.id]
    for place in range(3):
        turns = [session.turns[place].request.id for session in sessions]
        tokens = reference([clients.prompts[i] for i in turns], SMALL["answer_tokens"])
        assert tokens == [clients.outputs[i] for i in turns]


def test_the_same_decisions_of_clients_that_wait(open_cluster, believed, keep_answers):
    """Under the pacer, the turns of sessions go to the same workers and reuse the same tokens in both runtimes."""
    prefill = PrefillLatency(constant_s=0.08, per_token_s=1e-3, per_token_squared_s=0.0)
    decode = DecodeLatency(0.08, 0.0, 0.0)
    pace = replace(believed, prefill=prefill, decode=decode, hybrid=HybridLatency.of(prefill, decode))
    sizes = {"first_tokens": 70, "new_tokens": 21, "answer_tokens": 6, "block_size_tokens": BLOCK}
    sessions = chat_sessions(2, 3, mean_think_s=0.0, sessions_per_s=1.0, **sizes)
    sessions = [
        replace(each, turns=tuple(later(turn, i) for turn in each.turns)) for i, each in enumerate(sessions)
    ]
    with open_cluster(
        pace, prefill_nodes=2, decode_nodes=1, pacer=Pacer.of(pace), keep_answers=keep_answers
    ) as live:
        for number in range(4):  # each worker touches its memory once
            live.generate([[number, 1, 2, 3] * 20], max_new_tokens=2)
        spec, found = live.spec, []
        for _ in range(6):
            live.reset_prefix_cache()
            with recording() as steps:
                live.play(sessions)
            with recording() as expected:
                cluster = Cluster(
                    spec, pace, estimate=LatencyEstimator(pace, fetches_by_layer=spec.streams_layers)
                )
                SimulatedClients(cluster, sessions)
                cluster.run()
            found = [sorted(map(repr, decisions(each))) for each in (list(steps.values())[-1], *expected.values())]
            if found[0] == found[1]:
                break
    assert found[0] == found[1]
    assert len(found[0]) == 6


def later(turn, session):
    """The turn of a session that begins half a second after the one before, and thinks for 0.37 s."""
    request = turn.request
    delay_s = 0.37 if request.wait_for else None
    return replace(turn, request=replace(request, arrival_s=0.05 + 0.53 * session, delay_s=delay_s))


def test_refused_and_impatient_clients(open_cluster):
    """A refused turn comes again after `Retry-After`; one without patience leaves, and its session ends."""
    sessions = chat_sessions(6, 2, mean_think_s=0.1, sessions_per_s=100.0, **SMALL | {"answer_tokens": 200})
    with open_cluster(prefill_nodes=1, decode_nodes=1, max_inflight_requests=3) as live:
        log = live.play(sessions, ClientRules(retries=1))
        sent, arrived, rejected = live.clients.sent, times(log, Arrived), times(log, Rejected)
        again = [each.request for each in sent if each.request.retry_of is not None]
        assert again
        for request in again:
            assert arrived[request.id] >= rejected[request.retry_of] + 1.0
        log = live.play(sessions, ClientRules(answer_patience_s=0.05), concurrency=1)
        assert check_log(log) == ()
        assert {record.stage for record in log if isinstance(record, Rejected)} == {"client"}
        assert live.clients.not_sent == 6
        assert len(live.clients.served) == 6
        with pytest.raises(ValueError, match="at least 1"):
            live.play(sessions, concurrency=0)
        long = chat_sessions(1, 1, first_tokens=100_000, answer_tokens=10, block_size_tokens=BLOCK)
        with pytest.raises(ValueError, match="fit"):
            live.play(long)
