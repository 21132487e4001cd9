"""The coordinator under any order of failures, late events, duplicates and cancellations."""

import random

import pytest
from modelled import RefusesSome, bring_up, make_runtime, request

from mooncake_lab import cluster as c
from mooncake_lab.conductor import AdmitAll, KVCacheCentric, LoadBalance, Random
from mooncake_lab.core import CacheChanged

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def arrive(run, rng):
    i = len(run.original)
    made = run.original[i] = request(i, rng.choice([600, 1000, 2000]), rng.randrange(3), run.now)
    run.tell(c.RequestArrived, request=made)


def fire(run, rng):
    if run.timers:
        run.tell(c.TimerFired, request_id=run.timers.pop(rng.randrange(len(run.timers))))


def prefill(run, rng):
    """The next thing happens to some prompt on a worker, cancelled ones included."""
    jobs = [(name, job) for name in sorted(run.up) for job in run.prompts[name].values()]
    if not jobs:
        return
    name, job = rng.choice(jobs)
    what = {"attempt": job.attempt, "worker": name}
    if not job.fetched:
        job.fetched = True
        source = job.placement.fetch_from
        size = job.placement.fetched_tokens if source in run.up and rng.random() < 0.7 else 0
        run.moved[job.attempt.request_id, source, name] += size > 0
        run.tell(c.PrefixFetched, attempt=job.attempt, source=source, worker=name, start_s=run.now, bytes=size)
    elif name in job.cancelled and not job.started:
        del run.prompts[name][job.attempt]
        run.tell(c.PrefillDropped, **what)
    elif not job.started:
        job.started = True
        estimated_s = run.estimate.prefill_s(*run.estimated(job))
        run.latest[name] = job.attempt, run.now + estimated_s
        run.tell(c.PrefillStarted, **what)
    else:
        if run.latest.get(name, (None,))[0] == job.attempt:
            del run.latest[name]
        del run.prompts[name][job.attempt]
        job.prefilled = True
        blocks = set(job.command.request.block_keys) - run.held[name]
        if blocks:
            run.held[name] |= blocks
            run.tell(CacheChanged, instance=name, added=tuple(sorted(blocks)))
        run.prefilled[job.attempt.request_id] += 1
        run.tell(c.PrefillDone, **what, start_s=run.now, computed_tokens=1, reused_tokens=0)


def on_the_way(run, rng):
    """The KVCache of some prompt goes one step further, or it decodes."""
    jobs = [job for job in run.live().values() if job.prefilled and job.placement.decode in run.up]
    jobs = [job for job in jobs if not job.decoding]
    if not jobs:
        return
    job = rng.choice(jobs)
    if not job.arrived:
        job.arrived = True
        run.moved[job.attempt.request_id, job.placement.prefill, job.placement.decode] += 1
        run.tell(c.KVArrived, attempt=job.attempt, start_s=run.now, bytes=10)
    elif not job.loaded:
        job.loaded = True
        run.tell(c.KVLoaded, attempt=job.attempt)
    else:
        job.decoding = True
        run.tell(c.DecodeStarted, attempt=job.attempt)


def step(run, rng):
    name = rng.choice(["decode-0", "decode-1"])
    jobs = [job for job in run.live().values() if job.decoding and job.placement.decode == name]
    start_s = run.stepped_s.get(name, 0.0)
    if name in run.up and jobs and start_s < run.now:
        run.stepped_s[name] = run.now
        steps = rng.randint(1, 4)
        for job in jobs:
            run.steps[job.attempt] += steps
        ids = tuple(job.attempt.request_id for job in jobs)
        gone = (999,) if rng.random() < 0.2 else ()
        run.tell(
            c.StepDone, worker=name, start_s=start_s, steps=steps, first_step_s=0.1, step_growth_s=0.0,
            request_ids=ids + gone,
        )  # fmt: skip


def some(run, rng):
    jobs = list(run.live().values())
    return rng.choice(jobs) if jobs else None


def done(run, rng):
    job = some(run, rng)
    if job is not None and job.decoding:
        run.tell(c.RequestDone, attempt=job.attempt)


def fail(run, rng):
    job = some(run, rng)
    if job is not None:
        suspects = (job.placement.prefill, job.placement.decode) if rng.random() < 0.5 else ()
        retriable = rng.random() < 0.7
        run.tell(c.AttemptFailed, attempt=job.attempt, reason="trouble", retriable=retriable, suspects=suspects)


def leave(run, rng):
    if run.original:
        kind = rng.choice([c.Cancelled, c.ClientStopped])
        run.tell(kind, request_id=rng.randrange(len(run.original)))


def down(run, rng):
    name = rng.choice(sorted(run.up)) if run.up else None
    if name is not None:
        finishes = rng.random() < 0.5
        jobs = [job for job in run.live().values() if job.loaded and job.placement.decode == name]
        del run.up[name]
        run.asked = [one for one in run.asked if one != name]
        run.tell(c.WorkerDown, worker=name, finishes_step=finishes)
        if finishes:
            for job in jobs:
                run.tell(c.AttemptFailed, attempt=job.attempt, reason=f"{name} died", retriable=True)


def up(run, rng):
    gone = [name for name in WORKERS if name not in run.up]
    if gone:
        bring_up(run, rng.choice(gone))


def confirm(run, rng):
    if run.asked:
        run.tell(c.WorkerConfirmed, worker=run.asked.pop(rng.randrange(len(run.asked))))


def again(run, rng):
    """Something that was reported before is reported once more."""
    repeated = [event for event in run.events if not isinstance(event, c.WorkerUp | c.WorkerDown | CacheChanged)]
    if repeated:
        event = rng.choice(repeated)
        if isinstance(event, c.RequestArrived) and event.request.id not in run.coordinator.requests:
            return  # a new request
        if isinstance(event, c.TimerFired) and event.request_id in run.timers:
            return  # not a repetition
        if isinstance(event, c.Cancelled | c.ClientStopped | c.WorkerConfirmed):
            return  # they mean the same at any time
        if isinstance(event, c.PrefillStarted | c.PrefillDone | c.PrefillDropped | c.TimerFired | c.PrefixFetched):
            before = len(run.log)
            assert not run.report(event)
            assert len(run.log) == before
            return
        run.report(event)


ACTIONS = [
    arrive,
    fire,
    prefill,
    prefill,
    on_the_way,
    on_the_way,
    step,
    done,
    fail,
    leave,
    down,
    up,
    confirm,
    again,
]
WEIGHTS = [4, 6, 8, 8, 8, 8, 6, 2, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("first_shown_by", ["decode", "prefill"])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_laws_hold_in_any_order(seed, waits, first_shown_by):
    """I1, I2, I7; beliefs equal a recount; no token is shown twice or left out."""
    rng = random.Random(seed)
    run = make_runtime(
        placement=rng.choice([KVCacheCentric(1.0), LoadBalance(), Random()]),
        admission=rng.choice([AdmitAll(), RefusesSome()]),
        first_shown_by=first_shown_by,
        wait_for_workers=waits,
        schedule_s=rng.choice([0.0, 0.1]),
        max_attempts=rng.choice([None, 3]),
        max_inflight_requests=rng.choice([None, 6]),
    )
    for _ in range(150):
        run.now += rng.choice([0.0, 0.3, 1.0])
        rng.choices(ACTIONS, WEIGHTS)[0](run, rng)
        run.check()
    run.check_log()
