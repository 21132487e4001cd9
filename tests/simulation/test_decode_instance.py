"""The simulated decode instance alone: what it reports, and when, with step times worked by hand."""

from mooncake_lab.cluster import Attempt, AttemptFailed, DecodeStarted, RequestDone, StepDone
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import DecodeInstance, EventLoop

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
        return [(e.start_s, e.at_s, e.steps, e.request_ids) for e in self.events if isinstance(e, StepDone)]


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
    (step,) = (event for event in world.events if isinstance(event, StepDone))
    assert (step.first_step_s, step.step_growth_s) == (2.0, 2**-10)


def test_an_answer_of_one_token_takes_no_step():
    """A request whose only token prefill computed is done as it joins; so is one that has all its tokens."""
    world = World()
    world.join(0, outputs=1)
    world.join(1, outputs=5, shown=5, computed=False)
    world.loop.run()
    assert world.seen(RequestDone) == [(0.0, 0), (0.0, 1)]
    assert world.steps() == []


def test_tokens_shown_before_are_not_generated_again():
    """Of six tokens four were shown; whether prefill computed the next one decides between one and two steps."""
    for computed, steps in ((True, 1), (False, 2)):
        world = World()
        world.join(0, outputs=6, shown=4, computed=computed)
        world.loop.run()
        assert world.steps() == [(0.0, lasts(1024, steps), steps, (0,))]


def test_a_request_joins_at_the_end_of_a_step():
    """The step under way ends first; from then on both are in one batch until the first is done."""
    world = World()
    world.join(0, outputs=5)
    world.join(1, outputs=3, context=512, at_s=2.5)
    world.loop.run()
    joined_s = lasts(1024, 2)
    both_s = lasts(1026 + 512, 2, requests=2)
    assert world.seen(DecodeStarted) == [(0.0, 0), (joined_s, 1)]
    assert world.steps() == [(0.0, joined_s, 2, (0,)), (joined_s, joined_s + both_s, 2, (0, 1))]
    assert world.seen(RequestDone) == [(joined_s + both_s, 0), (joined_s + both_s, 1)]


def test_tokens_shown_at_any_moment():
    """Shown are the tokens of finished steps, also of a stretch under way, and those that came with a request."""
    world = World(capacity=3000)
    world.join(0, outputs=10)
    world.join(1, context=2000, outputs=9, shown=3, at_s=0.5)  # does not fit beside the first
    shown = []
    for at_s in (0.25, 2.0, 2.1, 4.5):
        world.at(at_s, lambda: shown.append(world.instance.tokens_shown()))
    world.loop.run(5.0)
    assert shown == [{0: 1}, {0: 1, 1: 3}, {0: 2, 1: 3}, {0: 3, 1: 3}]
    assert World().instance.tokens_shown() == {}


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


def test_a_failure_in_the_last_step_of_a_stretch_changes_nothing_before_it():
    """The stretch ends as it would have ended, and a request that is done then is done."""
    world = World()
    world.join(0, outputs=3)
    world.at(3.0, world.instance.stop)
    world.loop.run()
    assert world.steps() == [(0.0, lasts(1024, 2), 2, (0,))]
    assert world.seen(RequestDone) == [(lasts(1024, 2), 0)]
    assert world.seen(AttemptFailed) == []


def test_an_idle_instance_that_fails_refuses_what_joins():
    """A request that joins a failed instance is reported as failed at once."""
    world = World()
    world.at(1.0, world.instance.stop)
    world.join(0, at_s=2.0)
    world.loop.run()
    assert world.seen(AttemptFailed) == [(2.0, 0)]
    assert world.seen(DecodeStarted) == []


def test_requests_wait_until_their_context_and_a_token_for_each_fit():
    """Two contexts of 100 and their next tokens fit into 202 tokens, and not into 201."""
    for capacity, together in ((202, True), (201, False)):
        world = World(capacity=capacity)
        world.join(0, context=100, outputs=2)
        world.join(1, context=100, outputs=2)
        world.loop.run()
        assert ([ids for *_, ids in world.steps()] == [(0, 1)]) is together
        assert [i for _, i in world.seen(RequestDone)] == [0, 1]


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


def test_a_run_that_is_cut_closes_its_stretch_before_the_horizon():
    """The last stretch holds the steps that end before the horizon, and the next begins with the one after it."""
    world = World()
    world.instance.horizon_s = 5.0
    world.join(0, outputs=100)
    world.loop.run(5.0)
    assert world.steps() == [(0.0, lasts(1024, 2), 2, (0,))]
    assert world.instance.tokens_shown() == {0: 3}


def assert_paces(world, contexts):
    """Each stretch has the step time of the contexts that its requests have then."""
    contexts = dict(contexts)
    for event in world.events:
        if isinstance(event, StepDone):
            assert event.first_step_s == 1.0 + sum(contexts[i] for i in event.request_ids) / 1024
            for i in event.request_ids:
                contexts[i] += event.steps


def test_a_request_that_leaves_takes_its_context_with_it():
    """A request joins late and is done early; the steps of the other are then those of its own context."""
    world = World()
    world.join(0, outputs=12)
    world.join(1, context=512, outputs=3, at_s=2.5)
    shown = []
    world.at(lasts(1024, 2) + 4.0, lambda: shown.append(world.instance.tokens_shown()))
    world.loop.run()
    assert [(steps, ids) for *_, steps, ids in world.steps()] == [(2, (0,)), (2, (0, 1)), (7, (0,))]
    assert shown == [{0: 4, 1: 2}]
    assert_paces(world, {0: 1024, 1: 512})


def test_a_request_that_was_swapped_out_comes_back_with_its_tokens():
    """A late request is swapped out when memory is full, and goes on with the context that it had."""
    world = World(capacity=210)
    world.join(0, context=100, outputs=7)
    world.join(1, context=100, outputs=8, at_s=1.5)
    world.loop.run()
    assert [(steps, ids) for *_, steps, ids in world.steps()] == [(2, (0,)), (4, (0, 1)), (3, (1,))]
    assert [i for _, i in world.seen(RequestDone)] == [0, 1]
    assert_paces(world, {0: 100, 1: 100})
    smaller = World(capacity=206)
    smaller.join(0, context=100, outputs=9)
    smaller.join(1, context=100, outputs=8, at_s=1.5)
    smaller.loop.run()
    assert [(steps, ids) for *_, steps, ids in smaller.steps()] == [(2, (0,)), (2, (0, 1)), (4, (0,)), (5, (1,))]
    assert_paces(smaller, {0: 100, 1: 100})


def test_a_request_that_cannot_join_cuts_no_stretch():
    """Where one waits for memory already, another that comes changes nothing until the batch does."""
    world = World(capacity=201)
    world.join(0, context=100, outputs=5)
    world.join(1, context=100, outputs=2)
    world.join(2, context=100, outputs=2, at_s=0.5)
    world.loop.run()
    assert [(steps, ids) for *_, steps, ids in world.steps()] == [(4, (0,)), (1, (1,)), (1, (2,))]
    first_s = lasts(100, 4)
    assert world.seen(DecodeStarted) == [(0.0, 0), (first_s, 1), (first_s + lasts(100, 1), 2)]
