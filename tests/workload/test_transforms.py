"""Other arrivals, larger blocks, shorter prompts: what they change and what they keep."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.workload import (
    SharedPrefix,
    Trace,
    load,
    poisson_arrivals_s,
    read_trace,
    statistics,
    tick_s,
    with_poisson_arrivals,
    with_spread_arrivals,
)
from mooncake_lab.workload.transforms import prompt_of, scaled_down

RECIPE = SharedPrefix(
    requests=40,
    requests_per_s=2,
    input_tokens=50,
    shared_tokens=24,
    output_tokens=9,
    prefixes=3,
    block_size_tokens=8,
)


class TestPoisson:
    @pytest.mark.parametrize("seed", range(4))
    def test_mean_rate(self, seed):
        """20,000 arrivals come at the asked rate within four standard errors."""
        last_s = poisson_arrivals_s(20_000, 5.0, seed=seed)[-1]
        assert last_s * 5.0 / 20_000 == pytest.approx(1, abs=4 / np.sqrt(20_000))

    @pytest.mark.parametrize("seed", range(4))
    def test_gaps_are_exponential(self, seed):
        """The gaps' distribution function stays within the Kolmogorov bound of the exponential's (at 0.1 %)."""
        gaps_s = np.sort(np.diff(poisson_arrivals_s(20_001, 5.0, seed=seed)))
        expected = 1 - np.exp(-5.0 * gaps_s)
        steps = np.arange(20_001) / 20_000
        distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
        assert distance < 1.95 / np.sqrt(20_000)

    def test_seeds(self):
        """The same seed gives the same arrivals, another seed others."""
        assert (poisson_arrivals_s(9, 1.0, seed=1) == poisson_arrivals_s(9, 1.0, seed=1)).all()
        assert (poisson_arrivals_s(9, 1.0, seed=1) != poisson_arrivals_s(9, 1.0, seed=2)).all()

    @pytest.mark.parametrize("rate", [0, -1, np.inf, np.nan])
    def test_bad_rate(self, rate):
        """A rate that is not a positive number is refused."""
        with pytest.raises(ValueError, match="requests_per_s"):
            poisson_arrivals_s(3, rate)

    def test_on_a_trace(self, make_trace):
        """New arrivals keep the requests and their order, and the source says what was done."""
        trace = make_trace([0, 1], [0, 2])
        poisson = with_poisson_arrivals(trace, 3.0, seed=4)
        assert (poisson.block_ids == trace.block_ids).all()
        assert (np.diff(poisson.arrival_s) > 0).all()
        assert poisson.source == "made by a test, Poisson arrivals at 3/s, seed 4"


class TestSharedPrefix:
    @given(st.integers(1, 50), st.integers(1, 4), st.integers(0, 6), st.integers(0, 7), st.integers(0, 99))
    def test_the_hit_rate_is_known(self, requests, prefixes, shared_blocks, own_tokens, seed):
        """Every request hits its whole prefix, except the first of each prefix; nothing else is shared."""
        if shared_blocks + own_tokens == 0:
            own_tokens = 1
        recipe = SharedPrefix(
            requests=requests, requests_per_s=1, input_tokens=8 * shared_blocks + own_tokens,
            shared_tokens=8 * shared_blocks, output_tokens=1, prefixes=prefixes, block_size_tokens=8,
        )  # fmt: skip
        trace = recipe.make(seed=seed)
        assert sum(1 for _ in trace.requests()) == requests
        numbers = statistics(trace)
        used = len(np.unique(trace.block_ids[trace.block_starts[:-1]])) if shared_blocks else 0
        expected = (requests - used) * shared_blocks / numbers.blocks
        assert numbers.ideal_block_hit_rate == pytest.approx(expected)

    def test_prefixes_are_equally_likely(self):
        """Over many requests each prefix is chosen about as often as the others."""
        recipe = SharedPrefix(
            requests=9000, requests_per_s=1, input_tokens=16, shared_tokens=8, output_tokens=1, prefixes=3,
            block_size_tokens=8,
        )  # fmt: skip
        trace = recipe.make(seed=5)
        counts = np.unique(trace.block_ids[trace.block_starts[:-1]], return_counts=True)[1]
        assert (np.abs(counts - 3000) < 4 * np.sqrt(9000 * 2 / 9)).all()

    def test_seeds(self):
        """The same seed gives the same trace, another seed another."""
        assert (RECIPE.make(seed=1).block_ids == RECIPE.make(seed=1).block_ids).all()
        assert (RECIPE.make(seed=1).block_ids != RECIPE.make(seed=2).block_ids).any()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"requests": 0},
            {"requests_per_s": 0.0},
            {"requests_per_s": float("inf")},
            {"shared_tokens": 3},
            {"shared_tokens": 56},
            {"prefixes": 0},
            {"output_tokens": -1},
            {"block_size_tokens": 0},
        ],
    )
    def test_bad_recipe(self, wrong):
        """A recipe that makes no sense is refused, naming the field."""
        with pytest.raises(ValueError, match=f"SharedPrefix.{next(iter(wrong))}"):
            replace(RECIPE, **wrong)


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path)


def test_ids_may_be_hashes_of_64_bits(tmp_path):
    """Every id that a trace may have gives tokens: equal ids equal ones, different ids different ones."""
    ids = [0, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1]
    lines = [
        {"timestamp": 0, "input_length": 128, "output_length": 4, "hash_ids": [7, one], "trace_block_size": 64}
        for one in ids
    ]
    prompts = [prompt_of(traced.request, 1000) for traced in written(tmp_path / "t.jsonl", lines).requests()]
    assert {prompt[:64].tobytes() for prompt in prompts} == {prompts[0][:64].tobytes()}
    assert len({prompt[64:].tobytes() for prompt in prompts}) == len(ids)


def test_what_clients_allow_shrinks_with_the_answers(tmp_path):
    """A limit stays a limit of the divided answer, and belongs to the same request when others are left out."""
    lines = [
        {
            "timestamp": 0,
            "input_length": tokens,
            "output_length": 33,
            "hash_ids": [0] * -(-tokens // 512),
            "max_tokens": m,
        }
        for tokens, m in ((4096, 40), (64, 33), (512, None), (64, 500))
    ]
    small = scaled_down(written(tmp_path / "t.jsonl", lines), 32, most_tokens=60)
    assert np.array_equal(small.max_tokens, [2, 0, 16])
    assert [traced.output_tokens for traced in small.requests()] == [2, 2, 2]


@st.composite
def ticking(draw):
    """A tick, and stamps on its multiples that are off by up to a thousandth of it; some are shared."""
    tick = draw(st.floats(1e-3, 1e3))
    sizes = draw(st.lists(st.integers(0, 4), min_size=30, max_size=80).filter(lambda sizes: sum(sizes) > 40))
    off = draw(st.sampled_from([0.0, 1e-3]))
    noise = np.random.default_rng(draw(st.integers(0, 99))).uniform(-off, off, len(sizes))
    return tick, np.repeat(tick * (1 + np.arange(len(sizes)) + noise), sizes)


class TestSpreadArrivals:
    @given(ticking())
    def test_ticks_are_found(self, example):
        """Whatever the tick, with empty ticks and a clock that is a little off, its length is found."""
        tick, stamps = example
        assert tick_s(stamped(stamps)) == pytest.approx(tick, rel=1e-2)

    @given(ticking(), st.integers(0, 9))
    def test_each_arrival_stays_in_its_tick_and_in_order(self, example, seed):
        """No request arrives before its stamp, more than a tick after it, or before the one ahead of it."""
        _, stamps = example
        trace = stamped(stamps)
        spread = with_spread_arrivals(trace, seed=seed)
        assert (np.diff(spread.arrival_s) >= 0).all()
        after = spread.arrival_s - stamps
        assert after.min() >= 0
        assert after.max() <= tick_s(trace)
        assert (spread.block_ids == trace.block_ids).all()

    def test_moments_are_uniform(self):
        """The moments of 20,000 requests stay within the Kolmogorov bound of uniform (at 0.1 %)."""
        stamps = np.repeat(np.arange(4000) * 3.0, 5)
        moments = np.sort((with_spread_arrivals(stamped(stamps), seed=3).arrival_s - stamps) / 3)
        assert np.abs(moments - np.arange(20_000) / 20_000).max() < 1.95 / np.sqrt(20_000)

    def test_seeds(self):
        """The same seed gives the same moments, another seed others, and the source says what was done."""
        trace = stamped(np.repeat(np.arange(40) * 3.0, 2))
        first, again, other = (with_spread_arrivals(trace, seed=seed) for seed in (1, 1, 2))
        assert (first.arrival_s == again.arrival_s).all()
        assert (first.arrival_s != other.arrival_s).all()
        assert first.source == "made by a test, arrivals spread over ticks of 3 s, seed 1"

    @pytest.mark.parametrize(
        "stamps",
        [[], [2.0], [2.0, 2.0], np.arange(50.0), np.repeat(poisson_arrivals_s(500, 1.0), 2)],
        ids=["none", "one", "one stamp", "no stamp is shared", "pairs without ticks"],
    )
    def test_other_arrivals_stay(self, stamps):
        """A trace whose stamps do not come in ticks is returned as it is."""
        trace = stamped(stamps)
        assert tick_s(trace) == 0
        assert with_spread_arrivals(trace) is trace

    @pytest.mark.traces("conversation")
    def test_the_ticks_of_the_conversation_trace(self):
        """The released trace has ticks of three seconds, off by up to three milliseconds."""
        assert tick_s(load("conversation")) == pytest.approx(3, abs=1e-6)

    @pytest.mark.traces("synthetic")
    def test_the_synthetic_trace_has_none(self):
        """The released synthetic trace has arrivals of a Poisson process, and keeps them."""
        assert tick_s(load("synthetic")) == 0


def stamped(stamps):
    """A trace of one block a request."""
    count = len(stamps)
    return Trace(
        name="made",
        origin="file",
        arrival_s=np.array(stamps, dtype=np.float64),
        input_tokens=np.full(count, 9),
        output_tokens=np.ones(count, dtype=np.int64),
        block_ids=np.arange(count),
        block_starts=np.arange(count + 1),
        source="made by a test",
    )
