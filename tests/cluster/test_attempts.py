"""What an attempt leaves behind when it fails, and what the Conductor expects of one under way."""

import pytest
from modelled import make_runtime, request

from mooncake_lab import cluster as c
from mooncake_lab.cluster import events as e
from mooncake_lab.conductor import AdmitAll, LengthPredicting, Placement

A, B = c.Attempt(0, 1), c.Attempt(0, 2)
PAIR = ("prefill-0", "decode-0")


class Expects:
    """Each request on the one pair, with a first token expected in 2.5 s."""

    def place(self, request, view, estimate):
        """Always the same."""
        del view, estimate
        return Placement(
            request_id=request.id, prefill="prefill-0", decode="decode-0", reused_tokens=500,
            expected_ttft_s=2.5, expected_tbt_s=0.0, reason="so",
        )  # fmt: skip


def arrive(run):
    run.original[0] = request(0, at_s=run.now)
    return run.tell(e.RequestArrived, request=run.original[0])


def prefill(run, attempt=A):
    run.tell(e.PrefillStarted, attempt=attempt, instance="prefill-0")
    run.tell(
        e.PrefillDone, attempt=attempt, instance="prefill-0", start_s=run.now, computed_tokens=1, reused_tokens=0
    )


def move(run, attempt=A):
    run.tell(e.KVArrived, attempt=attempt, start_s=run.now, bytes=9)
    run.tell(e.KVLoaded, attempt=attempt)


def fail(run, attempt=A):
    return run.tell(e.AttemptFailed, attempt=attempt, reason="it failed", retriable=True)[-1].request


def test_a_request_on_its_way_is_expected_when_its_placement_says():
    """The view of its decode instance holds the moment of decision plus the expected TTFT, until it joins."""
    run = make_runtime(PAIR, placement=Expects())
    run.now = 10.0
    arrive(run)
    instance = run.coordinator.instances.by_name["decode-0"]
    assert [one.starts_s for one in instance.decode.view().coming] == [12.5]
    run.now = 20.0
    prefill(run)
    move(run)
    view = instance.decode.view()
    assert ([one.starts_s for one in view.coming], [one.starts_s for one in view.decoding]) == ([], [20.0])


class ReadsLengths(AdmitAll):
    """Reads the lengths of answers, and does not declare it."""

    def admit(self, request, proposed, view, **bounds):
        """Everything."""
        del request, bounds
        assert view.lengths
        return proposed


def test_a_policy_that_reads_lengths_has_to_declare_it():
    """Else it would decide on counts that are always empty."""
    run = make_runtime(PAIR, placement=Expects(), admission=ReadsLengths())
    with pytest.raises(LookupError, match=r"ClusterView\.lengths is not counted .* frozenset\({'lengths'}\)"):
        arrive(run)


def test_views_count_answers_where_a_policy_needs_their_lengths():
    """After one answer, a view holds it where the admission policy declares the need."""
    run = make_runtime(PAIR, placement=Expects(), admission=LengthPredicting())
    arrive(run)
    prefill(run)
    move(run)
    run.tell(e.DecodeStarted, attempt=A)
    run.tell(e.RequestDone, attempt=A)
    assert run.coordinator.view(request(1), run.now).lengths.longer[-1][0] == 1


@pytest.mark.parametrize("from_ssd", [False, True])
def test_a_fetch_from_a_shared_store_loads_the_network_while_it_is_sent(from_ssd):
    """The source sends when it has read what is on its SSD, until the prefix has arrived."""
    run = make_runtime((*PAIR, "prefill-1"), placement=Expects())
    arrive(run)
    fetch = {"attempt": A, "instance": "prefill-0", "source": "prefill-1"}

    def outgoing_flows():
        return [one.outgoing_flows for one in run.coordinator.view(request(1), run.now).prefill]

    run.tell(e.FetchStarted, **fetch, from_ssd=from_ssd)
    assert outgoing_flows() == [0, 0 if from_ssd else 1]
    run.tell(e.TierRead, attempt=A, instance="prefill-1", start_s=run.now, bytes=9)
    assert outgoing_flows() == [0, 1]
    run.tell(e.PrefixFetched, **fetch, start_s=run.now, bytes=9)
    assert outgoing_flows() == [0, 0]
    run.tell(e.FetchStarted, **fetch, from_ssd=from_ssd)
    assert outgoing_flows() == [0, 0], "it was reported before"
    run.tell(e.FetchStarted, attempt=A, instance="prefill-0", source="prefill-0")
    assert outgoing_flows() == [1, 0], "but not from there"


def test_a_token_shown_at_prefill_is_not_put_into_the_prompt_before_decode():
    """A failure between prefill and decode computes the same prompt again, and shows no second first token."""
    run = make_runtime(PAIR, first_shown_by="prefill")
    arrive(run)
    prefill(run)
    assert fail(run) is run.original[0]
    prefill(run, B)
    (start,) = run.tell(e.KVArrived, attempt=B, start_s=run.now, bytes=9)
    assert (start.shown_tokens, start.shows_computed) == (1, False)


def test_tokens_are_put_into_the_prompt_once():
    """A second failure without a new token extends nothing; one after it adds only the new tokens."""
    run = make_runtime(PAIR)
    arrive(run)
    prefill(run)
    move(run)
    run.tell(e.DecodeStarted, attempt=A)
    first = fail(run)
    assert first.input_tokens == run.original[0].input_tokens + 1
    prefill(run, B)
    move(run, B)
    assert fail(run, B) is first


def test_a_request_without_instances_is_not_placed_because_another_instance_goes_down():
    """A request waits for the answer of the suspect, and not for news of an instance that it does not need."""
    run = make_runtime((*PAIR, "decode-1"))
    arrive(run)
    run.tell(e.AttemptFailed, attempt=A, reason="it failed", retriable=True, suspects=("prefill-0",))
    assert not run.tell(e.InstanceDown, instance="decode-1")
    assert run.coordinator.requests[0].phase == "unconfirmed"
    assert run.tell(e.InstanceConfirmed, instance="prefill-0")[-1].attempt == B
