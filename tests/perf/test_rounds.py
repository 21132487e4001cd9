"""Rounds of equal requests: integer laws of coverage, the balance, and what accounts must add up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.batching import Limits, Progress, Sarathi, trace_plans
from mooncake_lab.perf import (
    IterationCost,
    LinearCost,
    Workload,
    balanced_ratio,
    decode_accounts,
    piggyback_round,
    separate_round,
)

LINEAR = LinearCost(((4.0, 0.040), (128.0, 0.050), (256.0, 0.070), (1024.0, 0.22)))
COST = IterationCost(name="a test", linear=LINEAR, per_pair_s=2e-8, per_context_token_s=1.4e-6, beside_s=1e-3)
settings = st.tuples(st.integers(2, 12), st.integers(1, 5), st.integers(1, 120))


@given(settings, st.integers(1, 60))
def test_coverage(setting, chunk):
    """Prompts of k whole chunks: B k iterations carry one, and D - (B-1) k, if any are left, are decodes only."""
    batch, pieces, steps = setting
    work = Workload(prompt_tokens=chunk * pieces, decode_steps=steps, batch=batch)
    found = piggyback_round(COST, work, chunk + batch - 1)
    assert found.hybrid_iterations == batch * pieces
    assert found.decode_iterations == max(steps - (batch - 1) * pieces, 0)


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 9))
def test_the_policy_reaches_the_coverage_of_the_formula(batch, pieces, extra):
    """In the middle of a long run the SARATHI policy has, a round, the iterations that the formula counts."""
    chunk, steps = 5, (batch - 1) * pieces + extra
    work = Workload(prompt_tokens=chunk * pieces, decode_steps=steps, batch=batch)
    rounds = [10, 14]
    counts = []
    for many in rounds:
        requests = [
            Progress(request_id=i, arrival=i, prompt_tokens=work.prompt_tokens, max_new_tokens=steps + 1)
            for i in range(many * batch)
        ]
        limits = Limits(
            max_batch_tokens=100,
            max_requests=batch,
            block_size_tokens=1,
            capacity_blocks=10_000,
            free_blocks=10_000,
        )
        policy = Sarathi(chunk_tokens=chunk + batch - 1, chunk="fixed")
        log = trace_plans(policy, requests, limits, dict.fromkeys(range(many * batch), steps + 1))
        counts.append([len(log), sum(bool(step.plan.prefills) for step in log)])
    (total, with_prompt) = ((b - a) / (rounds[1] - rounds[0]) for a, b in zip(*counts, strict=True))
    formula = piggyback_round(COST, work, chunk + batch - 1)
    assert with_prompt == formula.hybrid_iterations
    assert total == pytest.approx(formula.hybrid_iterations + formula.decode_iterations, abs=1.0)


@given(st.integers(2, 30), st.integers(1, 8), st.integers(1, 8))
def test_at_the_balance_prompts_are_whole_chunks(batch, pieces, chunk):
    """Where C divides the length, the balanced prompt is L/C chunks and its decodes fill every place."""
    fused = chunk * batch + batch
    work = Workload.balanced(pieces * fused, fused, batch)
    assert work.prompt_tokens == pieces * (fused - (batch - 1))
    assert work.decode_steps == pieces * (batch - 1)
    found = piggyback_round(COST, work, fused)
    assert (found.hybrid_iterations, found.decode_iterations) == (batch * pieces, 0)


@given(st.integers(2, 30), st.integers(1, 500))
def test_the_printed_ratio_is_one_too_many(batch, chunk):
    """C/(B-1) of the paper's text is the balance plus one."""
    fused = chunk + batch - 1
    assert fused / (batch - 1) == pytest.approx(balanced_ratio(fused, batch) + 1)


@given(settings)
def test_the_mean_context_is_that_of_each_decode_step(setting):
    """Each step attends to the prompt and to what was decoded up to its own token."""
    batch, prompt, steps = setting
    work = Workload(prompt_tokens=prompt, decode_steps=steps, batch=batch)
    assert work.mean_context_tokens == sum(prompt + step for step in range(1, steps + 1)) / steps


@given(settings)
def test_the_linear_part_is_all_that_is_gained(setting):
    """Decode attention is the same work beside chunks as alone, but for the kernels where both meet."""
    batch, pieces, steps = setting
    work = Workload(prompt_tokens=100 * pieces, decode_steps=steps, batch=batch)
    alone, together = separate_round(COST, work), piggyback_round(COST, work, 100 + batch - 1)
    met = together.decode_attention_s - COST.beside_s * together.hybrid_iterations
    assert met == pytest.approx(alone.decode_attention_s)
    assert together.chunk_attention_s >= alone.chunk_attention_s - 1e-12


@given(settings, st.integers(1, 60))
def test_a_round_is_the_sum_of_its_iterations(setting, chunk):
    """Where each piece has equally many decodes beside it: all pieces of all prompts, then the other decodes."""
    batch, pieces, each = setting
    places = batch - 1
    steps = pieces * min(each, places) + max(each - places, 0)  # those beyond the places decode alone
    work = Workload(prompt_tokens=chunk * pieces, decode_steps=steps, batch=batch)
    found, context = piggyback_round(COST, work, chunk + places), work.mean_context_tokens
    beside = min(each, places)
    mixed_s = sum(COST.step_s(chunk, chunk * piece, beside, beside * context) for piece in range(pieces))
    alone_s = COST.step_s(0, 0, batch, batch * context)
    assert found.seconds == pytest.approx(batch * mixed_s + (steps - pieces * beside) * alone_s)


@given(settings)
def test_filled_chunks_never_need_more_iterations(setting):
    """Chunks that grow into empty places need at most as many iterations as fixed ones."""
    batch, pieces, steps = setting
    work = Workload(prompt_tokens=37 * pieces, decode_steps=steps, batch=batch)
    fixed, filled = (piggyback_round(COST, work, 20 + batch, filled=each) for each in (False, True))
    assert filled.hybrid_iterations <= fixed.hybrid_iterations


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 11), st.integers(1, 200))
def test_filled_chunks_leave_no_hole(batch, pieces, each, chunk):
    """Where chunks grow into the places that decodes leave empty, each iteration computes all its tokens."""
    each = min(each, batch - 1)
    fused, steps = chunk + batch - 1, max(1, pieces * each)
    work = Workload(prompt_tokens=pieces * fused - steps, decode_steps=steps, batch=batch)
    found = piggyback_round(COST, work, fused, filled=True)
    assert found.linear_s == pytest.approx(batch * pieces * LINEAR.seconds(fused))


def test_an_uncut_prompt_is_one_iteration():
    """Orca-best computes each prompt at once."""
    work = Workload(prompt_tokens=700, decode_steps=5, batch=4)
    assert piggyback_round(COST, work).hybrid_iterations == 4


@given(st.integers(2, 40), st.integers(50, 400), st.integers(1, 4000))
def test_accounts_are_in_order(batch, chunk, context):
    """The marginal account is the cheapest; both orders average to the account by lot."""
    fused = chunk + batch - 1
    found = decode_accounts(COST, fused_tokens=fused, batch=batch, context_tokens=context)
    riders = batch - 1
    first_s = COST.step_s(0, 0, riders, riders * context) / riders
    assert found.marginal_s < found.by_token_s + 1e-12
    assert found.by_order_s == pytest.approx((found.marginal_s + first_s) / 2)


def test_impossible_settings_are_refused():
    """A batch of one has no balance, decodes may not crowd out the chunk, and requests have tokens."""
    work = Workload(prompt_tokens=10, decode_steps=1, batch=8)
    with pytest.raises(ValueError, match="no balance"):
        balanced_ratio(256, 1)
    with pytest.raises(ValueError, match="leave no chunk"):
        piggyback_round(COST, work, 7)
    with pytest.raises(ValueError, match="below 1"):
        Workload(prompt_tokens=0, decode_steps=1, batch=1)
