"""Bubbles of a pipeline, counted gap by gap."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.metrics.pipeline_bubbles import CAUSES, account, idle_share
from mooncake_lab.simulation import PipelineRun

ITERATIONS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 3), st.integers(1, 3)),
    min_size=1,
    max_size=12,
)
"""Of each: its micro-batch, prompt tokens, whether it had nothing to do, and how long it waits and runs (s)."""


def run_of(iterations, stages):
    """A pipeline in which each stage waits and runs as long as the others."""
    run, free_s = PipelineRun(requests=()), [0.0] * stages
    for batch, prompt_tokens, starved, waits_s, runs_s in iterations:
        ready_s, starts, ends = 0.0, [], []
        for stage in range(stages):
            starts.append(max(ready_s, free_s[stage]) + waits_s)
            ready_s = free_s[stage] = starts[-1] + runs_s
            ends.append(ready_s)
        run.start_s.append(starts)
        run.end_s.append(ends)
        run.micro_batch.append(batch)
        run.prompt_tokens.append(prompt_tokens)
        run.starved.append(starved)
    return run


def among(prompts):
    """The cause of a wait between iterations with prompts or without."""
    return "PB1" if all(prompts) else "PB2" if any(prompts) else "PB3"


@given(ITERATIONS, st.integers(1, 3))
def test_each_gap_has_the_cause_that_its_definition_says(iterations, stages):
    """The first is fill, the last drain; between them what was in flight counts, or the neighbour."""
    run = run_of(iterations, stages)
    prompts = [tokens > 0 for tokens in run.prompt_tokens]
    spent, entered = Counter(dict.fromkeys(("busy", *CAUSES), 0.0)), {}
    for i, batch in enumerate(run.micro_batch):
        for stage in range(stages):
            in_flight = prompts[entered.get(batch, 0) : i + 1] if stage == 0 else prompts[i - 1 : i + 1]
            cause = "fill" if i == 0 else "no work" if run.starved[i] else among(in_flight)
            spent[cause] += run.start_s[i][stage] - (run.end_s[i - 1][stage] if i else 0.0)
            spent["busy"] += run.end_s[i][stage] - run.start_s[i][stage]
        entered[batch] = i
    spent["drain"] = sum(run.makespan_s - end_s for end_s in run.end_s[-1])
    assert account(run) == pytest.approx(spent)
    assert idle_share(run) == pytest.approx(1 - spent["busy"] / (stages * run.makespan_s))


def test_nothing_has_no_bubbles():
    """A pipeline that ran nothing is refused."""
    with pytest.raises(ValueError, match="ran nothing"):
        account(PipelineRun(requests=()))
