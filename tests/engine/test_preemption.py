"""Engines with little memory: whatever is preempted, evicted or reused, every request gets its own tokens."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import BATCHING_POLICIES, named_policy
from mooncake_lab.engine import EngineSettings, GenerationRequest, Sampling, load_model
from mooncake_lab.engine.loop import Engine

COUPLED = sorted(set(BATCHING_POLICIES) - {"prefill_only", "decode_only"})
PROMPT_START = tuple(range(3, 27))
"""Prompts begin alike, up to a point."""


@pytest.fixture(scope="module")
def model():
    """A random model of two layers."""
    return load_model("random:lab-tiny", device="cpu", positions=256)


@st.composite
def generations(draw):
    """A request: a prompt that shares some of its beginning, greedy or drawn from a seed."""
    shared, own = draw(st.integers(0, 24)), draw(st.lists(st.integers(0, 255), min_size=1, max_size=19))
    temperature, top_p = draw(st.sampled_from([(0.0, 1.0), (0.8, 1.0), (0.8, 0.9)]))
    return GenerationRequest(
        prompt=[*PROMPT_START[:shared], *own],
        max_new_tokens=draw(st.integers(1, 19)),
        end_tokens=(),
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=draw(st.integers(0, 99))),
    )


def little(cache_blocks, **knobs):
    """An engine's settings with so little memory that requests push each other out."""
    return EngineSettings(block_size_tokens=4, cache_blocks=cache_blocks, keep_log=False, **knobs)


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(generations(), min_size=2, max_size=6),
    policy=st.sampled_from(COUPLED),
    cache_blocks=st.sampled_from([17, 20, 24, 40]),
    max_batch_tokens=st.sampled_from([48, 64]),
    max_requests=st.sampled_from([2, 4, 8]),
    pauses=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_tokens_do_not_depend_on_company(
    model, asked, policy, cache_blocks, max_batch_tokens, max_requests, pauses
):
    """Under any policy, in little memory, twice in a row: the tokens of an engine that serves one at a time."""
    alone = [
        Engine(model, named_policy("vllm"), little(32, prefix_caching=False)).generate([one]) for one in asked
    ]
    engine = Engine(
        model,
        named_policy(policy),
        little(cache_blocks, max_batch_tokens=max_batch_tokens, max_requests=max_requests),
    )
    steps = iter(pauses)
    for _ in range(2):
        ids, outputs = [], {}
        for one in asked:
            ids.append(engine.submit(one))
            if next(steps):
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= {output.request_id: output for output in engine.run()}
        engine.instance.check()
        assert [outputs[i].tokens for i in ids] == [each[0].tokens for each in alone]


def test_a_preempted_request_is_no_hit(model):
    """Where no prompt shares a block, none is reused, though preempted requests find their own blocks again."""
    asked = [
        GenerationRequest(prompt=[10 * i + k % 7 for k in range(17)], max_new_tokens=24, end_tokens=())
        for i in range(4)
    ]
    outputs = Engine(model, named_policy("vllm"), little(24, max_batch_tokens=64)).generate(asked)
    counted = Counter(output.preemptions > 0 for output in outputs)
    assert counted[True] > 0
    assert [output.reused_tokens for output in outputs] == [0] * len(asked)
