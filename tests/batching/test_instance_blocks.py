"""When an instance takes and returns KVCache blocks, while other requests are in flight."""

import pytest

from mooncake_lab.batching import CountedBlocks, Instance, Limits, Plan, Progress, Segment

LIMITS = Limits(max_batch_tokens=24, max_requests=3, block_size_tokens=4, capacity_blocks=12, free_blocks=12)


class Planned:
    """A policy that plans what it is told to."""

    def __init__(self, *plans):
        self.plans = list(plans)

    def plan(self, waiting, running, bounds):
        del waiting, running, bounds
        return Plan(segments=tuple(self.plans.pop(0)))


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


def prefill(request_id, tokens, cached=0, *, emits=False):
    return Segment(request_id, "prefill", tokens, cached, emits)


def decode(request_id, cached):
    return Segment(request_id, "decode", 1, cached, emits=True)


def instance(*plans, prompts=(4, 4)):
    one = Instance(Planned(*plans), LIMITS, Recorded(CountedBlocks(12)))
    for request_id, tokens in enumerate(prompts):
        one.enqueue(Progress(request_id=request_id, arrival=request_id, prompt_tokens=tokens))
    return one


@pytest.mark.parametrize("leave", [Instance.finish, Instance.preempt])
def test_a_request_leaves_while_another_is_in_flight(leave):
    """Only the requests of an iteration under way must stay; the others return their blocks at once."""
    one = instance([prefill(0, 4, emits=True)], [prefill(1, 4, emits=True)])
    one.apply(one.plan())
    under_way = one.plan()
    leave(one, 0)
    assert list(one.running) == [1]
    assert one.blocks.free_blocks == 11
    one.apply(under_way)
    one.check()


def test_blocks_are_taken_only_where_a_request_needs_more():
    """Tokens that fit into the last block of a request take no block, whether planned or repeated."""
    one = instance([prefill(0, 5, emits=True)], [decode(0, 5)], [decode(0, 7)], prompts=(5,))
    one.apply(one.plan())
    assert one.blocks.taken == [[(0, 2)]]
    one.apply(one.plan(), steps=2)  # tokens 6 and 7 fit into two blocks of four
    assert one.blocks.taken == [[(0, 2)]]
    one.apply(one.plan(), steps=2)  # token 8 fits, token 9 needs a third
    assert one.blocks.taken == [[(0, 2)], [(0, 3)]]
