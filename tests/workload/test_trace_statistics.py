"""Statistics of traces, and what their requests share."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.workload import (
    SharedPrefix,
    TraceStatistics,
    conversation_sizes,
    request_of_block,
    reusable_blocks,
    reuse_gaps_s,
    seen_before,
    statistics,
    use_counts,
    with_larger_blocks,
)


class TestByHand:
    def test_a_small_trace(self, make_trace):
        """Uses, reuse, gaps and front blocks of four requests are what a person counts."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3], [0, 9, 1], arrival_s=[0.0, 1.0, 4.0, 9.0])
        assert use_counts(trace).tolist() == [4, 3, 1, 1, 1]
        assert request_of_block(trace).tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
        assert seen_before(trace).tolist() == [False, False, True, False, True, True, False, True, False, True]
        assert sorted(reuse_gaps_s(trace).tolist()) == [1.0, 3.0, 4.0, 5.0, 5.0]

    def test_reuse_stops_at_the_first_gap(self, make_trace):
        """A block behind one that is new cannot be reused, though it was seen before."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3], [0, 9, 1])
        assert reusable_blocks(trace).tolist() == [0, 1, 2, 1]

    def test_conversations(self, make_trace):
        """Requests group by their first block that is not everybody's; one that has none stands alone."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3], [0], [0, 1, 3, 4])
        assert conversation_sizes(trace, common_share=0.7).tolist() == [3, 1, 1]

    @pytest.mark.parametrize("share", [0, 1.5, -0.1])
    def test_common_share_is_a_share(self, make_trace, share):
        """A share outside (0, 1] is refused."""
        with pytest.raises(ValueError, match="common_share"):
            conversation_sizes(make_trace([0]), common_share=share)


class TestLawsOfSharing:
    @given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 5), st.integers(0, 3))
    def test_everything_adds_up(self, requests, prefixes, shared_blocks, seed):
        """Unique blocks plus reuses are all blocks, gaps are one a reuse, conversations hold all requests."""
        recipe = SharedPrefix(
            requests=requests, requests_per_s=2, input_tokens=40, shared_tokens=8 * shared_blocks,
            output_tokens=1, prefixes=prefixes, block_size_tokens=8,
        )  # fmt: skip
        trace = recipe.make(seed=seed)
        reuses = int(seen_before(trace).sum())
        assert use_counts(trace).sum() == len(trace.block_ids)
        assert len(use_counts(trace)) + reuses == len(trace.block_ids)
        assert len(reuse_gaps_s(trace)) == reuses
        assert (reuse_gaps_s(trace) >= 0).all()
        assert reusable_blocks(trace).sum() == reuses  # here reuse is always at the front
        assert conversation_sizes(trace).sum() == requests


class TestReleasedSharing:
    def test_front_blocks(self, released, reference):
        """Requests by reusable front blocks, in a cache that never forgets, are as recounted."""
        found = np.bincount(np.minimum(reusable_blocks(released), 5), minlength=6)
        names = [f"requests_reusing_{k}_blocks" for k in range(5)] + ["requests_reusing_5_or_more_blocks"]
        assert found.tolist() == [reference[released.name, name] for name in names]

    @pytest.mark.parametrize("uses", [1, 2, 3, 4, 5, 10, 20])
    def test_use_counts(self, released, reference, uses):
        """The share of blocks used at most so often is as recounted."""
        expected = reference[released.name, f"share_of_blocks_used_at_most_{uses}"]
        assert (use_counts(released) <= uses).mean() == pytest.approx(expected, rel=1e-12)


class TestLargerBlocks:
    def test_by_hand(self, make_trace):
        """Joined in pairs, a block is named by the last of the two, and an odd one out stands alone."""
        trace = make_trace([0, 1, 2], [0, 1, 3, 4], [0, 9])
        joined = with_larger_blocks(trace, 2)
        assert [joined.blocks_of(i).tolist() for i in range(3)] == [[1, 2], [1, 4], [9]]
        assert joined.block_size_tokens == 8

    @given(st.integers(1, 30), st.integers(0, 6), st.integers(1, 40), st.integers(1, 7))
    def test_requests_stay_consistent(self, requests, shared_blocks, own_tokens, factor):
        """Every request of the coarser trace has as many ids as its prompt needs, and hits no more tokens."""
        recipe = SharedPrefix(
            requests=requests,
            requests_per_s=2,
            input_tokens=8 * shared_blocks + own_tokens,
            shared_tokens=8 * shared_blocks,
            output_tokens=1,
            block_size_tokens=8,
        )
        trace = recipe.make()
        joined = with_larger_blocks(trace, factor)
        assert len(list(joined.requests())) == requests
        assert statistics(joined).ideal_token_hit_rate <= statistics(trace).ideal_token_hit_rate

    def test_bad_factor(self, make_trace):
        """A factor below one is refused."""
        with pytest.raises(ValueError, match="cannot join 0 blocks"):
            with_larger_blocks(make_trace([0]), 0)


def flat(numbers: TraceStatistics) -> dict[str, float]:
    """The statistics by name, those of a spread as `input_tokens.p50`."""
    result = {}
    for name, value in asdict(numbers).items():
        result |= (
            {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return result


class TestReleased:
    def test_every_number_is_as_recounted(self, released, reference):
        """All statistics of a released trace equal those recounted from the file apart from this package."""
        found = flat(statistics(released))
        expected = {name: value for (trace, name), value in reference.items() if trace == released.name}
        assert found == {name: pytest.approx(expected[name], rel=1e-9) for name in found}


class TestLaws:
    def test_only_the_first_arrival_counts_from(self, make_trace):
        """Shifting all arrivals changes no statistic."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3])
        assert statistics(replace(trace, arrival_s=trace.arrival_s + 64)) == statistics(trace)

    def test_block_names_do_not_matter(self, make_trace):
        """Renaming blocks one for one changes no statistic."""
        trace = make_trace([0, 1], [0, 2], [0, 1, 3])
        renamed = replace(trace, block_ids=(trace.block_ids * 31 + 7) % 101 - 50)
        assert statistics(renamed) == statistics(trace)

    def test_token_hits_never_exceed_the_prompt(self, make_trace):
        """A reused last block that is only partly full counts only the tokens in it."""
        trace = replace(make_trace([0, 1], [0, 1]), input_tokens=np.array([5, 5]))
        assert statistics(trace).ideal_token_hit_rate == 0.5


class TestEdges:
    def test_one_request(self, make_trace):
        """A single request has no rate, no gaps and no reuse, and says so with None."""
        numbers = statistics(make_trace([0]))
        assert (numbers.duration_s, numbers.requests_per_s, numbers.interarrival_cv) == (0, None, None)
        assert (numbers.ideal_block_hit_rate, numbers.mean_reuse_gap_s, numbers.single_use_share) == (0, None, 1)

    def test_nothing(self, make_trace):
        """An empty trace has no statistics."""
        with pytest.raises(ValueError, match="no requests"):
            statistics(make_trace([0]).head(0))
