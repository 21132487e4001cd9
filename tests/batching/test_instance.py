"""The laws of an instance, under every policy, with requests that come, go and are preempted at any time."""

from dataclasses import dataclass

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    BATCHING_POLICIES,
    VLLM,
    CountedBlocks,
    DecodeOnly,
    Instance,
    Limits,
    Plan,
    PrefillOnly,
    Progress,
    Refusal,
    SarathiServe,
    Segment,
    VLLMChunked,
    check_plan,
    named_policy,
)

COUPLED = sorted(set(BATCHING_POLICIES) - {"prefill_only", "decode_only"})
coupled = pytest.mark.parametrize("name", COUPLED)


def limits(blocks=12, requests=3, tokens=24, block=4):
    return Limits(
        max_batch_tokens=tokens,
        max_requests=requests,
        block_size_tokens=block,
        capacity_blocks=blocks,
        free_blocks=blocks,
    )


def request(request_id, prompt_tokens, **changes):
    return Progress(request_id=request_id, arrival=request_id, prompt_tokens=prompt_tokens, **changes)


def instance(policy, bounds=None, waiting=None):
    bounds = bounds or limits()
    return Instance(policy, bounds, CountedBlocks(bounds.capacity_blocks), waiting)


REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=7)
WORLDS = st.tuples(REQUESTS, st.integers(8, 20), st.integers(1, 4), st.sampled_from([1, 4]))


PLANS = {
    "decodes": ([("prefill", 9, 0, True)], ("decode", 1, 9, True)),
    "goes on": ([("prefill", 4, 0, False)], ("prefill", 2, 4, False)),
    "begins": ([], ("prefill", 2, 0, False)),
    "arrives": ([], ("decode", 1, 3, True)),
}
"""What a request does in a plan, by what it did in the one before: kind, new and cached tokens, emits."""


class TestSteadiness:
    def test_decodes_repeat_until_blocks_run_out(self):
        """Two decodes that hold two of four blocks of four tokens fill all four before the plan changes."""
        one = instance(VLLM(watermark=0.0), limits(blocks=4, requests=2))
        for request_id in (0, 1):
            one.enqueue(request(request_id, 4))
        one.apply(one.plan())
        plan = one.plan()
        assert one.steady_steps(plan) == 4
        one.apply(plan, 4)
        assert one.blocks.free_blocks == 0
        assert one.plan().preempted == (1,)

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 9))
    def test_decodes_are_taken_together_as_long_as_they_repeat(self, prompts, spare):
        """Taken one by one, the next step has another plan: a request is preempted or has outgrown the memory."""
        needed = sum(-(-(prompt + 1) // 4) for prompt in prompts)
        one = instance(VLLM(watermark=0.0), limits(blocks=needed + spare, requests=4, tokens=48))
        for request_id, prompt in enumerate(prompts):
            one.enqueue(request(request_id, prompt))
        one.apply(one.plan())
        first = plan = one.plan()
        steps, repeated = one.steady_steps(plan), 0
        while [part.request_id for part in plan.segments] == [part.request_id for part in first.segments]:
            one.apply(plan)
            repeated, plan = repeated + 1, one.plan()
        assert repeated == steps

    def test_a_piece_of_a_prompt_repeats_after_its_first(self):
        """Of 100 tokens in pieces of 8, the first piece comes alone, then all but the last block."""
        one = instance(VLLMChunked(chunk_tokens=8), limits(blocks=40))
        one.enqueue(request(0, 100))
        plan = one.plan()
        assert one.steady_steps(plan) == 1
        one.apply(plan)
        plan = one.plan()
        assert one.steady_steps(plan) == (92 - 4) // 8
        assert one.apply(plan, 11)[0].pending_tokens == 4

    @given(st.lists(st.tuples(st.sampled_from(list(PLANS)), st.booleans()), min_size=1, max_size=4))
    def test_a_plan_repeats_as_often_as_its_policy_promises(self, states):
        """Unless it leaves out a request that runs, or computes the first piece of a prompt."""
        first, second = ([], [])
        for i, (state, is_planned) in enumerate(states):
            before, then = PLANS[state]
            first += [Segment(i, *fields) for fields in before]
            second += [Segment(i, *then)] * is_planned
        assume(second)
        one = instance(Steady([first, second] if first else [second], 7), limits(blocks=40, requests=4, tokens=48))
        for i, (state, _) in enumerate(states):
            arrived = {"cached_tokens": 3, "generated_tokens": 1} if state == "arrives" else {}
            one.enqueue(request(i, 3 if arrived else 9, **arrived))
        if first:
            one.apply(one.plan())
        changes = any(
            not is_planned if state in {"decodes", "goes on"} else is_planned and state == "begins"
            for state, is_planned in states
        )
        assert one.steady_steps(one.plan()) == (1 if changes else 7)

    @pytest.mark.parametrize("steps", [-3, 0, 7])
    def test_a_plan_repeats_at_least_once(self, steps):
        """What the policy promises counts, and never less than the iteration itself."""
        one = instance(Steady([piece(0, 3, emits=True), decode(0, 3)], steps))
        one.enqueue(request(0, 3))
        one.apply(one.plan())
        assert one.steady_steps(one.plan()) == max(1, steps)


@dataclass
class Scripted:
    """A policy that plans what it is told to."""

    plans: list

    def plan(self, waiting, running, bounds):
        plan = self.plans.pop(0)
        plan = plan if isinstance(plan, Plan) else Plan(segments=tuple(plan))
        check_plan(plan, waiting, running, bounds)
        self.seen = [r.request_id for r in waiting], [r.request_id for r in running], bounds
        return plan


@dataclass
class Steady(Scripted):
    """Such a policy that promises to repeat itself."""

    steps: int = 9

    def steady_steps(self, plan, running, bounds):  # noqa: ARG002  # it looks at nothing
        return self.steps


def piece(request_id, tokens, cached=0, *, emits=False):
    return [Segment(request_id, "prefill", tokens, cached, emits)]


def decode(request_id, cached):
    return [Segment(request_id, "decode", 1, cached, emits=True)]


class TestInFlight:
    def test_applying_twice_is_refused(self):
        """An iteration is counted once."""
        one = instance(Scripted([piece(0, 4)]))
        one.enqueue(request(0, 9))
        plan = one.plan()
        one.apply(plan)
        with pytest.raises(ValueError, match="is not in flight"):
            one.apply(plan)

    def test_a_request_in_flight_cannot_leave(self):
        """Neither finished nor preempted while its tokens are computed: its blocks are being written."""
        one = instance(Scripted([piece(0, 4)]))
        one.enqueue(request(0, 9))
        plan = one.plan()
        for leave in (one.finish, one.preempt):
            with pytest.raises(ValueError, match="request 0 is in flight"):
                leave(0)
        one.apply(plan)
        one.finish(0)
        assert one.blocks.free_blocks == 12

    def test_a_policy_that_reserves_nothing_may_spend_what_is_free(self):
        """Beside an iteration in flight it sees all blocks that no request holds."""
        one = instance(Scripted([piece(0, 4), piece(1, 4)]))
        for request_id in (0, 1):
            one.enqueue(request(request_id, 20))
        for free_blocks in (12, 11):
            one.plan()
            assert one.policy.seen[-1].free_blocks == free_blocks

    def test_a_failed_iteration_is_planned_again(self):
        """Zero steps count nothing; the request keeps its blocks, and what was lost of its prefix is shortened."""
        one = instance(Scripted([piece(0, 4, 8), piece(0, 8, 4)]))
        one.enqueue(request(0, 20, cached_tokens=8))
        (now,) = one.apply(one.plan(), steps=0)
        assert (now.cached_tokens, now.generated_tokens, now.held_blocks) == (8, 0, 3)
        one.check()
        one.shorten(0, 4)
        (now,) = one.apply(one.plan())
        assert (now.cached_tokens, now.held_blocks, one.blocks.free_blocks) == (12, 3, 9)


class TestLeaving:
    @pytest.mark.parametrize(("swap", "kept"), [(False, 0), (True, 8)])
    def test_preemption_returns_everything(self, swap, kept):
        """A preempted request waits at its old rank without blocks; if it was swapped, its tokens still count."""
        one = instance(Scripted([piece(0, 8)]))
        for request_id in (0, 1):
            one.enqueue(request(request_id, 9, max_new_tokens=5))
        one.apply(one.plan())
        one.preempt(0, swap=swap)
        assert one.waiting == [
            request(0, 9, cached_tokens=kept, max_new_tokens=5),
            request(1, 9, max_new_tokens=5),
        ]
        assert one.blocks.free_blocks == 12
        one.check()

    def test_a_plan_pushes_out_and_refuses(self):
        """Preempted, swapped and refused requests give back their blocks before the segments take new ones."""
        start = piece(0, 4) + piece(1, 4) + piece(2, 4)
        turn = Plan(
            preempted=(2,),
            swapped=(1,),
            rejected=(Refusal(3, "never"),),
            segments=tuple(piece(0, 5, 4, emits=True)),
        )
        one = instance(Scripted([start, turn]))
        for request_id in range(4):
            one.enqueue(request(request_id, 9))
        one.apply(one.plan())
        plan = one.plan()
        assert [(r.request_id, r.cached_tokens) for r in one.waiting] == [(1, 4), (2, 0)]
        assert list(one.running) == [0]
        assert one.blocks.free_blocks == 12 - 3
        assert one.steady_steps(plan) == 1
        one.check()

    def test_a_waiting_request_can_leave(self):
        """A waiting request is cancelled like a running one; one that is not here is an error."""
        one = instance(Scripted([]))
        one.enqueue(request(4, 9))
        one.finish(4)
        assert one.waiting == []
        with pytest.raises(KeyError, match="request 4 neither waits nor runs here"):
            one.finish(4)

    def test_requests_run_in_order_of_arrival(self):
        """A request that comes back takes its old rank among the running ones, and ties go by id."""
        one = instance(Scripted([piece(5, 4) + piece(9, 4), piece(3, 4)]))
        for request_id, arrival in ((9, 1), (5, 1), (3, 0)):
            one.enqueue(Progress(request_id=request_id, arrival=arrival, prompt_tokens=9))
        assert [r.request_id for r in one.waiting] == [3, 5, 9]
        one.apply(one.plan())
        one.apply(one.plan())
        assert list(one.running) == [3, 5, 9]
        one.check()

    def test_instances_can_share_a_queue(self):
        """Two instances take different requests from one queue, and preempted ones go back to it."""
        queue = []
        first, second = (instance(Scripted([piece(i, 4)]), waiting=queue) for i in (0, 1))
        for request_id in (0, 1):
            first.enqueue(request(request_id, 9))
        for one in (first, second):
            one.apply(one.plan())
        assert (list(first.running), list(second.running), queue) == ([0], [1], [])
        second.preempt(1)
        assert [r.request_id for r in first.waiting] == [1]


class TestCheck:
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda one: setattr(one.blocks, "free_blocks", 9), "3 blocks are in use, 2 are held"),
            (lambda one: one.running.pop(0), "blocks are held as"),
            (lambda one: one.waiting.insert(0, one.running[0]), r"requests \[0\] wait and run"),
            (lambda one: one.waiting.reverse(), "out of order"),
            (lambda one: one.running.update({9: one.running.pop(0), 8: request(0, 1)}), "out of order|held as"),
            (lambda one: one._in_flight.append(Plan(segments=tuple(piece(7, 1)))), "not all of them run"),
            (lambda one: setattr(one, "limits", limits(requests=1, tokens=1)), "2 requests run"),
        ],
    )
    def test_damage_is_found(self, damage, message):
        """Lost blocks and requests, wrong order, and more requests than places are noticed."""
        one = instance(SarathiServe(chunk_tokens=5, watermark=0.0))
        for request_id in range(4):
            one.enqueue(request(request_id, 4))
        one.apply(one.plan())
        one.check()
        damage(one)
        with pytest.raises(AssertionError, match=message):
            one.check()


class Run:
    """Steps an instance until all requests are done, like a runtime, and checks the laws on the way."""

    def __init__(self, policy, world, *, coalesce=False, prefilled=False, depth=1):
        rows, blocks, places, block = world
        self.instance = instance(policy, limits(blocks * 4 // block, places, 24, block))
        self.outputs = [output + prefilled for _, output in rows]
        self.computed = [prompt * prefilled for prompt, _ in rows]
        self.tokens = [[-1] * prefilled for _ in rows]  # of each request, the iteration of each of its tokens
        for i, (prompt, output) in enumerate(rows):
            there = {"cached_tokens": prompt, "generated_tokens": 1} if prefilled else {}
            self.instance.enqueue(request(i, prompt, max_new_tokens=output + prefilled, **there))
        self.refused, self.iteration, self.coalesce = [], 0, coalesce
        self.in_flight, self.depth = [], depth  # plans that are not applied yet, and how many of them there may be

    def step(self):
        in_flight = {segment.request_id for plan in self.in_flight for segment in plan.segments}
        free_blocks, places = self.instance.blocks.free_blocks, self.instance.limits.max_requests - len(in_flight)
        before = dict(self.instance.running)
        promised = self.promised(before[request_id] for request_id in in_flight)
        plan = self.instance.plan()
        if places:
            _, resting, limits = self.instance.seen
            spendable = max(0, free_blocks - promised)
            assert (limits.free_blocks, limits.max_requests) == (spendable, places)
            assert in_flight.isdisjoint([request.request_id for request in resting])
        assert in_flight.isdisjoint([segment.request_id for segment in plan.segments])
        if self.instance.running.keys() - before.keys():  # what is promised to old and new requests is there
            assert self.promised(self.instance.running.values()) <= self.instance.blocks.free_blocks
        assert in_flight <= self.instance.running.keys()
        assert all(request.shared_blocks == 0 for request in self.instance.running.values())
        self.refused += [refusal.request_id for refusal in plan.rejected]
        for request_id in plan.preempted:
            self.computed[request_id] = 0
        if plan.segments:
            self.in_flight.append(plan)
        else:
            assert self.in_flight or not plan.is_empty
        self.instance.check()
        if self.in_flight and (len(self.in_flight) == self.depth or not plan.segments):
            self.apply(self.in_flight.pop(0))

    def promised(self, requests):
        """Blocks that the policy reserves for some requests beyond those that they hold."""
        reservation, limits = self.instance.policy.reservation, self.instance.limits
        return sum(max(0, reservation(request, limits) - request.held_blocks) for request in requests)

    def apply(self, plan):
        left = [self.outputs[s.request_id] - len(self.tokens[s.request_id]) for s in plan.segments if s.emits]
        steps = min([self.instance.steady_steps(plan) if self.coalesce else 1, *left])
        assert steps >= 1
        for now, segment in zip(self.instance.apply(plan, steps), plan.segments, strict=True):
            request_id = segment.request_id
            assert segment.cached_tokens == self.computed[request_id]  # each token once, none left out
            self.computed[request_id] += segment.new_tokens * steps
            if segment.emits:
                self.tokens[request_id] += range(self.iteration, self.iteration + steps)
            assert (now.cached_tokens, now.generated_tokens) == (
                self.computed[request_id],
                len(self.tokens[request_id]),
            )
            if now.generated_tokens == self.outputs[request_id]:
                self.instance.finish(request_id)
        self.iteration += steps
        self.instance.check()

    def play(self):
        while self.instance.waiting or self.instance.running:
            self.step()
            assert self.iteration < 2000  # far more than these requests need
        assert self.instance.blocks.free_blocks == self.instance.limits.capacity_blocks
        return self


class TestEveryPolicy:
    @coupled
    @settings(max_examples=25, deadline=None)
    @given(world=WORLDS, depth=st.integers(1, 3))
    @example(world=([(1, 5), (21, 5)], 8, 3, 4), depth=3)  # both may grow, and both do not fit
    def test_no_request_and_no_block_is_lost(self, name, world, depth):
        """Each request computes each token once, and gets all of its output or a refusal; all blocks come back.

        So it is with several iterations in flight: a request is in one of them at a time.
        """
        run = Run(named_policy(name), world, depth=depth).play()
        for request_id, output in enumerate(run.outputs):
            assert len(run.tokens[request_id]) == (0 if request_id in run.refused else output)

    @coupled
    @settings(max_examples=25, deadline=None)
    @given(world=WORLDS)
    def test_coalesced_steps_equal_single_steps(self, name, world):
        """Steps taken at once give every token in the same iteration as steps taken one by one."""
        single, several = (Run(named_policy(name), world, coalesce=each).play() for each in (False, True))
        assert several.tokens == single.tokens
        assert several.refused == single.refused

    @pytest.mark.parametrize("prefilled", [False, True])
    @settings(max_examples=25, deadline=None)
    @given(world=WORLDS)
    def test_separate_stages_keep_the_laws(self, prefilled, world):
        """Prefill-only instances of one-token requests and decode-only ones of computed prompts keep both laws."""
        rows, *rest = world
        world = ([(prompt, output if prefilled else 1) for prompt, output in rows], *rest)
        policy = DecodeOnly() if prefilled else PrefillOnly(chunk_tokens=3)
        single, several = (Run(policy, world, coalesce=each, prefilled=prefilled).play() for each in (False, True))
        assert several.tokens == single.tokens
        assert [len(times) for i, times in enumerate(single.tokens) if i not in single.refused] == [
            output for i, output in enumerate(single.outputs) if i not in single.refused
        ]


class Recorded:
    """Counted blocks that remember for which requests blocks were taken."""

    def __init__(self, counted):
        self.counted = counted
        self.taken = []

    def __getattr__(self, name):
        return getattr(self.counted, name)

    def acquire(self, requests):
        self.taken.append([(request.request_id, request.held_blocks) for request in requests])
        self.counted.acquire(requests)


def test_blocks_are_taken_only_where_a_request_needs_more():
    """Tokens that fit into the last block of a request take no block, whether planned or repeated."""
    one = instance(Scripted([piece(0, 5, emits=True), decode(0, 5), decode(0, 7)]))
    one.blocks = Recorded(one.blocks)
    one.enqueue(request(0, 5))
    one.apply(one.plan())
    assert one.blocks.taken == [[(0, 2)]]
    one.apply(one.plan(), steps=2)  # tokens 6 and 7 fit into two blocks of four
    assert one.blocks.taken == [[(0, 2)]]
    one.apply(one.plan(), steps=2)  # token 8 fits, token 9 needs a third
    assert one.blocks.taken == [[(0, 2)], [(0, 3)]]
