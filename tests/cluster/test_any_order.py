"""The coordinator under any order of failures, late events, duplicates and cancellations."""

import random

import pytest
from modelled import RefusesSome, bring_up, make_runtime, request

from mooncake_lab.cluster import events as e
from mooncake_lab.conductor import (
    AdmitAll,
    CacheAware,
    FewestRequests,
    KVCacheCentric,
    LoadBalance,
    Placement,
    Random,
)
from mooncake_lab.core import CacheChanged, DecodeStretch


def arrive(run, rng):
    i = len(run.original)
    made = run.original[i] = request(i, rng.choice([600, 1000, 2000]), rng.randrange(3), run.now)
    run.tell(e.RequestArrived, request=made)


def fire(run, rng):
    if run.timers:
        run.tell(e.TimerFired, request_id=run.timers.pop(rng.randrange(len(run.timers))))


def some_prompt(run, rng):
    """A prompt and its instance, cancelled ones included; none where there is none."""
    jobs = [(name, job) for name in sorted(run.up) for job in run.prompts[name].values()]
    return rng.choice(jobs) if jobs else (None, None)


def start(run, name, job):
    """An instance begins a prompt; those that run together add up."""
    job.started = True
    _, until_s = run.latest.get(name, (None, 0.0))
    run.latest[name] = job.attempt, max(run.now, until_s) + run.estimated_s(job)


def end(run, name, job):
    """A prompt leaves its instance."""
    if run.latest.get(name, (None,))[0] == job.attempt:
        del run.latest[name]
    del run.prompts[name][job.attempt]


def prefill(run, rng):
    """The next thing happens to some prompt on an instance, cancelled ones included."""
    name, job = some_prompt(run, rng)
    if job is None:
        return
    what = {"attempt": job.attempt, "instance": name}
    if not job.fetched:
        job.fetched = True
        source = job.placement.fetch_from
        size = job.placement.fetched_tokens if source in run.up and rng.random() < 0.7 else 0
        run.moved[job.attempt.request_id, source, name] += size > 0
        run.tell(e.PrefixFetched, attempt=job.attempt, source=source, instance=name, start_s=run.now, bytes=size)
    elif name in job.cancelled and not job.started:
        del run.prompts[name][job.attempt]
        run.tell(e.PrefillDropped, **what)
    elif not job.started:
        start(run, name, job)
        run.tell(e.PrefillStarted, **what)
    else:
        end(run, name, job)
        job.prefilled = True
        blocks = set(job.command.request.block_keys) - run.held[name]
        if blocks:
            run.held[name] |= blocks
            run.tell(CacheChanged, instance=name, added=tuple(sorted(blocks)), removed=())
        run.prefilled[job.attempt.request_id] += 1
        run.tell(e.PrefillDone, **what, start_s=run.now, computed_tokens=1, reused_tokens=0)


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
        run.tell(e.KVArrived, attempt=job.attempt, start_s=run.now, bytes=10)
    elif not job.loaded:
        job.loaded = True
        run.tell(e.KVLoaded, attempt=job.attempt)
    else:
        job.decoding = True
        run.tell(e.DecodeStarted, attempt=job.attempt)


def step(run, rng):
    name = rng.choice(["decode-0", "decode-1"])
    jobs = [job for job in run.live().values() if job.decoding and job.placement.decode == name]
    start_s = run.stepped_s[name]
    if name in run.up and jobs and start_s < run.now:
        run.stepped_s[name] = run.now
        steps = rng.randint(1, 4)
        for job in jobs:
            run.steps[job.attempt] += steps
        ids = tuple(job.attempt.request_id for job in jobs)
        gone = (999,) if rng.random() < 0.2 else ()
        run.tell(
            DecodeStretch, instance=name, start_s=start_s, steps=steps, first_step_s=0.1, step_growth_s=0.0,
            request_ids=ids + gone,
        )  # fmt: skip


def compute(run, rng, name=None):
    """A coupled instance ends an iteration: decodes, and pieces of prompts or of what it computes again."""
    name = name or rng.choice([None, *sorted(run.up)])
    if name is None:
        return
    drop(run, rng, name)
    start_s = run.stepped_s[name]
    decodes, pieces = planned(run, rng, name) if start_s < run.now else ([], [])
    if not decodes and not pieces:
        return
    run.stepped_s[name] = run.now
    live = {job.attempt for job in run.live().values()}
    emitting = [job for job, computed in pieces if computed == left_of(run, job) and job.attempt in live]
    resumed = [job for job in emitting if run.tokens[job.attempt.request_id]]
    for job in resumed:
        if not job.decoding:
            started(run, job, name)
    steps = 1 if pieces else rng.randint(1, 4)
    step_once(run, name, start_s, [*decodes, *resumed], steps)
    for job in decodes:
        job.cached += steps
    for job, computed in pieces:
        piece(run, job, computed, name, start_s)
        if job in emitting and job not in resumed:
            job.showed_first = True
            run.tokens[job.attempt.request_id] += 1
            started(run, job, name)
    for job in (*decodes, *emitting):
        assert run.shown(job.attempt.request_id) == run.tokens[job.attempt.request_id]


def drop(run, rng, name):
    """Some prompts whose attempt was given up leave the queue of a coupled instance."""
    for attempt, job in list(run.prompts[name].items()):
        if name in job.cancelled and rng.random() < 0.5:
            del run.prompts[name][attempt]
            run.tell(e.PrefillDropped, attempt=attempt, instance=name)


def left_of(run, job):
    """Tokens that exist of a request and are not computed at its coupled instance."""
    return job.command.request.input_tokens + run.steps[job.attempt] + job.showed_first - job.cached


def planned(run, rng, name):
    """Some of the requests that decode at a coupled instance, and pieces of those that have more to compute."""
    here = [job for job in run.live().values() if job.placement.prefill == name]
    here += [job for job in run.prompts[name].values() if job not in here]  # cancelled ones
    here = [job for job in here if left_of(run, job) and rng.random() < 0.7]
    decodes = [job for job in here if job.decoding and left_of(run, job) == 1]
    pieces = []
    for job in here:
        if job not in decodes:
            left = left_of(run, job)
            pieces.append((job, left if rng.random() < 0.5 else rng.randint(1, left)))
    return decodes, pieces


def started(run, job, name):
    """A request shows its first token at this instance."""
    job.decoding = job.loaded = True
    del run.prompts[name][job.attempt]
    run.tell(e.DecodeStarted, attempt=job.attempt)


def step_once(run, name, start_s, jobs, steps):
    """Each of these requests gets so many tokens."""
    if not jobs:
        return
    for job in jobs:
        run.steps[job.attempt] += steps
        run.tokens[job.attempt.request_id] += steps
    run.tell(
        DecodeStretch, instance=name, start_s=start_s, steps=steps, first_step_s=0.1, step_growth_s=0.0,
        request_ids=tuple(job.attempt.request_id for job in jobs),
    )  # fmt: skip


def piece(run, job, computed, name, start_s):
    """A piece of a prompt is computed; what is complete can be shared."""
    job.cached += computed
    run.prefilled[job.attempt.request_id] += 1
    run.tell(
        e.ChunkDone, attempt=job.attempt, instance=name, start_s=start_s, computed_tokens=computed,
        reused_tokens=0, context_tokens=job.cached,
    )  # fmt: skip
    blocks = set(job.command.request.block_keys) - run.held[name]
    if blocks and job.cached >= job.command.request.input_tokens:
        run.held[name] |= blocks
        before = len(run.log)
        run.tell(CacheChanged, instance=name, added=tuple(sorted(blocks)), removed=())
        assert len(run.log) == before


def preempt(run, rng):
    """A coupled instance takes a request out of its batch; some of its KVCache may be kept."""
    job = some(run, rng)
    if job is not None and job.cached:
        job.cached = 0 if rng.random() < 0.7 else rng.randint(0, job.cached)
        name = job.placement.prefill
        run.tell(e.Preempted, attempt=job.attempt, instance=name, context_tokens=job.cached)


def some(run, rng):
    jobs = list(run.live().values())
    return rng.choice(jobs) if jobs else None


def done(run, rng):
    job = some(run, rng)
    if job is not None and job.decoding:
        run.tell(e.RequestDone, attempt=job.attempt)


def fail(run, rng):
    job = some(run, rng)
    if job is not None:
        suspects = (job.placement.prefill, job.placement.decode) if rng.random() < 0.5 else ()
        retriable = rng.random() < 0.7
        run.tell(e.AttemptFailed, attempt=job.attempt, reason="trouble", retriable=retriable, suspects=suspects)


def leave(run, rng):
    if run.original:
        kind = rng.choice([e.Cancelled, e.ClientStopped])
        run.tell(kind, request_id=rng.randrange(len(run.original)))


def down(run, rng):
    name = rng.choice(sorted(run.up)) if run.up else None
    if name is not None:
        finishes = rng.random() < 0.5
        coupled = run.up[name] == "coupled"
        jobs = [job for job in run.live().values() if job.placement.decode == name and (job.loaded or coupled)]
        del run.up[name]
        run.asked = [one for one in run.asked if one != name]
        run.tell(e.InstanceDown, instance=name, finishes_step=finishes)
        if finishes:
            if coupled:
                run.now += 0.3
                compute(run, rng, name)
            for job in jobs:
                run.tell(e.AttemptFailed, attempt=job.attempt, reason=f"{name} died", retriable=True)


def up(run, rng):
    gone = [name for name in run.names if name not in run.up]
    if gone:
        bring_up(run, rng.choice(gone))


def confirm(run, rng):
    if run.asked:
        run.tell(e.InstanceConfirmed, instance=run.asked.pop(rng.randrange(len(run.asked))))


def again(run, rng):
    """Something that was reported before is reported once more."""
    repeated = [
        event for event in run.events if not isinstance(event, e.InstanceUp | e.InstanceDown | CacheChanged)
    ]
    if repeated:
        event = rng.choice(repeated)
        if isinstance(event, e.RequestArrived) and event.request.id not in run.coordinator.requests:
            return  # a new request
        if isinstance(event, e.TimerFired) and event.request_id in run.timers:
            return  # not a repetition
        if isinstance(event, e.Cancelled | e.ClientStopped | e.InstanceConfirmed):
            return  # they mean the same at any time
        if isinstance(event, CHANGE_NOTHING):
            before = len(run.log)
            assert not run.report(event)
            assert len(run.log) == before
            return
        run.report(event)


CHANGE_NOTHING = (
    e.PrefillStarted,
    e.PrefillDone,
    e.PrefillDropped,
    e.ChunkDone,
    e.Preempted,
    e.TimerFired,
    e.PrefixFetched,
)
"""Events of which a repetition leads to no command and no record."""
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
        wait_for_instances=waits,
        schedule_s=rng.choice([0.0, 0.1]),
        max_attempts=rng.choice([None, 3]),
        max_inflight_requests=rng.choice([None, 6]),
    )
    for _ in range(150):
        run.now += rng.choice([0.0, 0.3, 1.0])
        rng.choices(ACTIONS, WEIGHTS)[0](run, rng)
        run.check()
    run.check_log()


class Fetches:
    """Every second request has a prefix from another instance; a function of request and view alone."""

    def place(self, request, view, estimate):
        """By the request's number and length."""
        del estimate
        n = request.id + request.input_tokens
        prefill, decode = view.prefill[n % len(view.prefill)], view.decode[n % len(view.decode)]
        holder = view.prefill[(n + 1) % len(view.prefill)]
        fetched = 512 if holder is not prefill and n % 3 else 0
        return Placement(
            request_id=request.id, prefill=prefill.name, decode=decode.name, reused_tokens=fetched,
            fetched_tokens=fetched, fetch_from=holder.name if fetched else None, expected_ttft_s=1.0,
            expected_tbt_s=0.0, reason="so",
        )  # fmt: skip


def prefill_and_fetch(run, rng):
    """As `prefill`, with prompts that are dropped while they run, and decode instances that are heard first."""
    name, job = some_prompt(run, rng)
    if job is None:
        return
    what = {"attempt": job.attempt, "instance": name}
    if not job.fetched:
        job.fetched, source = True, job.placement.fetch_from
        size = 512 if rng.random() < 0.7 else 0
        run.moved[job.attempt.request_id, source, name] += size > 0
        run.flows.pop((source, job.attempt), None)
        run.tell(e.PrefixFetched, **what, source=source, start_s=run.now, bytes=size)
    elif not job.started and name not in job.cancelled and rng.random() < 0.8:
        start(run, name, job)
        run.tell(e.PrefillStarted, **what)
    else:
        end(run, name, job)
        if name in job.cancelled and rng.random() < 0.5:
            run.tell(e.PrefillDropped, **what)
            return
        job.prefilled = True
        run.prefilled[job.attempt.request_id] += 1
        run.tell(e.PrefillDone, **what, start_s=run.now, computed_tokens=1, reused_tokens=0)
        if not job.started:  # the beginning is heard late, and changes nothing
            run.tell(e.PrefillStarted, **what)


def read(run, rng):
    """The holder of a prefix has read from its SSD; it is heard before or after the fetch."""
    jobs = [job for job in run.live().values() if job.placement.fetch_from in run.up and not job.read]
    if jobs:
        job = rng.choice(jobs)
        job.read, name = True, job.placement.fetch_from
        run.moved[job.attempt.request_id, f"{name}/ssd", f"{name}/dram"] += 1
        run.tell(e.TierRead, attempt=job.attempt, instance=name, start_s=run.now, bytes=5)


def check_flows(run):
    """What each instance is believed to send is what was placed and has not been reported as over."""
    table, live = run.coordinator.instances, run.live().values()
    for name in run.up:
        instance = table.by_name[name]
        streams = {
            job.attempt
            for job in live
            if job.placement.prefill == name and job.prefilled and not (job.arrived or job.loaded or job.decoding)
        }
        fetches = {
            attempt
            for (source, attempt), (holder, to, fetcher) in run.flows.items()
            if source == name and table.by_name[name] is holder and table.by_name[to] is fetcher and fetcher.up
        }
        assert (
            instance.prefill.sending.keys() | instance.prefill.reading.keys() | instance.prefill.arriving.keys()
            == streams | fetches
        )


@pytest.mark.parametrize("first_shown_by", ["decode", "prefill"])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_fetches_in_any_order(seed, waits, first_shown_by):
    """Every move is recorded once, and no flow is left over, whoever is heard first or comes up again."""
    rng = random.Random(seed)
    run = make_runtime(
        placement=Fetches(),
        admission=rng.choice([AdmitAll(), RefusesSome()]),
        first_shown_by=first_shown_by,
        wait_for_instances=waits,
        schedule_s=rng.choice([0.0, 0.1]),
        max_attempts=rng.choice([None, 3]),
    )
    run.flows, begin = {}, run.run_prefill

    def run_prefill(command):
        begin(command)
        source, to, table = command.placement.fetch_from, command.placement.prefill, run.coordinator.instances
        if source is not None:
            run.flows[source, command.attempt] = table.by_name[source], to, table.by_name[to]

    run.actions[e.RunPrefill] = run_prefill
    actions = [*(prefill_and_fetch if one is prefill else one for one in ACTIONS), read]
    for _ in range(150):
        run.now += rng.choice([0.0, 0.3, 1.0])
        rng.choices(actions, [*WEIGHTS, 6])[0](run, rng)
        run.check()
        check_flows(run)
    run.check_log()


COUPLED = ("coupled-0", "coupled-1", "coupled-2")
COUPLED_ACTIONS = [arrive, fire, compute, preempt, done, fail, leave, down, up, confirm, again]
COUPLED_WEIGHTS = [4, 6, 24, 3, 3, 1, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_laws_hold_in_any_order_of_coupled_instances(seed, waits):
    """The same of coupled instances, with chunks, preemptions and steps that end after a failure."""
    rng = random.Random(seed)
    run = make_runtime(
        COUPLED,
        placement=rng.choice([CacheAware(), LoadBalance(), Random(), FewestRequests()]),
        wait_for_instances=waits,
        schedule_s=rng.choice([0.0, 0.1]),
        max_attempts=rng.choice([None, 3]),
        max_inflight_requests=rng.choice([None, 6]),
    )
    for _ in range(150):
        run.now += rng.choice([0.0, 0.3, 1.0])
        rng.choices(COUPLED_ACTIONS, COUPLED_WEIGHTS)[0](run, rng)
        run.check()
    run.check_log()
