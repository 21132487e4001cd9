"""The simulated coupled instance alone: every iteration lasts a second, and beginning a prompt a half more."""

import pytest

from mooncake_lab.batching import VLLM
from mooncake_lab.cluster import (
    Attempt,
    AttemptFailed,
    ChunkDone,
    DecodeStarted,
    PrefillDropped,
    RequestDone,
)
from mooncake_lab.core import CacheChanged, DecodeStretch, Request, TracedRequest
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import CoupledPool, EventLoop
from mooncake_lab.simulation.coupled import CoupledInstance

MODEL = LatencyModel(
    name="a second per iteration",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=0.5, per_token_s=0.0, per_token_squared_s=0.0),
    decode=DecodeLatency(1.0, 0.0, 0.0),
    hybrid=HybridLatency(floor_s=1.0, per_token_s=0.0, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e12),
    dram=LinkLatency(1e12),
)
BLOCK = 4


class World:
    """One instance, and everything that it reports."""

    def __init__(self, policy=None, *, blocks=100, batch_tokens=64, caching=False):
        self.loop, self.events = EventLoop(), []
        pool = CoupledPool(
            batching=policy or VLLM(watermark=0.0), device_tokens=blocks * BLOCK, memory_block_tokens=BLOCK,
            max_batch_tokens=batch_tokens, max_requests=8, prefix_caching=caching,
        )  # fmt: skip
        self.instance = CoupledInstance(self.loop, "c", MODEL, pool, BLOCK, self.events.append)

    def submit(self, i, prompt=10, outputs=4, at_s=0.0, shown=0, keys=None):
        own = tuple(100 * i + k for k in range(-(-prompt // BLOCK)))
        request = Request(
            id=i, arrival_s=at_s, input_tokens=prompt, block_keys=keys or own, block_size_tokens=BLOCK
        )
        traced = TracedRequest(request, outputs)
        self.at(at_s, lambda: self.instance.submit(Attempt(i, 1), traced, shown_tokens=shown))

    def at(self, at_s, act):
        self.loop.call_later(at_s, act)

    def seen(self, kind):
        return [(event.at_s, event.attempt.request_id) for event in self.events if isinstance(event, kind)]

    def steps(self):
        return [(e.start_s, e.at_s, e.steps, e.request_ids) for e in self.events if isinstance(e, DecodeStretch)]

    def chunks(self):
        return [
            (e.start_s, e.at_s, e.attempt.request_id, e.computed_tokens, e.reused_tokens, e.context_tokens)
            for e in self.events
            if isinstance(e, ChunkDone)
        ]


def test_one_request_from_prompt_to_end():
    """A prompt gives the first token after 1.5 s, and one stretch of three steps the others."""
    world = World()
    world.submit(0)
    world.loop.run()
    assert world.chunks() == [(0.0, 1.5, 0, 10, 0, 10)]
    assert world.seen(DecodeStarted) == [(1.5, 0)]
    assert world.steps() == [(1.5, 4.5, 3, (0,))]
    assert world.seen(RequestDone) == [(4.5, 0)]
    assert world.instance.capacity_tokens == 400
    (step,) = (event for event in world.events if isinstance(event, DecodeStretch))
    assert (step.instance, step.first_step_s, step.step_growth_s) == ("c", 1.0, 0.0)


@pytest.mark.parametrize("outputs", [0, 1])
def test_prefill_gives_one_token_in_any_case(outputs):
    """An answer of one token, or of none in the trace, ends with the prompt."""
    world = World()
    world.submit(0, outputs=outputs)
    world.loop.run()
    assert world.seen(RequestDone) == [(1.5, 0)]
    assert world.steps() == []


def test_a_failure_ends_a_decode_step_and_loses_a_prompt():
    """Tokens of the step under way are shown; a prompt under way is lost at once."""
    world = World()
    world.submit(0, outputs=9)
    world.submit(1, at_s=2.6)  # it waits for the end of the step
    world.at(3.0, world.instance.stop)
    world.loop.run()
    assert world.steps() == [(1.5, 3.5, 2, (0,))]
    assert world.seen(AttemptFailed) == [(3.5, 0), (3.5, 1)]
    prompt = World()
    prompt.submit(0)
    prompt.at(1.0, prompt.instance.stop)
    prompt.loop.run()
    assert prompt.seen(AttemptFailed) == [(1.0, 0)]
    assert prompt.chunks() == []
    failure = prompt.events[-1]
    assert (failure.retriable, failure.stage, prompt.instance.tokens_shown()) == (True, "failed", {})


def test_a_request_that_can_never_be_served_is_refused():
    """The stage tells what refused it: the memory, or the iteration that is too short for its prompt."""
    world = World(blocks=5)
    world.submit(0, prompt=21)
    world.submit(1, prompt=20, outputs=1)
    world.loop.run()
    assert world.seen(PrefillDropped) == [(0.0, 0)]
    assert [
        (e.attempt.request_id, e.stage, e.retriable) for e in world.events if isinstance(e, AttemptFailed)
    ] == [(0, "capacity", False)]
    assert world.seen(RequestDone) == [(1.5, 1)]
    world = World(batch_tokens=16)
    world.submit(0, prompt=17)
    world.loop.run()
    assert [e.stage for e in world.events if isinstance(e, AttemptFailed)] == ["batching"]


def test_a_prefix_in_memory_is_reused_and_reported():
    """The second request finds the two whole blocks of the first; the change of the cache is reported."""
    world = World(caching=True)
    world.submit(0, prompt=10, outputs=1, keys=(1, 2, 3))
    world.submit(1, prompt=11, outputs=1, at_s=2.0, keys=(1, 2, 4))
    world.loop.run()
    assert [chunk[2:] for chunk in world.chunks()] == [(0, 10, 0, 10), (1, 3, 8, 11)]
    changes = [event for event in world.events if isinstance(event, CacheChanged)]
    assert [(e.instance, e.added, e.removed) for e in changes] == [("c", (1, 2), ())]


def test_a_policy_that_plans_nothing_for_running_requests_is_an_error():
    """An instance that could never go on says so."""

    class Stops:
        """Prefills, and then does nothing."""

        def plan(self, waiting, running, limits):
            del running
            return VLLM(watermark=0.0).plan(waiting, (), limits)

    world = World(Stops())
    world.submit(0)
    with pytest.raises(ValueError, match="plans nothing for 1 requests that run"):
        world.loop.run()


def test_tokens_shown_elsewhere_count_against_the_memory():
    """A prompt and tokens that are too many together are refused by the memory, a full memory alone by nothing."""
    world = World(blocks=5)
    world.submit(0, prompt=18, outputs=9, shown=4)
    world.loop.run()
    assert [e.stage for e in world.events if isinstance(e, AttemptFailed)] == ["capacity"]
    assert world.seen(PrefillDropped) == [(0.0, 0)]
    world = World(blocks=5, batch_tokens=16)
    world.submit(0, prompt=20)
    world.loop.run()
    assert [e.stage for e in world.events if isinstance(e, AttemptFailed)] == ["batching"]
