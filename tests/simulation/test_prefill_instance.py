"""The simulated prefill instance alone: what it reuses, when it begins the next prompt, and what it reports."""

from types import SimpleNamespace

from mooncake_lab.cluster import Attempt, PrefillDone, PrefillDropped, PrefillSlotFree, PrefillStarted, TierRead
from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request
from mooncake_lab.simulation import EventLoop, PrefillInstance
from mooncake_lab.simulation.kv_transfer import PrefillJob

BLOCK, TOKEN_BYTES = 512, 1000


class World:
    """An instance whose cache, clock and transfers do what a test says, and record what they are asked."""

    def __init__(self, *, found=(0, 0), stages=(1.0,), max_batch_tokens=1, overtaking=False):
        self.loop = EventLoop()
        self.found, self.stages = found, stages
        self.disk_s, self.disk = 0.0, []
        self.asked, self.events, self.streams, self.sent, self.kept = [], [], [], [], []
        self.model = SimpleNamespace(shape=SimpleNamespace(kv_bytes_per_token=TOKEN_BYTES))
        self.instance = PrefillInstance(
            self.loop, "p", self, self, self, self.events.append, max_batch_tokens=max_batch_tokens,
            overtaking=overtaking, ssd_reads="cheaper",
        )  # fmt: skip

    # the latency model of the node

    def finish_s(self, prompts, free_s):
        self.asked.append((*prompts, list(free_s)))
        return list(self.stages)

    # its cache

    def matched(self, node, request):
        assert node == "p"
        return min(self.found[0], len(request.block_keys))

    def before_ssd(self, node, request):
        del node, request

    def reuse(self, node, request, blocks):
        assert blocks >= len(request.block_keys)
        assert node == "p"
        return SimpleNamespace(blocks=min(self.found[0], len(request.block_keys)), from_ssd=self.found[1])

    def keep(self, node, request):
        self.kept.append((self.loop.now_s, node, request.id))

    # the network and the disk

    def disk_wait_s(self, node):
        del node
        return self.disk_s

    def read_disk(self, node, tokens):
        self.disk.append((self.loop.now_s, node, tokens))

    def stream(self, job, seconds):
        self.streams.append((job.attempt.request_id, seconds))

    def finish(self, job):
        self.sent.append((self.loop.now_s, job.attempt.request_id))

    def job(self, i, tokens=2000, fetched_s=None):
        keys = tuple(range(-(-tokens // BLOCK)))
        request = Request(id=i, arrival_s=0.0, input_tokens=tokens, block_keys=keys, block_size_tokens=BLOCK)
        placement = Placement(
            request_id=i, prefill="p", decode="d", reused_tokens=0, expected_ttft_s=0.0, expected_tbt_s=0.0,
            reason="",
        )  # fmt: skip
        job = PrefillJob(Attempt(i, 1), request, placement, fetching=fetched_s is not None)
        if fetched_s is not None:
            self.loop.call_later(fetched_s, job.end_fetching)
        return job

    def run(self, *jobs):
        for job in jobs:
            self.instance.submit(job)
        self.loop.run()

    def at(self, kind):
        return [(event.at_s, event.attempt.request_id) for event in self.events if isinstance(event, kind)]


def test_a_prefix_is_reused_and_the_rest_computed():
    """Three blocks found, one of them on SSD: the model and the report count tokens, the tier read bytes."""
    world = World(found=(3, 1))
    world.run(world.job(0))
    assert world.asked == [((2000, 3 * BLOCK, BLOCK), [])]
    read, done = (next(e for e in world.events if isinstance(e, kind)) for kind in (TierRead, PrefillDone))
    assert (read.at_s, read.start_s, read.bytes) == (1.0, 0.0, BLOCK * TOKEN_BYTES)
    assert (done.start_s, done.at_s) == (0.0, 1.0)
    assert (done.computed_tokens, done.reused_tokens) == (2000 - 3 * BLOCK, 3 * BLOCK)
    assert (world.kept, world.sent, world.streams) == ([(1.0, "p", 0)], [(1.0, 0)], [(0, 1.0)])


def test_a_prompt_waits_for_the_disk():
    """Where the disk reads for others, a prompt whose prefix is read is done that much later; others are not."""
    for found, done_s, read in (((3, 1), 1.5, [(0.0, "p", BLOCK)]), ((3, 0), 1.0, [])):
        world = World(found=found)
        world.disk_s = 0.5
        world.run(world.job(0))
        assert (world.at(PrefillDone), world.disk) == ([(done_s, 0)], read)


def test_a_whole_prompt_in_the_cache_leaves_one_token():
    """The last token of a prompt is computed, and no more is read from SSD than is reused."""
    world = World(found=(4, 4))
    world.run(world.job(0, tokens=4 * BLOCK))
    assert world.asked == [((4 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK - 1), [])]
    (done,) = (event for event in world.events if isinstance(event, PrefillDone))
    assert (done.computed_tokens, done.reused_tokens) == (1, 4 * BLOCK - 1)


def test_a_single_node_takes_one_prompt_after_the_other():
    """The next prompt begins when the last one is computed; nothing is read from SSD unless it was there."""
    world = World(stages=(2.0,))
    world.run(world.job(0), world.job(1))
    assert world.at(PrefillStarted) == [(0.0, 0), (2.0, 1)]
    assert world.at(PrefillDone) == [(2.0, 0), (4.0, 1)]
    assert [free_s for *_, free_s in world.asked] == [[], []]
    assert not any(isinstance(event, TierRead | PrefillSlotFree) for event in world.events)


def test_waiting_prompts_are_packed_up_to_the_tokens_of_an_iteration():
    """Prompts of 300, 500 and 400 tokens: the first two make 800, the third would exceed 1000 and comes next."""
    world = World(max_batch_tokens=1000)
    world.run(*(world.job(i, tokens) for i, tokens in enumerate((300, 500, 400, 5000, 10))))
    assert world.at(PrefillStarted) == [(0.0, 0), (0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4)]
    assert world.at(PrefillDone) == [(1.0, 0), (1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
    assert world.asked[0] == ((300, 0, 0), (500, 0, 0), [])
    assert world.sent == [(1.0, 0), (1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]


def test_only_computed_tokens_count_in_a_packed_iteration():
    """Three blocks of each prompt are found: two prompts of 2,000 tokens compute 464 each and share 928 tokens."""
    for max_batch_tokens, together in ((928, 2), (927, 1)):
        world = World(found=(3, 0), max_batch_tokens=max_batch_tokens)
        world.run(world.job(0), world.job(1))
        assert len(world.asked[0]) - 1 == together


def test_a_prompt_that_is_all_in_the_cache_takes_one_token_of_the_iteration():
    """Prompts of four cached blocks compute one token each: three of five fill an iteration of three tokens."""
    world = World(found=(4, 0), max_batch_tokens=3)
    world.run(*(world.job(i, tokens=4 * BLOCK) for i in range(5)))
    assert world.at(PrefillStarted) == [(0.0, 0), (0.0, 1), (0.0, 2), (1.0, 3), (1.0, 4)]


def test_a_packed_iteration_does_not_wait_for_a_prefix():
    """A prompt whose prefix is on its way is not part of the iteration that starts before, nor those behind it."""
    world = World(max_batch_tokens=9000)
    world.run(world.job(0), world.job(1, fetched_s=0.5), world.job(2))
    assert world.at(PrefillStarted) == [(0.0, 0), (1.0, 1), (1.0, 2)]


def test_a_group_begins_the_next_prompt_when_its_first_node_is_free():
    """The second prompt begins after the first stage, and is told when the other nodes will be free."""
    world = World(stages=(1.0, 2.5, 4.0))
    world.run(world.job(0), world.job(1))
    assert world.at(PrefillStarted) == [(0.0, 0), (1.0, 1)]
    assert [event.at_s for event in world.events if isinstance(event, PrefillSlotFree)] == [1.0, 2.0]
    assert world.at(PrefillDone) == [(4.0, 0), (5.0, 1)]
    assert world.asked[1][-1] == [0.0, 1.5, 3.0]
    assert world.streams == [(0, 4.0), (1, 4.0)]


def test_an_idle_group_has_no_busy_node():
    """Long after a prompt, every node is free at once."""
    world = World(stages=(1.0, 2.0))
    world.run(world.job(0))
    world.loop.call_later(8.0, world.instance.submit, world.job(1))
    world.loop.run()
    assert world.asked[1][-1] == [0.0, 0.0]


def test_prompts_wait_for_their_prefix_in_order():
    """The first prompt waits for its prefix, and the others wait behind it."""
    world = World()
    world.run(*(world.job(i, fetched_s=at_s) for i, at_s in enumerate((3.0, 5.0, 0.5))))
    assert world.at(PrefillStarted) == [(3.0, 0), (5.0, 1), (6.0, 2)]


def test_a_ready_prompt_may_go_first_where_that_is_allowed():
    """Each prompt that is ready is found, however many before it wait."""
    world = World(overtaking=True)
    world.run(*(world.job(i, fetched_s=at_s) for i, at_s in enumerate((9.0, 7.0, 0.5, 0.5))))
    assert world.at(PrefillStarted) == [(0.5, 2), (1.5, 3), (7.0, 1), (9.0, 0)]


def test_a_cancelled_prompt_is_dropped_or_computed_for_nothing():
    """A prompt that is cancelled while it waits is dropped; one under way is computed, kept, and not sent."""
    world = World(stages=(2.0,))
    jobs = [world.job(i) for i in range(3)]

    def cancel():
        jobs[0].cancelled = jobs[1].cancelled = True

    world.loop.call_later(1.0, cancel)
    world.run(*jobs)
    assert world.at(PrefillDropped) == [(2.0, 1)]
    assert world.at(PrefillDone) == [(2.0, 0), (4.0, 2)]
    assert [request_id for *_, request_id in world.kept] == [0, 2]
    assert world.sent == [(4.0, 2)]


def test_an_instance_that_fails_reports_nothing_more():
    """Neither the prompt under way nor those that wait are done after a failure."""
    world = World(stages=(2.0,))
    world.loop.call_later(1.0, world.instance.stop)
    world.run(world.job(0), world.job(1))
    assert world.at(PrefillStarted) == [(0.0, 0)]
    assert not world.at(PrefillDone)
    assert not world.kept
