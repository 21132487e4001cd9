"""What an attempt leaves behind when it fails, and what the Conductor expects of one under way."""

from modelled import make_runtime, request

from mooncake_lab import cluster as c

A, B = c.Attempt(0, 1), c.Attempt(0, 2)
PAIR = ("prefill-0", "decode-0")


def arrive(run):
    run.original[0] = request(0, at_s=run.now)
    return run.tell(c.RequestArrived, request=run.original[0])


def prefill(run, attempt=A):
    run.tell(c.PrefillStarted, attempt=attempt, worker="prefill-0")
    run.tell(
        c.PrefillDone, attempt=attempt, worker="prefill-0", start_s=run.now, computed_tokens=1, reused_tokens=0
    )


def move(run, attempt=A):
    run.tell(c.KVArrived, attempt=attempt, start_s=run.now, bytes=9)
    run.tell(c.KVLoaded, attempt=attempt)


def fail(run, attempt=A):
    return run.tell(c.AttemptFailed, attempt=attempt, reason="it failed", retriable=True)[-1].request


def test_tokens_are_put_into_the_prompt_once():
    """A second failure without a new token extends nothing; one after it adds only the new tokens."""
    run = make_runtime(PAIR)
    arrive(run)
    prefill(run)
    move(run)
    run.tell(c.DecodeStarted, attempt=A)
    first = fail(run)
    assert first.input_tokens == run.original[0].input_tokens + 1
    prefill(run, B)
    move(run, B)
    assert fail(run, B) is first


def test_a_request_without_workers_is_not_placed_because_another_worker_goes_down():
    """A request waits for the answer of the suspect, and not for news of a worker that it does not need."""
    run = make_runtime((*PAIR, "decode-1"))
    arrive(run)
    run.tell(c.AttemptFailed, attempt=A, reason="it failed", retriable=True, suspects=("prefill-0",))
    assert not run.tell(c.WorkerDown, worker="decode-1")
    assert run.coordinator.requests[0].phase == "unconfirmed"
    assert run.tell(c.WorkerConfirmed, worker="prefill-0")[-1].attempt == B
