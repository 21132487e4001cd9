"""The simulated coupled instance alone: every iteration lasts a second, and beginning a prompt a half more."""

import pytest

from mooncake_lab.batching import VLLM, Limits, VLLMChunked
from mooncake_lab.cluster import (
    Attempt,
    AttemptFailed,
    ChunkDone,
    DecodeStarted,
    Preempted,
    PrefillDropped,
    RequestDone,
    StepDone,
)
from mooncake_lab.core import CacheChanged, Request, TracedRequest
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import CoupledInstance, DeviceCache, EventLoop

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
        limits = Limits(
            max_batch_tokens=batch_tokens, max_requests=8, block_size_tokens=BLOCK, capacity_blocks=blocks,
            free_blocks=blocks,
        )  # fmt: skip
        cache = DeviceCache(blocks * BLOCK, block_size_tokens=BLOCK) if caching else None
        self.instance = CoupledInstance(
            self.loop, "c", MODEL, policy or VLLM(watermark=0.0), limits, cache, self.events.append,
            max_tokens_of=lambda traced: traced.output_tokens,
        )  # fmt: skip

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
        return [(e.start_s, e.at_s, e.steps, e.request_ids) for e in self.events if isinstance(e, StepDone)]

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
    (step,) = (event for event in world.events if isinstance(event, StepDone))
    assert (step.worker, step.first_step_s, step.step_growth_s) == ("c", 1.0, 0.0)


@pytest.mark.parametrize("outputs", [0, 1])
def test_prefill_gives_one_token_in_any_case(outputs):
    """An answer of one token, or of none in the trace, ends with the prompt."""
    world = World()
    world.submit(0, outputs=outputs)
    world.loop.run()
    assert world.seen(RequestDone) == [(1.5, 0)]
    assert world.steps() == []


def test_a_prompt_that_comes_ends_the_stretch_with_its_iteration():
    """It waits for the end of the iteration under way, and stalls the decode for its own 1.5 s."""
    world = World()
    world.submit(0, outputs=6)
    world.submit(1, outputs=2, at_s=3.0)
    world.loop.run()
    assert world.steps() == [(1.5, 3.5, 2, (0,)), (5.0, 6.0, 1, (0, 1)), (6.0, 8.0, 2, (0,))]
    assert [chunk[:3] for chunk in world.chunks()] == [(0.0, 1.5, 0), (3.5, 5.0, 1)]
    assert world.seen(RequestDone) == [(6.0, 1), (8.0, 0)]


def test_prompts_that_begin_together_cost_a_half_each():
    """Two prompts in one iteration take 1 + 2 x 0.5 s; a piece that goes on costs no half again."""
    world = World()
    world.submit(0, outputs=1)
    world.submit(1, outputs=1)
    world.loop.run()
    assert [chunk[:3] for chunk in world.chunks()] == [(0.0, 2.0, 0), (0.0, 2.0, 1)]
    world = World(VLLMChunked(chunk_tokens=8, watermark=0.0))
    world.submit(0, prompt=20, outputs=1)
    world.loop.run()
    assert world.chunks() == [(0.0, 1.5, 0, 8, 0, 8), (1.5, 2.5, 0, 8, 0, 16), (2.5, 3.5, 0, 4, 0, 20)]


def test_equal_pieces_are_one_report():
    """After its first piece a long prompt is computed in one stretch up to its last block."""
    world = World(VLLMChunked(chunk_tokens=8, watermark=0.0))
    world.submit(0, prompt=64, outputs=1)
    world.loop.run()
    assert world.chunks() == [(0.0, 1.5, 0, 8, 0, 8), (1.5, 7.5, 0, 48, 0, 56), (7.5, 8.5, 0, 8, 0, 64)]
    assert world.seen(RequestDone) == [(8.5, 0)]


def test_tokens_shown_before_are_computed_like_the_prompt():
    """With three tokens of six shown elsewhere, 13 tokens are computed; each new one is a step."""
    world = World()
    world.submit(0, outputs=6, shown=3)
    world.loop.run()
    assert [chunk[3:] for chunk in world.chunks()] == [(13, 0, 13)]
    assert world.seen(DecodeStarted) == [(1.5, 0)]
    assert world.steps() == [(0.0, 1.5, 1, (0,)), (1.5, 3.5, 2, (0,))]
    assert world.seen(RequestDone) == [(3.5, 0)]


def test_tokens_shown_at_any_moment():
    """Shown are the tokens of finished iterations, also of a stretch under way; a waiting one keeps its own."""
    world = World()
    world.submit(0, outputs=9)
    world.submit(1, outputs=9, shown=2, at_s=3.0)
    shown = []
    for at_s in (1.0, 1.6, 3.2, 3.6, 5.2):
        world.at(at_s, lambda: shown.append(world.instance.tokens_shown()))
    world.loop.run()
    assert shown == [{}, {0: 1}, {0: 2, 1: 2}, {0: 3, 1: 2}, {0: 3, 1: 3}]
    assert world.instance.tokens_shown() == {}


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


def test_a_preempted_request_is_computed_again():
    """Four blocks hold two requests until both need a third; the newer one then starts again with its tokens."""
    world = World(blocks=5)
    world.submit(0, prompt=7, outputs=8)
    world.submit(1, prompt=7, outputs=6)
    world.loop.run()
    (preempted,) = (event for event in world.events if isinstance(event, Preempted))
    assert (preempted.attempt.request_id, preempted.context_tokens) == (1, 0)
    assert [i for _, i in world.seen(DecodeStarted)] == [0, 1]
    computed = [chunk[2:] for chunk in world.chunks()]
    assert computed[:2] == [(0, 7, 0, 7), (1, 7, 0, 7)]
    assert computed[2][0] == 1
    assert computed[2][1] > 7
    shown = {0: 1, 1: 1}
    for *_, steps, ids in world.steps():
        for i in ids:
            shown[i] += steps
    assert shown == {0: 8, 1: 6}


def test_a_prefix_in_memory_is_reused_and_reported():
    """The second request finds the two whole blocks of the first; the change of the cache is reported."""
    world = World(caching=True)
    world.submit(0, prompt=10, outputs=1, keys=(1, 2, 3))
    world.submit(1, prompt=11, outputs=1, at_s=2.0, keys=(1, 2, 4))
    world.loop.run()
    assert [chunk[2:] for chunk in world.chunks()] == [(0, 10, 0, 10), (1, 3, 8, 11)]
    changes = [event for event in world.events if isinstance(event, CacheChanged)]
    assert [(e.instance, e.added, e.removed) for e in changes] == [("c", (1, 2), ())]


def test_a_run_that_is_cut_closes_its_stretch_before_the_horizon():
    """The stretch holds the steps that end before the horizon."""
    world = World()
    world.instance.horizon_s = 5.0
    world.submit(0, outputs=100)
    world.loop.run(5.0)
    assert world.steps() == [(1.5, 4.5, 3, (0,))]
    assert world.instance.tokens_shown() == {0: 4}


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


def test_a_failure_ends_a_long_stretch_with_the_step_under_way():
    """Of eight steps that were planned at once, the one under way is the last."""
    world = World()
    world.submit(0, outputs=9)
    world.at(4.0, world.instance.stop)
    world.loop.run()
    assert world.steps() == [(1.5, 4.5, 3, (0,))]
    assert world.seen(AttemptFailed) == [(4.5, 0)]


def test_a_failure_in_the_last_step_ends_the_request():
    """A request whose last token comes with the step under way is done, and nothing is lost."""
    world = World()
    world.submit(0, outputs=4)
    world.at(4.0, world.instance.stop)
    world.loop.run()
    assert world.steps() == [(1.5, 4.5, 3, (0,))]
    assert world.seen(RequestDone) == [(4.5, 0)]
    assert world.seen(AttemptFailed) == []


def test_the_shortest_stretch_is_cut_as_well():
    """Of two steps the second is left to the next plan if a request comes during the first."""
    world = World()
    world.submit(0, outputs=3)
    world.submit(1, outputs=1, at_s=2.0)
    world.loop.run()
    assert world.steps() == [(1.5, 2.5, 1, (0,)), (4.0, 5.0, 1, (0,))]


def test_a_token_that_comes_now_is_not_shown_yet():
    """At the end of an iteration its token counts once the iteration is reported."""
    world = World()
    world.submit(0, outputs=9)
    shown = []
    for at_s in (2.5, 2.75):
        world.at(at_s, lambda: shown.append(world.instance.tokens_shown()))
    world.loop.run()
    assert shown == [{0: 1}, {0: 2}]


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
