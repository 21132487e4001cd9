"""The coordinator, one rule at a time: what an event leads to, and what the Conductor sees then."""

from dataclasses import replace

import numpy as np
import pytest
from modelled import RefusesSome, bring_up, make_runtime, request

from mooncake_lab import cluster as c
from mooncake_lab.cluster import events as e
from mooncake_lab.conductor import LoadBalance, Placement, Rejection
from mooncake_lab.core import (
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Rejected,
    RunEnded,
)
from mooncake_lab.metrics import check_log

A = c.Attempt(0, 1)
PAIR = ("prefill-0", "decode-0")


class Fetches:
    """Each prompt on prefill-1, with all but its first block from prefill-0."""

    def place(self, request, view, estimate):
        """Always the same."""
        del view, estimate
        return Placement(
            request_id=request.id, prefill="prefill-1", decode="decode-0", reused_tokens=1536,
            fetched_tokens=1024, fetch_from="prefill-0", expected_ttft_s=2.0, expected_tbt_s=0.0, reason="so",
        )  # fmt: skip


def arrive(run, i=0, **fields):
    run.original[i] = request(i, at_s=run.now)
    return run.tell(e.RequestArrived, request=run.original[i], **fields)


def prefill(run, attempt=A, instance="prefill-0", end_s=3.0):
    run.now = end_s - 1
    run.tell(e.PrefillStarted, attempt=attempt, instance=instance)
    run.now = end_s
    run.tell(
        e.PrefillDone,
        attempt=attempt,
        instance=instance,
        start_s=end_s - 1,
        computed_tokens=1500,
        reused_tokens=500,
    )


def decode(run, attempt=A):
    for kind, what in ((e.KVArrived, {"start_s": run.now, "bytes": 9}), (e.KVLoaded, {}), (e.DecodeStarted, {})):
        run.tell(kind, attempt=attempt, **what)


def step(run, steps=4, ids=(0,)):
    start_s, run.now = run.now, run.now + 1
    run.tell(
        DecodeStretch, instance="decode-0", start_s=start_s, steps=steps, first_step_s=0.25, step_growth_s=0.1,
        request_ids=ids,
    )  # fmt: skip


def kinds(records):
    return [type(record) for record in records]


def test_a_request_from_arrival_to_its_last_token():
    """Each event leads to its commands and records, in order, with the times at which things happened."""
    run = make_runtime(PAIR, schedule_s=0.5)
    assert arrive(run) == (e.SetTimer(0, 0.5),)
    run.now = 0.5
    prepare, compute = run.tell(e.TimerFired, request_id=0)
    assert prepare == e.PrepareDecode(A, "decode-0", run.original[0])
    assert (compute.attempt, compute.request, compute.placement.prefill) == (A, run.original[0], "prefill-0")
    assert not run.tell(e.TimerFired, request_id=0)
    prefill(run)
    assert run.tell(e.KVArrived, attempt=A, start_s=3.0, bytes=9) == (e.StartDecode(A, "decode-0", 0, True),)
    assert not run.tell(e.KVArrived, attempt=A, start_s=3.0, bytes=9)
    run.now = 4.0
    run.tell(e.KVLoaded, attempt=A)
    assert run.coordinator.instances.by_name["decode-0"].decode.view().decoding[0].starts_s == 4.0
    run.tell(e.DecodeStarted, attempt=A)
    step(run)
    assert run.tell(e.RequestDone, attempt=A) == (e.Finish(0),)
    assert not run.tell(e.RequestDone, attempt=A)
    assert run.log[2:] == [
        Prefilled(
            at_s=3.0, request_id=0, instance="prefill-0", start_s=2.0, computed_tokens=1500, reused_tokens=500
        ),
        Moved(at_s=3.0, request_id=0, source="prefill-0", destination="decode-0", start_s=3.0, bytes=9),
        FirstToken(at_s=4.0, request_id=0),
        DecodeStretch(
            at_s=5.0, instance="decode-0", start_s=4.0, steps=4, first_step_s=0.25, step_growth_s=0.1,
            request_ids=(0,),
        ),
        Finished(at_s=5.0, request_id=0, output_tokens=5),
    ]  # fmt: skip
    assert not run.coordinator.requests


def test_an_answer_goes_on_after_a_failure():
    """Tokens that were shown are part of the next prompt; the one that it computes is a step of no length."""
    run = make_runtime(PAIR)
    arrive(run)
    prefill(run)
    decode(run)
    step(run)
    *cancels, prepare, compute = run.tell(e.AttemptFailed, attempt=A, reason="it failed", retriable=True)
    assert cancels == [e.CancelAttempt(A, "prefill-0"), e.CancelAttempt(A, "decode-0")]
    assert prepare.attempt == compute.attempt == c.Attempt(0, 2)
    assert compute.request.input_tokens == 2005
    assert run.log[-1].reason.startswith("placed again after it failed: ")
    prefill(run, compute.attempt, end_s=9.0)
    (start,) = run.tell(e.KVArrived, attempt=compute.attempt, start_s=9.0, bytes=9)
    assert (start.shown_tokens, start.shows_computed) == (5, True)
    run.tell(e.DecodeStarted, attempt=compute.attempt)
    assert run.log[-1] == DecodeStretch(
        at_s=9.0, instance="decode-0", start_s=9.0, steps=1, first_step_s=0.0, step_growth_s=0.0, request_ids=(0,)
    )
    run.tell(e.AttemptFailed, attempt=compute.attempt, reason="again", retriable=True)
    assert run.coordinator.requests[0].request.input_tokens == 2006
    assert run.coordinator.requests[0].prompt_shown_tokens == 6


def test_the_first_token_at_prefill():
    """Where prefill shows it, the first token is shown once, and decode goes on with the second."""
    run = make_runtime(PAIR, first_shown_by="prefill")
    arrive(run)
    prefill(run)
    assert run.log[-1] == FirstToken(at_s=3.0, request_id=0)
    (start,) = run.tell(e.KVArrived, attempt=A, start_s=3.0, bytes=9)
    assert start == e.StartDecode(A, "decode-0", 1, False)
    run.report(RunEnded(at_s=3.0, tokens={7: 2}))
    assert run.log[-1] == RunEnded(at_s=3.0, tokens={0: 1, 7: 2})
    run.tell(e.DecodeStarted, attempt=A)
    assert not isinstance(run.log[-1], FirstToken)


def test_a_refusal_after_prefill():
    """The double check refuses before anything is loaded; both instances are told."""
    run = make_runtime(PAIR, admission=RefusesSome())
    for i in range(3):
        arrive(run, i)
    prefill(run, c.Attempt(2, 1))
    commands = run.tell(e.KVArrived, attempt=c.Attempt(2, 1), start_s=3.0, bytes=9)
    assert kinds(commands) == [e.CancelAttempt, e.CancelAttempt, e.Reject]
    assert run.log[-1] == Rejected(at_s=3.0, request_id=2, stage="decode", reason="third")
    assert run.coordinator.instances.by_name["decode-0"].decode.view().requests == 2


def test_what_is_being_loaded_is_present():
    """From the second check on a request counts as decoding, and once it is loaded, from that moment on."""
    run = make_runtime(PAIR, admission=RefusesSome())
    for i in range(3):
        arrive(run, i)
        prefill(run, c.Attempt(i, 1))

    def seen():
        decode = run.coordinator.instances.by_name["decode-0"].decode.view()
        starts_s = {served.request_id: served.starts_s for served in decode.decoding}
        return starts_s, decode.present_requests, decode.present_tokens

    assert seen() == ({}, 0, 0)
    run.now = 4.0
    run.tell(e.KVArrived, attempt=A, start_s=3.0, bytes=9)
    assert seen() == ({0: 4.0}, 1, 2000)
    run.tell(e.KVArrived, attempt=c.Attempt(2, 1), start_s=3.0, bytes=9)  # which is refused
    assert seen() == ({0: 4.0}, 1, 2000)
    run.now = 5.0
    run.tell(e.KVArrived, attempt=c.Attempt(1, 1), start_s=3.0, bytes=9)
    run.tell(e.KVLoaded, attempt=A)
    assert seen() == ({0: 5.0, 1: 5.0}, 2, 4000)
    run.now = 6.0
    run.tell(e.Cancelled, request_id=1)
    run.tell(e.DecodeStarted, attempt=A)
    assert seen() == ({0: 5.0}, 1, 2000)


def test_a_limit_of_requests_in_flight():
    """One more than allowed is rejected before the Conductor is asked."""
    run = make_runtime(PAIR, max_inflight_requests=2)
    for i in range(3):
        arrive(run, i)
    assert run.log[-1].stage == "frontdoor"
    assert "2 requests are in flight; allowed are 2" in run.log[-1].reason
    assert kinds(run.log).count(Placed) == 2


class Fails:
    """Raises for request 1 and names an unknown instance for request 2."""

    def place(self, request, view, estimate):
        """On the one pair."""
        if request.id == 1:
            raise ZeroDivisionError("a mistake")
        prefill = "prefill-9" if request.id == 2 else "prefill-0"
        return replace(LoadBalance().place(request, view, estimate), prefill=prefill)


def test_a_policy_that_fails():
    """Its errors cost the requests that it decides on, and no other, where the spec says so; else the run."""
    run = make_runtime(PAIR, placement=Fails(), reject_policy_errors=True)
    for i in range(3):
        arrive(run, i)
    refused = [(record.request_id, record.stage) for record in run.log if isinstance(record, Rejected)]
    assert refused == [(1, "failed"), (2, "failed")]
    assert "ZeroDivisionError('a mistake')" in run.log[-3].reason
    assert "sets prefill to 'prefill-9'; allowed are prefill-0" in run.log[-1].reason
    assert set(run.coordinator.requests) == {0}
    for i, error in ((1, ZeroDivisionError), (2, KeyError)):
        with pytest.raises(error):
            arrive(make_runtime(PAIR, placement=Fails()), i)


class Places:
    """Where and what a test says."""

    def __init__(self, **fields):
        self.fields = fields

    def place(self, request, view, estimate):
        """The same for all requests."""
        del view, estimate
        usual = {"prefill": "prefill-0", "decode": "decode-0", "reused_tokens": 0, "expected_ttft_s": 2.0}
        usual |= {"request_id": request.id, "expected_tbt_s": 0.0, "reason": "so"}
        return Placement(**usual | self.fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefill": "decode-0"}, "sets prefill to 'decode-0'; allowed are prefill-0, prefill-1"),
        ({"prefill": ["prefill-0"]}, "sets prefill to ['prefill-0']; allowed"),
        ({"decode": "prefill-0"}, "sets decode to 'prefill-0'; allowed are decode-0"),
        (
            {"fetch_from": "decode-0", "fetched_tokens": 5, "reused_tokens": 5},
            "sets fetch_from to 'decode-0'; allowed are None, prefill-1",
        ),
        ({"fetch_from": ""}, "sets fetch_from to ''"),
        ({"fetch_from": "prefill-0"}, "sets fetch_from to 'prefill-0'; allowed are None, prefill-1"),
        ({"reused_tokens": 2001}, "sets reused_tokens to 2001; allowed are Python ints from 0 to 2000"),
        ({"reused_tokens": -1}, "sets reused_tokens to -1; allowed are Python ints from 0 to 2000"),
        ({"reused_tokens": 1.5}, "sets reused_tokens to 1.5; allowed are Python ints"),
        ({"reused_tokens": True}, "sets reused_tokens to True; allowed are Python ints"),
        ({"reused_tokens": None}, "sets reused_tokens to None; allowed are Python ints"),
        (
            {"reused_tokens": 5, "fetched_tokens": 6, "fetch_from": "prefill-1"},
            "sets fetched_tokens to 6; allowed are Python ints from 0 to 5",
        ),
        ({"reused_tokens": 5, "ssd_tokens": 6}, "sets ssd_tokens to 6; allowed are Python ints from 0 to 5"),
        ({"reused_tokens": 5, "ssd_tokens": 5}, "no worker has blocks of this prompt on an SSD"),
        ({"expected_ttft_s": None}, "sets expected_ttft_s to None; allowed is a number"),
        ({"expected_ttft_s": float("nan")}, "sets expected_ttft_s to nan; allowed is a number"),
        ({"expected_tbt_s": "fast"}, "sets expected_tbt_s to 'fast'; allowed is a number"),
        ({"reason": None}, "sets reason to None; allowed is a str"),
    ],
)
def test_a_placement_that_no_instance_could_carry_out(fields, said):
    """It costs its request, with a reason; no instance gets an order, and nothing stays in flight."""
    run = make_runtime(
        ("prefill-0", "prefill-1", "decode-0"), placement=Places(**fields), reject_policy_errors=True
    )
    arrive(run)
    [refused] = [record for record in run.log if isinstance(record, Rejected)]
    assert (refused.stage, run.jobs, run.coordinator.requests) == ("failed", {}, {})
    assert said in refused.reason


class Returns:
    """An admission policy that returns something else than a decision."""

    def __init__(self, admitted, refused=None):
        self.admitted, self.refused = admitted, refused

    def admit(self, request, proposed, view, **bounds):
        """Whatever a test says, or the placement."""
        del request, view, bounds
        return proposed if self.admitted is None else self.admitted

    def double_check(self, request, decode, **bounds):
        """Whatever a test says."""
        del request, decode, bounds
        return self.refused


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("yes", "returns 'yes'"),
        (Rejection(request_id=0, stage=4, reason="so"), "sets stage to 4; allowed is a str"),
        (Rejection(request_id=0, stage="admission", reason=None), "sets reason to None; allowed is a str"),
    ],
)
def test_an_answer_of_an_admission_policy_that_is_no_decision(returned, said):
    """It costs its request, on arrival and when the KVCache has come; a later request is served."""
    for policy in (Returns(returned), Returns(None, returned)):
        run = make_runtime(PAIR, placement=Places(), admission=policy, reject_policy_errors=True)
        arrive(run)
        if run.jobs:
            prefill(run)
            run.tell(e.KVArrived, attempt=A, start_s=run.now, bytes=9)
        [refused] = [record for record in run.log if isinstance(record, Rejected)]
        assert (refused.stage, run.coordinator.requests) == ("failed", {})
        assert said in refused.reason


def test_a_coupled_instance_decodes_what_it_prefills():
    """Whatever a policy says of decode, also in the log; a fetch is refused, because there is no store."""
    pair = ("coupled-0", "coupled-1")
    for decode_at in ("", "coupled-1"):
        run = make_runtime(
            pair, placement=Places(prefill="coupled-0", decode=decode_at), reject_policy_errors=True
        )
        arrive(run)
        [placed] = [record for record in run.log if isinstance(record, Placed)]
        assert (placed.prefill_instance, placed.decode_instance) == ("coupled-0", "coupled-0")
    fetches = Places(prefill="coupled-0", decode="coupled-0", fetch_from="coupled-1")
    run = make_runtime(pair, placement=fetches, reject_policy_errors=True)
    arrive(run)
    assert "sets fetch_from to 'coupled-1'; allowed are None" in run.log[-1].reason


def test_a_number_of_numpy_is_a_time():
    """A user's policy may compute the TTFT that it expects with numpy."""
    run = make_runtime(PAIR, placement=Places(expected_ttft_s=np.float32(1)), reject_policy_errors=True)
    arrive(run)
    assert set(run.coordinator.requests) == {0}


def moves(run):
    """What moved, in order."""
    return [(record.source, record.destination) for record in run.log if isinstance(record, Moved)]


FETCHED = {"attempt": A, "source": "prefill-0", "instance": "prefill-1", "start_s": 0.0, "bytes": 4}
READ = {"attempt": A, "instance": "prefill-0", "start_s": 0.0, "bytes": 5}
FROM_SSD, FROM_HOLDER = ("prefill-0/ssd", "prefill-0/dram"), ("prefill-0", "prefill-1")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("first", [e.TierRead, e.PrefixFetched])
def test_a_holder_that_reads_from_ssd_and_who_fetches_are_heard_in_any_order(first, known):
    """Both moves are recorded once, also where the holder had not told that the blocks are on its SSD."""
    run = make_runtime(("prefill-0", "prefill-1", "decode-0"), placement=Fetches())
    keys = request(0).block_keys
    run.tell(CacheChanged, instance="prefill-0", added=keys, removed=(), demoted=keys[1:] if known else ())
    arrive(run)
    told = {e.TierRead: READ, e.PrefixFetched: FETCHED}
    for kind in (*sorted(told, key=lambda kind: kind is not first), *told):
        run.tell(kind, **told[kind])
    assert sorted(moves(run)) == sorted([FROM_SSD, FROM_HOLDER])
    assert not run.coordinator.instances.by_name["prefill-0"].prefill.sending


@pytest.mark.parametrize("replaced", [True, False])
def test_a_fetch_is_recorded_though_its_holder_went_down(replaced):
    """The blocks had come before; a process that replaced the holder knows nothing of them."""
    run = make_runtime(("prefill-0", "prefill-1", "decode-0"), placement=Fetches())
    arrive(run)
    run.tell(e.InstanceDown, instance="prefill-0")
    if replaced:
        bring_up(run, "prefill-0")
    run.tell(e.PrefixFetched, **FETCHED)
    assert moves(run) == [FROM_HOLDER]


def test_a_client_that_stops_while_its_request_is_placed_again():
    """The instance may begin the prompt before it is told, which keeps the laws of the log."""
    run = make_runtime(("prefill-0", "decode-0", "decode-1"))
    arrive(run)
    at = run.coordinator.requests[0].placement
    prefill(run)
    decode(run)
    run.now = 4.0
    run.tell(
        DecodeStretch,
        instance=at.decode,
        start_s=3.0,
        steps=1,
        first_step_s=1.0,
        step_growth_s=0.0,
        request_ids=(0,),
    )
    run.tell(e.InstanceDown, instance=at.decode)
    again = run.coordinator.requests[0].attempt
    run.now = 4.1
    run.tell(e.ClientStopped, request_id=0)
    prefill(run, again, end_s=6.0)
    assert isinstance(run.log[-1], Prefilled)
    assert check_log(run.log) == ()


def test_a_prefix_from_the_pool_is_recorded():
    """The pool is no instance, and what comes from it is recorded; what an unknown instance sent is not."""
    for source, recorded in ((c.SHARED_STORE, [(c.SHARED_STORE, "prefill-0", 9)]), ("prefill-9", [])):
        run = make_runtime(PAIR)
        arrive(run)
        run.tell(e.PrefixFetched, attempt=A, source=source, instance="prefill-0", start_s=0.0, bytes=9)
        found = [(r.source, r.destination, r.bytes) for r in run.log if isinstance(r, Moved)]
        assert found == recorded


def test_a_decode_instance_that_is_heard_first_reports_what_the_prefill_instance_did():
    """It reports the fetch, the reading and the prefill again; each is recorded once, whoever is heard first."""
    run = make_runtime(PAIR)
    arrive(run)
    for _ in range(2):
        run.tell(e.PrefixFetched, attempt=A, source=c.SHARED_STORE, instance="prefill-0", start_s=0.0, bytes=9)
        run.tell(e.TierRead, attempt=A, instance="prefill-0", start_s=0.0, bytes=5)
        prefill(run)
    kinds = (Moved, Prefilled)
    assert [getattr(r, "bytes", None) for r in run.log if isinstance(r, kinds)] == [9, 5, None]


def test_kvcache_that_arrives_in_parts():
    """Each part is recorded, until the whole is there; only the last starts the decode."""
    run = make_runtime(PAIR)
    arrive(run)
    part = {"attempt": A, "start_s": 0.0, "bytes": 4}
    assert not run.tell(e.KVArrived, **part, is_last=False)
    assert run.tell(e.KVArrived, **part)
    assert not run.tell(e.KVArrived, **part, is_last=False)
    assert [record.bytes for record in run.log if isinstance(record, Moved)] == [4, 4]


def test_a_limit_of_attempts():
    """After so many attempts a request is given up, with the last reason."""
    run = make_runtime(PAIR, max_attempts=2)
    arrive(run)
    run.tell(e.AttemptFailed, attempt=A, reason="one", retriable=True)
    run.tell(e.AttemptFailed, attempt=c.Attempt(0, 2), reason="two", retriable=True)
    assert run.log[-1].stage == "failed"
    assert run.log[-1].reason == "2 attempts came to nothing, the last because two"


@pytest.mark.parametrize("waits", [False, True])
def test_without_instances(waits):
    """A request that finds no instance is rejected, or waits and is placed when there is one."""
    run = make_runtime(("prefill-0",), wait_for_instances=waits)
    for i in (1, 0):
        arrive(run, i)
    if not waits:
        assert "1 prefill and 0 decode" in run.log[-1].reason
        assert run.log[-1].stage == "capacity"
        return
    assert {state.phase for state in run.coordinator.requests.values()} == {"waiting"}
    bring_up(run, "decode-0")
    placed = [record for record in run.log if isinstance(record, Placed)]
    assert [record.request_id for record in placed] == [0, 1]
    assert placed[0].reason.startswith("placed when decode-0 was up: ")


def test_suspects_are_confirmed_first():
    """A request whose instances may be down is placed when each has answered, or is known to be down."""
    run = make_runtime()
    arrive(run)
    suspects = ("prefill-0", "decode-0", "gone")
    commands = run.tell(e.AttemptFailed, attempt=A, reason="", retriable=True, suspects=suspects)
    assert commands[-1] == e.ConfirmInstances(("decode-0", "prefill-0"))
    assert not run.tell(e.InstanceConfirmed, instance="prefill-0")
    del run.up["decode-0"]
    assert kinds(run.tell(e.InstanceDown, instance="decode-0")) == [e.PrepareDecode, e.RunPrefill]
    assert run.log[-1].decode_instance == "decode-1"
    assert not run.tell(e.InstanceDown, instance="decode-0")


@pytest.mark.parametrize("finishes_step", [False, True])
def test_a_decode_instance_goes_down(finishes_step):
    """Its requests are placed again: those on the way at once, those that decode now or after its step."""
    run = make_runtime(("prefill-0", "decode-0"))
    for i in (1, 0):
        arrive(run, i)
    prefill(run)
    decode(run)
    bring_up(run, "decode-1")
    del run.up["decode-0"]
    run.tell(e.InstanceDown, instance="decode-0", finishes_step=finishes_step)
    again = [record.request_id for record in run.log if isinstance(record, Placed)][2:]
    assert again == ([1] if finishes_step else [0, 1])
    if finishes_step:
        run.tell(e.AttemptFailed, attempt=A, reason="its worker died", retriable=True)
        assert run.log[-1].request_id == 0


def test_a_fetch_and_its_holder():
    """A fetch is a transfer of its holder until its last byte is sent; a prompt goes on without its holder."""
    run = make_runtime(("prefill-0", "prefill-1", "decode-0"), placement=Fetches())
    holder = run.coordinator.instances.by_name["prefill-0"]
    arrive(run)
    assert holder.prefill.view(0, 0.0).outgoing_flows == 1
    run.tell(e.KVSent, attempt=A, instance="prefill-0")
    assert holder.prefill.view(0, 0.0).outgoing_flows == 0
    fetched = {"attempt": A, "source": "prefill-0", "instance": "prefill-1", "start_s": 0.0, "bytes": 4}
    run.tell(e.PrefixFetched, **fetched)
    assert run.log[-1] == Moved(
        at_s=0.0, request_id=0, source="prefill-0", destination="prefill-1", start_s=0.0, bytes=4
    )
    run.tell(e.PrefixFetched, **fetched)
    assert kinds(run.log).count(Moved) == 1
    for _ in range(2):
        run.tell(e.PrefixFetched, **{**fetched, "source": c.SHARED_STORE})
    assert kinds(run.log).count(Moved) == 2
    arrive(run, 1)
    before = len(run.log)
    del run.up["prefill-0"]
    run.tell(e.InstanceDown, instance="prefill-0")
    assert run.log[before:] == []  # its instance computes what does not come
    run.tell(e.PrefixFetched, **{**fetched, "attempt": c.Attempt(1, 1), "bytes": 0})
    prefill(run, c.Attempt(1, 1), instance="prefill-1")
    assert kinds(run.log[before:]) == [Prefilled]


def test_a_prompt_whose_prefix_comes_layer_by_layer_occupies_its_instance_meanwhile():
    """The backlog counts the fetch beside the prefill where layers are computed as they come, else the prefill."""
    for by_layer in (False, True):
        run = make_runtime(("prefill-0", "prefill-1", "decode-0"), placement=Fetches())
        run.estimate.fetches_by_layer = by_layer
        arrive(run)
        compute_s, moving_s = run.estimate.prefill_s(0, run.original[0].input_tokens, 1536), 0.1024
        shown_s = run.estimate.beside_load_s(compute_s, moving_s) if by_layer else compute_s
        view = run.coordinator.instances.by_name["prefill-1"].prefill.view(0, run.now)
        assert view.backlog_s == pytest.approx(shown_s)
        run.check()


def test_a_transfer_ends_with_its_receiver():
    """What was on its way to an instance that went down is sent no more."""
    run = make_runtime(("prefill-0", "decode-0", "decode-1"))
    arrive(run)
    prefill(run)
    instance = run.coordinator.instances.by_name["prefill-0"]
    assert instance.prefill.view(0, 0.0).outgoing_flows == 1
    del run.up["decode-0"]
    run.tell(e.InstanceDown, instance="decode-0")
    assert instance.prefill.view(0, 0.0).outgoing_flows == 0


def test_a_prefix_on_ssd():
    """Blocks on SSD are in the view, are read before they are sent, and each reading is recorded once."""
    run = make_runtime(("prefill-0", "prefill-1", "decode-0"), placement=Fetches())
    made = request(0)
    run.report(CacheChanged(at_s=0.0, instance="prefill-0", added=made.block_keys, removed=()))
    for moves in ({"demoted": made.block_keys[1:]}, {"promoted": made.block_keys[3:]}):
        run.tell(CacheChanged, instance="prefill-0", added=(), removed=(), **moves)
    seen = run.coordinator.view(made, 0.0).prefill
    assert [(one.matched_blocks, one.matched_on_ssd) for one in seen] == [(4, 2), (0, 0)]
    arrive(run)
    holder = run.coordinator.instances.by_name["prefill-0"]
    assert holder.prefill.view(0, 0.0).outgoing_flows == 0
    for _ in range(2):
        run.tell(e.TierRead, attempt=A, instance="prefill-0", start_s=0.0, bytes=5)
    assert holder.prefill.view(0, 0.0).outgoing_flows == 1
    for _ in range(2):
        run.tell(e.TierRead, attempt=A, instance="prefill-1", start_s=0.0, bytes=6)
    moves = [(record.source, record.destination, record.bytes) for record in run.log if isinstance(record, Moved)]
    assert moves == [("prefill-0/ssd", "prefill-0/dram", 5), ("prefill-1/ssd", "prefill-1/dram", 6)]
    run.report(CacheChanged(at_s=0.0, instance="prefill-0", added=(), removed=made.block_keys[2:]))
    assert [one.matched_on_ssd for one in run.coordinator.view(made, 0.0).prefill] == [1, 0]
    run.tell(e.InstanceDown, instance="prefill-0")
    assert not run.report(CacheChanged(at_s=0.0, instance="prefill-0", added=made.block_keys, removed=()))
    assert [(one.name, one.matched_blocks) for one in run.coordinator.view(made, 0.0).prefill] == [
        ("prefill-1", 0)
    ]


def test_backlog():
    """What waits is estimated whole, what runs by what is left of it; a free slot ends that."""
    run = make_runtime(PAIR)
    for i in range(2):
        arrive(run, i)
    instance = run.coordinator.instances.by_name["prefill-0"]
    assert instance.prefill.view(0, 0.0).backlog_s == 4.0
    run.now = 1.0
    run.tell(e.PrefillStarted, attempt=A, instance="prefill-0")
    assert instance.prefill.view(0, 2.0).backlog_s == 3.0
    assert instance.prefill.view(0, 9.0).backlog_s == 2.0
    run.tell(e.PrefillSlotFree, instance="prefill-0")
    assert instance.prefill.view(0, 2.0).backlog_s == 2.0
    run.tell(e.PrefillDropped, attempt=c.Attempt(1, 1), instance="prefill-0")
    assert instance.prefill.view(0, 2.0).backlog_s == 0.0
    assert (instance.prefill.view(0, 2.0).queued_requests, instance.prefill.assigned_requests) == (1, 2)


def test_one_cache_for_all():
    """Instances that share a cache match the same, until the last of them is down."""
    run = make_runtime(("decode-0",))
    for name in ("a", "b"):
        run.tell(e.InstanceUp, instance=name, role="prefill", cache="a")
    made = request(0)
    run.report(CacheChanged(at_s=0.0, instance="a", added=made.block_keys[:3], removed=()))
    assert [one.matched_blocks for one in run.coordinator.view(made, 0.0).prefill] == [3, 3]
    run.tell(e.InstanceDown, instance="a")
    assert [one.matched_blocks for one in run.coordinator.view(made, 0.0).prefill] == [3]
    run.tell(e.InstanceDown, instance="b")
    assert not len(run.coordinator.instances.index)


def test_a_client_that_stops_or_leaves():
    """Who stops has what was shown; who leaves is recorded as the client's rejection; instances are told."""
    run = make_runtime(PAIR)
    for i in range(2):
        arrive(run, i)
    prefill(run)
    decode(run)
    step(run)
    assert kinds(run.tell(e.ClientStopped, request_id=0)) == [e.CancelAttempt, e.CancelAttempt, e.Finish]
    assert run.log[-1] == Finished(at_s=run.now, request_id=0, output_tokens=5)
    assert kinds(run.tell(e.Cancelled, request_id=1)) == [e.CancelAttempt, e.CancelAttempt, e.Reject]
    assert run.log[-1].stage == "client"
    assert not run.tell(e.Cancelled, request_id=1)
    assert not run.tell(e.ClientStopped, request_id=1)
    instance = run.coordinator.instances.by_name["decode-0"]
    assert (instance.decode.contexts, instance.decode.context_tokens) == ({}, 0)


def test_a_instance_may_begin_what_is_cancelled_until_it_is_told():
    """The cluster knows before the instance that a client left; the log of such a run keeps the invariants."""
    run = make_runtime(PAIR)
    arrive(run)
    run.now = 1.0
    run.tell(e.Cancelled, request_id=0)
    prefill(run, end_s=2.5)
    assert kinds(run.log[2:]) == [Rejected, Prefilled]
    assert check_log(run.log) == ()


def chunk(run, computed, context, attempt=A, lasts_s=1.0):
    start_s, run.now = run.now, run.now + lasts_s
    return run.tell(
        e.ChunkDone, attempt=attempt, instance="coupled-0", start_s=start_s, computed_tokens=computed,
        reused_tokens=0, context_tokens=context,
    )  # fmt: skip


def coupled_step(run, steps, ids=(0,)):
    start_s, run.now = run.now, run.now + 1
    run.tell(
        DecodeStretch, instance="coupled-0", start_s=start_s, steps=steps, first_step_s=0.25, step_growth_s=0.1,
        request_ids=ids,
    )  # fmt: skip


def test_a_coupled_instance_does_both_stages():
    """One command places a request; pieces of its prompt are recorded, then it decodes at the same instance."""
    run = make_runtime(("coupled-0",))
    (compute,) = arrive(run)
    assert kinds([compute]) == [e.RunPrefill]
    instance = run.coordinator.instances.by_name["coupled-0"]
    chunk(run, 1200, 1200)
    assert run.coordinator.requests[0].phase == "prefilling"
    assert instance.prefill.view(0, run.now).backlog_s == 2.0  # as long as it was estimated, until it decodes
    chunk(run, 800, 2000)
    run.tell(e.DecodeStarted, attempt=A)
    view = instance.decode.view()
    assert (instance.prefill.view(0, run.now).queued_requests, view.context_tokens) == (0, 2000)
    assert view.decoding[0].starts_s == 2.0
    coupled_step(run, 4)
    assert instance.decode.view().context_tokens == 2004
    assert run.tell(e.RequestDone, attempt=A) == (e.Finish(0),)
    assert kinds(run.log[2:]) == [Prefilled, Prefilled, FirstToken, DecodeStretch, Finished]
    assert run.log[-1].output_tokens == 5


def test_a_preempted_request_keeps_its_tokens():
    """Its KVCache is gone and grows again with each piece, the tokens that its client has are counted once."""
    run = make_runtime(("coupled-0",))
    arrive(run)
    chunk(run, 2000, 2000)
    run.tell(e.DecodeStarted, attempt=A)
    coupled_step(run, 9)
    instance = run.coordinator.instances.by_name["coupled-0"]
    run.tell(e.Preempted, attempt=A, instance="coupled-0", context_tokens=0)
    assert instance.decode.view().context_tokens == 2000  # as when it was placed: it needs as much again
    chunk(run, 2005, 2005)
    assert instance.decode.view().context_tokens == 2005
    run.tell(e.Preempted, attempt=A, instance="coupled-0", context_tokens=2005)
    assert instance.decode.view().context_tokens == 2005
    start_s = run.now
    coupled_step(run, 1)
    run.now = start_s
    chunk(run, 5, 2010)
    assert instance.decode.view().context_tokens == 2010
    run.tell(e.RequestDone, attempt=A)
    assert run.log[-1].output_tokens == 11
    assert (instance.decode.context_tokens, instance.decode.missing) == (0, {})


def test_a_coupled_instance_ends_its_step_and_goes_down():
    """Nothing is placed there any more; each of its requests is placed again when it is reported as failed."""
    run = make_runtime(("coupled-0",))
    for i in range(2):
        arrive(run, i)
    chunk(run, 2000, 2000)
    run.tell(e.DecodeStarted, attempt=A)
    bring_up(run, "coupled-1")
    del run.up["coupled-0"]
    before = len(run.log)
    run.tell(e.InstanceDown, instance="coupled-0", finishes_step=True)
    assert len(run.log) == before
    coupled_step(run, 1)
    for i in range(2):
        run.tell(e.AttemptFailed, attempt=c.Attempt(i, 1), reason="its instance died", retriable=True)
    again = [record for record in run.log if isinstance(record, Placed)][2:]
    assert [record.request_id for record in again] == [0, 1]
    assert {record.prefill_instance for record in again} == {"coupled-1"}
    assert [run.coordinator.requests[i].request.input_tokens for i in range(2)] == [2002, 2000]


def test_an_answer_goes_on_at_a_coupled_instance():
    """Its next token is one of the step that computed its prompt: there is no step of no length."""
    run = make_runtime(("coupled-0",))
    arrive(run)
    chunk(run, 2000, 2000)
    run.tell(e.DecodeStarted, attempt=A)
    coupled_step(run, 4)
    run.tell(e.AttemptFailed, attempt=A, reason="it failed", retriable=True)
    again, start_s = c.Attempt(0, 2), run.now
    run.tell(e.DecodeStarted, attempt=again)
    assert isinstance(run.log[-1], Placed)
    coupled_step(run, 1)
    run.now = start_s
    chunk(run, 2005, 2005, again)
    assert kinds(run.log[-2:]) == [DecodeStretch, Prefilled]
    instance = run.coordinator.instances.by_name["coupled-0"]
    assert instance.decode.view().context_tokens == 2005
    run.report(RunEnded(at_s=run.now, tokens={0: 6}))
    assert run.log[-1].tokens == {0: 6}
    run.tell(e.RequestDone, attempt=again)
    assert run.log[-1].output_tokens == 6


def test_the_cache_of_a_coupled_instance():
    """Whole blocks can be reused, the last token of a prompt never; changes are not logged."""
    run = make_runtime(("coupled-0", "coupled-1"))
    made = request(0)
    before = len(run.log)
    run.report(CacheChanged(at_s=0.0, instance="coupled-1", added=made.block_keys, removed=()))
    assert len(run.log) == before
    assert [one.matched_blocks for one in run.coordinator.view(made, 0.0).prefill] == [0, 3]
    whole = request(1, input_tokens=2048)
    assert [one.matched_blocks for one in run.coordinator.view(whole, 0.0).prefill] == [0, 3]


def test_the_end_of_a_run_counts_what_a_coupled_instance_counts():
    """A request that was placed again and waits there is counted once, in the instance's order."""
    run = make_runtime(("coupled-0",))
    for i in range(2):
        arrive(run, i)
        chunk(run, 2000, 2000, c.Attempt(i, 1))
        run.tell(e.DecodeStarted, attempt=c.Attempt(i, 1))
    run.tell(e.AttemptFailed, attempt=A, reason="it failed", retriable=True)
    run.report(RunEnded(at_s=run.now, tokens={1: 1, 0: 1}))
    assert list(run.log[-1].tokens) == [1, 0]


class Unknown(e.ClusterEvent, frozen=True, kw_only=True):
    """An event that the coordinator does not know."""


class UnknownOfRequest(e.OfRequest, frozen=True, kw_only=True):
    """An unknown event of a request in flight."""


class UnknownOfAttempt(e.OfAttempt, frozen=True, kw_only=True):
    """An unknown event of an attempt."""


class UnknownOfWork(e.OfWork, frozen=True, kw_only=True):
    """An unknown event of the work of an instance."""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Unknown, {}),
        (UnknownOfRequest, {"request_id": 0}),
        (UnknownOfAttempt, {"attempt": A}),
        (UnknownOfWork, {"attempt": A, "instance": "prefill-0"}),
    ],
)
def test_an_unknown_event_is_an_error(kind, fields):
    """It is not ignored, whatever it is about."""
    run = make_runtime(PAIR)
    arrive(run)
    with pytest.raises(AssertionError, match=kind.__name__):
        run.coordinator.on(kind(at_s=run.now, **fields), run.now)
