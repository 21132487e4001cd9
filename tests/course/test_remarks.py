"""From a remark alone a reader can compute the right answer: it holds all that the case depends on."""

import ast
import dataclasses
import re

import pytest

from mooncake_lab.batching import Plan, Segment
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import ClusterView, DecodeView, KVCacheCentric, LatencyEstimator, PrefillView
from mooncake_lab.core import Request
from mooncake_lab.course.grading.cache_assignments import KEYS
from mooncake_lab.course.grading.grade import Mark
from mooncake_lab.course.grading.remote import SubmissionError
from mooncake_lab.course.grading.scheduling_assignments import CHUNKED, PLACEMENT
from mooncake_lab.store.replay import replay

ESTIMATE = LatencyEstimator(paper_node_latency())
RIGHT = KVCacheCentric()


class Fake:
    """A submission in this process: functions by name, and one object whose methods they are."""

    def __init__(self, **functions):
        self.functions = functions

    def make(self, *_):
        return 0

    def call(self, name, *arguments, **_):
        return self.functions[name](*arguments)

    def ask(self, _number, method, *arguments, **_):
        return self.functions[method](*arguments)


def remark(task, seed, **functions):
    """What is said of a wrong answer, as a page shows it; empty where the answers are right."""
    try:
        task.check(Fake(**functions), f"{seed}/{task.name}")
    except SubmissionError as error:
        said = Mark(task=task.name, points=1, earned=0, said=str(error)).said
        assert not said.endswith("…"), said
        return said
    return ""


def without_flows(request, view):
    """Algorithm 1 of a student who forgets the outgoing transfers."""
    idle = tuple(node.replace(outgoing_flows=0) for node in view.prefill)
    return RIGHT.place(request, view.replace(prefill=idle), ESTIMATE)


def without_queues(request, view):
    idle = tuple(node.replace(backlog_s=0.0) for node in view.prefill)
    return RIGHT.place(request, view.replace(prefill=idle), ESTIMATE)


def never_fetches(request, view):
    return KVCacheCentric(1e9).place(request, view, ESTIMATE)


def from_behind(request, view):
    return RIGHT.place(request, view.replace(prefill=view.prefill[::-1]), ESTIMATE)


def shorter_prompts(request, view):
    size = request.block_size_tokens
    shorter = dataclasses.replace(
        request, input_tokens=request.input_tokens - size, block_keys=request.block_keys[:-1]
    )
    return RIGHT.place(shorter, view, ESTIMATE)


NODE = re.compile(r"(prefill-\d+) ([\d.e-]+) s (\d+) blocks (\d+) flows")
PROMPT = re.compile(r"a prompt of (\d+) blocks of (\d+) tokens")
VERDICT = re.compile(r"\] (\w+) must be (.+), not (.+)$")


@pytest.mark.parametrize("policy", [without_flows, without_queues, never_fetches, from_behind, shorter_prompts])
def test_the_case_of_a_placement_is_in_its_remark(policy):
    """Algorithm 1 on the cluster of the remark gives the answer that the remark calls right, on 20 seeds."""
    seen = 0
    for seed in range(20):
        for task in PLACEMENT.tasks[:4]:
            said = remark(task, seed, place=policy)
            if not said:
                continue
            seen += 1
            blocks, size = map(int, PROMPT.search(said).groups())
            prefill = tuple(
                PrefillView(name, float(backlog), 0, 0, int(matched), int(flows))
                for name, backlog, matched, flows in NODE.findall(said)
            )
            field, right, wrong = VERDICT.search(said).groups()
            request = Request(
                id=0,
                arrival_s=0.0,
                input_tokens=blocks * size,
                block_keys=tuple(range(blocks)),
                block_size_tokens=size,
            )
            view = ClusterView(0.0, prefill, (DecodeView("decode-0", 1, 1, 10**6),))
            assert getattr(RIGHT.place(request, view, ESTIMATE), field) == ast.literal_eval(right)
            assert getattr(policy(request, view), field) == ast.literal_eval(wrong)
    assert seen


def own_block_only(tokens, size):
    return [hash(tuple(tokens[i : i + size])) for i in range(0, len(tokens), size)]


def always_new(tokens, size):
    return [hash((tuple(tokens), i)) for i in range(0, len(tokens), size)]


@pytest.mark.parametrize("keys", [own_block_only, always_new])
def test_prompts_are_in_the_remarks_on_keys(keys):
    """The prompts of the remark, put to the function again, show the fault that the remark states."""
    for seed in range(20):
        said = remark(KEYS.tasks[1], seed, chain_keys=keys)
        first, second = (ast.literal_eval(text) for text in re.findall(r"\[[\d, ]+\]", said))
        size = int(re.search(r"in blocks of (\d)$", said)[1])
        ours, theirs = keys(first, size), keys(second, size)
        starts = range(0, len(first), size)
        differs = next(n for n, i in enumerate(starts) if first[i : i + size] != second[i : i + size])
        if shared := re.search(r"differ in block (\d) share the key of block (\d)", said):
            assert int(shared[1]) == differs
            assert ours[int(shared[2])] == theirs[int(shared[2])]
        else:
            assert said.startswith("equal first blocks of two prompts have different keys")
            assert ours[:differs] != theirs[:differs]
    if keys is own_block_only:
        said = remark(KEYS.tasks[2], 1, chain_keys=keys)
        block = ast.literal_eval(re.search(r"\[[\d, ]+\]", said)[0])
        assert len(set(keys(block * 5, 4))) == int(re.search(r"returned (\d) different", said)[1]) == 1


def test_a_trace_is_in_the_remark_on_hit_rates():
    """LRU on the requests of the remark has the hit rate that it states: FIFO fails on a trace one can read."""

    def fifo(requests, capacity):
        return replay(requests, "fifo", capacity).hit_rate

    for seed in range(20):
        said = remark(KEYS.tasks[4], seed, lru_hit_rate=fifo)
        requests = ast.literal_eval(re.search(r"\[\[.*\]\]", said)[0])
        capacity = int(re.search(r"cache of (\d+) blocks", said)[1])
        right, wrong = re.search(r"hit rate of ([\d.]+) for.*, not ([\d.]+)$", said).groups()
        assert f"{replay(requests, 'lru', capacity).hit_rate:.4f}" == right
        assert f"{fifo(requests, capacity):.4f}" == wrong


def chunks_of(size, *, stalls=False):
    """A policy that fills chunks of this size, with all decodes, or with none where a prompt is computed."""

    def plan(waiting, running, limits):
        segments, left = [], size
        for one in (*running, *waiting[: limits.max_requests - len(running)]):
            new = min(left, one.pending_tokens)
            if not one.decoding and new:
                left -= new
                emits = new == one.pending_tokens
                segments.append(Segment(one.request_id, "prefill", new, one.cached_tokens, emits))
        if not (stalls and segments):
            segments += [
                Segment(one.request_id, "decode", 1, one.cached_tokens, True) for one in running if one.decoding
            ]
        return Plan(segments=tuple(segments))

    return plan


@pytest.mark.parametrize(
    ("task", "policy"), [(1, chunks_of(40)), (2, chunks_of(16, stalls=True)), (3, chunks_of(8))]
)
def test_what_a_batching_policy_saw_is_in_the_remarks(task, policy):
    """Large chunks, a stalled decode and small chunks can be seen in the pending tokens and the plan."""
    said = remark(CHUNKED.tasks[task], 1, plan=policy)
    running, waiting, planned = re.search(r"; running (.*), waiting (.*); planned (.*)\)$", said).groups()
    states, chunks = (
        dict(each.split(":") for each in text.split() if ":" in each) for text in (f"{running} {waiting}", planned)
    )
    tokens = sum(int(new) for name, new in chunks.items() if states[name] != "decode")
    omitted = [int(name) for name, state in states.items() if state == "decode" and name not in chunks]
    stated = {
        1: f"computes {tokens} prompt tokens; a chunk has 16",
        2: f"request {min(omitted, default=None)} could decode",
        3: f"must be {next(iter(states))}:16: 16 tokens where there are as many, running requests first",
    }
    assert stated[task] in said
    assert tokens == {1: tokens, 2: 16, 3: 8}[task]


def test_the_prompt_of_wrong_tokens_is_in_the_remark(monkeypatch):
    """The longest prompt fits, with both continuations."""
    prompts = [[99] * 89, [98] * 89]
    continued = [[97] * 8, [96] * 8]
    monkeypatch.setattr(
        "mooncake_lab.course.grading.scheduling_assignments._reference", lambda _: (prompts, continued)
    )
    monkeypatch.setattr(
        "mooncake_lab.course.grading.scheduling_assignments._generate", lambda *_: [continued[0], [95] * 8]
    )
    said = remark(CHUNKED.tasks[4], 1)
    lists = [[*map(int, text.split())] for text in re.findall(r"\[([\d ]+)\]", said)]
    assert lists == [prompts[1], [95] * 8, continued[1]]
