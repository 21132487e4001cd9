"""With a metronome workers compute real tokens at a given pace, and the simulator predicts their log."""

from dataclasses import replace

import numpy as np
import pytest

from mooncake_lab.core import DecodeStretch, Prefilled
from mooncake_lab.perf import HybridLatency
from mooncake_lab.serving import pacer as pacer_module
from mooncake_lab.serving.pacer import Pacer
from mooncake_lab.simulation.instances import PromptPart, prefill_finish_s


@pytest.fixture(scope="module")
def slow(believed):
    """A pace far below what any machine computes of these models."""
    prefill = replace(believed.prefill, constant_s=0.02, per_token_s=4e-4)
    decode = replace(believed.decode, constant_s=0.02, per_request_s=1e-3)
    return replace(believed, prefill=prefill, decode=decode, hybrid=HybridLatency.of(prefill, decode))


def lasted(log):
    """The seconds of prefills and of decode steps, with what the model says of each."""
    return [one for one in log if isinstance(one, Prefilled)], [
        one for one in log if isinstance(one, DecodeStretch)
    ]


def test_nothing_is_faster_than_the_beat(open_cluster, traced, expected, slow):
    """Tokens are those of an undisturbed engine; no prefill and no decode step is shorter than the model says."""
    requests = traced(6, every_s=0.02, output_tokens=6)
    with open_cluster(pacer=Pacer.of(slow)) as live:
        log = live.run(requests)
        assert live.outputs == expected(requests)
    prefills, steps = lasted(log)
    for one in prefills:
        tokens = one.computed_tokens + one.reused_tokens
        assert one.at_s - one.start_s >= slow.prefill.seconds(tokens, one.reused_tokens) - 1e-6
    for one in steps:
        batch = len(one.request_ids)
        least_s = slow.decode.step_s(batch, 70 * batch)
        assert one.steps * one.first_step_s == 0 or one.first_step_s >= least_s - 1e-6
    assert len(prefills) == len(requests)


def test_packed_prompts_keep_the_time_of_the_simulation(monkeypatch, slow):
    """Prompts that begin together last as long as on a simulated prefill instance, one alone as its prefill."""
    held = []
    monkeypatch.setattr(pacer_module, "_hold", held.append)
    prompts = [(512, 0), (256, 128), (64, 48)]
    for some in (prompts[:1], prompts):
        Pacer.of(slow).hold_prefill(3.0, some)
        parts = [PromptPart(*prompt, ssd_tokens=0) for prompt in some]
        [simulated_s] = prefill_finish_s(slow, None, parts)
        assert held.pop() == pytest.approx(3.0 + simulated_s)


def test_coupled_iterations_keep_it_too(open_cluster, traced, expected, slow):
    """Iterations that mix prompts and decodes last at least as long as the hybrid step."""
    requests = traced(4, every_s=0.01, output_tokens=6)
    pace = Pacer.of(slow)
    with open_cluster(coupled_nodes=1, pacer=pace) as live:
        log = live.run(requests)
        assert live.outputs == expected(requests)
    for one in log:
        if isinstance(one, Prefilled):
            assert one.at_s - one.start_s >= slow.hybrid.step_s(one.computed_tokens, one.reused_tokens) - 1e-6


def test_pieces_of_one_prompt_cost_what_the_prompt_does(slow):
    """The attention of a batch is the sum over its prompts, and one piece alone is a plain step."""
    hybrid = slow.hybrid
    assert hybrid.batch_s([(64, 128)], 3, 500) == pytest.approx(hybrid.step_s(64, 128, 3, 500))
    both = hybrid.batch_s([(64, 0), (64, 0)], 0, 0)
    assert both < hybrid.batch_s([(128, 0)], 0, 0)
    pairs = np.array([64**2 * 2, 128**2])
    assert hybrid.batch_s([(128, 0)], 0, 0) - both == pytest.approx(
        hybrid.per_token_squared_s * (pairs[1] - pairs[0])
    )
