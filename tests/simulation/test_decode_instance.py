"""The simulated decode instance alone: what it reports, and when, with step times worked by hand."""

from mooncake_lab.cluster import Attempt, AttemptFailed, DecodeStarted, RequestDone
from mooncake_lab.core import DecodeStretch
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import EventLoop
from mooncake_lab.simulation.instances import DecodeInstance

MODEL = LatencyModel(
    name="a second per step, and one per 1,024 tokens of context",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=0.0, per_token_s=0.0, per_token_squared_s=0.0),
    decode=DecodeLatency(1.0, 0.0, 2**-10),
    hybrid=HybridLatency(floor_s=1.0, per_token_s=0.0, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e12),
    dram=LinkLatency(1e12),
)


class World:
    """One instance, and everything that it reports."""

    def __init__(self, capacity=10**6):
        self.loop, self.events = EventLoop(), []
        self.instance = DecodeInstance(self.loop, "d", MODEL, capacity, self.events.append)

    def join(self, i, context=1024, outputs=4, shown=0, computed=True, at_s=0.0):
        def joins(_=None):
            self.instance.join(
                Attempt(i, 1), context_tokens=context, output_tokens=outputs, shown_tokens=shown,
                shows_computed=computed,
            )  # fmt: skip

        self.at(at_s, joins)

    def at(self, at_s, act):
        self.loop.call_later(at_s, act)

    def seen(self, kind):
        return [(event.at_s, event.attempt.request_id) for event in self.events if isinstance(event, kind)]

    def steps(self):
        return [(e.start_s, e.at_s, e.steps, e.request_ids) for e in self.events if isinstance(e, DecodeStretch)]


def lasts(context, steps, requests=1):
    """Seconds of some steps: each request adds a token to the context per step."""
    return sum(1.0 + (context + requests * k) / 1024 for k in range(steps))


def test_one_request_is_one_stretch():
    """The first token comes when it joins, the other three in steps that grow with the context."""
    world = World()
    world.join(0)
    world.loop.run()
    end_s = lasts(1024, 3)
    assert world.seen(DecodeStarted) == [(0.0, 0)]
    assert world.steps() == [(0.0, end_s, 3, (0,))]
    assert world.seen(RequestDone) == [(end_s, 0)]
    (step,) = (event for event in world.events if isinstance(event, DecodeStretch))
    assert (step.first_step_s, step.step_growth_s) == (2.0, 2**-10)


def test_an_answer_of_one_token_takes_no_step():
    """A request whose only token prefill computed is done as it joins; so is one that has all its tokens."""
    world = World()
    world.join(0, outputs=1)
    world.join(1, outputs=5, shown=5, computed=False)
    world.loop.run()
    assert world.seen(RequestDone) == [(0.0, 0), (0.0, 1)]
    assert world.steps() == []


def test_a_failure_ends_with_the_step_under_way():
    """Its tokens are shown; then each request is reported as failed, those in the batch first."""
    world = World(capacity=2500)
    world.join(0, outputs=10)
    world.join(1, context=2000, outputs=10, at_s=0.5)
    world.at(2.5, world.instance.stop)
    world.loop.run()
    end_s = lasts(1024, 2)
    assert world.steps() == [
        (0.0, 2.0, 1, (0,)),
        (2.0, end_s, 1, (0,)),
    ]  # the second request cuts a stretch
    failures = [event for event in world.events if isinstance(event, AttemptFailed)]
    assert [(f.at_s, f.attempt.request_id, f.retriable) for f in failures] == [(end_s, 0, True), (end_s, 1, True)]
    assert world.instance.tokens_shown() == {}


def test_an_idle_instance_that_fails_refuses_what_joins():
    """A request that joins a failed instance is reported as failed at once."""
    world = World()
    world.at(1.0, world.instance.stop)
    world.join(0, at_s=2.0)
    world.loop.run()
    assert world.seen(AttemptFailed) == [(2.0, 0)]
    assert world.seen(DecodeStarted) == []


def test_a_stretch_ends_where_memory_is_full():
    """Six tokens of room are three steps for two requests; then the newer one waits for the older."""
    world = World(capacity=206)
    world.join(0, context=100, outputs=6)
    world.join(1, context=100, outputs=6)
    world.loop.run()
    assert [(steps, ids) for *_, steps, ids in world.steps()] == [(3, (0, 1)), (2, (0,)), (2, (1,))]
    assert [i for _, i in world.seen(DecodeStarted)] == [0, 1]  # the one that comes back does not start anew
    assert [i for _, i in world.seen(RequestDone)] == [0, 1]


def test_a_request_that_outgrows_the_instance_is_rejected():
    """Alone in full memory a request cannot go on, and the next one takes its place."""
    world = World(capacity=102)
    world.join(0, context=100, outputs=9)
    world.join(1, context=50, outputs=2, at_s=0.5)
    world.loop.run()
    (failure,) = (event for event in world.events if isinstance(event, AttemptFailed))
    assert (failure.attempt.request_id, failure.retriable, failure.stage) == (0, False, "capacity")
    assert failure.reason == "its KVCache of 102 tokens cannot grow: d holds 102"
    assert [(steps, ids) for *_, steps, ids in world.steps()] == [(1, (0,)), (1, (0,)), (1, (1,))]
    assert [i for _, i in world.seen(RequestDone)] == [1]
