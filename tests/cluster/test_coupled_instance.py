"""What the coordinator makes of the events of a coupled instance: each once, and only of one that is up."""

from modelled import bring_up, make_runtime, request

from mooncake_lab import cluster as c
from mooncake_lab.cluster import events as e
from mooncake_lab.core import Prefilled

A = c.Attempt(0, 1)


def arrive(run):
    run.original[0] = request(0, at_s=run.now)
    run.tell(e.RequestArrived, request=run.original[0])


def chunk(run, *, instance="coupled-0", start_s=0.0, computed=500, context=500, attempt=A):
    run.tell(
        e.ChunkDone, attempt=attempt, instance=instance, start_s=start_s, computed_tokens=computed,
        reused_tokens=0, context_tokens=context,
    )  # fmt: skip


def prefilled(run):
    return [(record.at_s, record.computed_tokens) for record in run.log if isinstance(record, Prefilled)]


def test_each_chunk_is_recorded_once():
    """A chunk that is reported again, of an unknown instance or of an earlier iteration changes nothing."""
    run = make_runtime(("coupled-0",))
    arrive(run)
    run.now = 1.0
    chunk(run)
    assert run.coordinator.requests[0].phase == "prefilling"
    chunk(run)
    chunk(run, instance="coupled-9")
    run.now = 2.0
    chunk(run, start_s=1.0, computed=1500, context=2000)
    run.now = 1.5
    chunk(run, start_s=1.0)
    assert prefilled(run) == [(1.0, 500), (2.0, 1500)]


def test_a_chunk_from_before_a_instance_came_up_is_not_recorded():
    """An instance that replaces another of its name has computed nothing of what began before."""
    run = make_runtime(("coupled-0",))
    arrive(run)
    run.now = 1.0
    run.tell(e.InstanceDown, instance="coupled-0")
    run.now = 2.0
    bring_up(run, "coupled-0")
    run.now = 3.0
    chunk(run, start_s=1.5)
    assert prefilled(run) == []
    chunk(run, start_s=2.5)
    assert prefilled(run) == [(3.0, 500)]


def test_a_preempted_prompt_is_queued_again():
    """It waits until its next chunk; a report of an unknown instance, or a second one, changes nothing."""
    run = make_runtime(("coupled-0",))
    arrive(run)
    state = run.coordinator.requests[0]
    run.now = 1.0
    chunk(run)
    run.tell(e.Preempted, attempt=A, instance="coupled-9", context_tokens=0)
    assert state.phase == "prefilling"
    run.now = 2.0
    run.tell(e.Preempted, attempt=A, instance="coupled-0", context_tokens=0)
    assert state.phase == "queued"
    run.now = 3.0
    chunk(run, start_s=2.0)
    run.now = 2.0
    run.tell(e.Preempted, attempt=A, instance="coupled-0", context_tokens=0)
    assert state.phase == "prefilling"
