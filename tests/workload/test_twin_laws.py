"""What is true of every twin, whatever the seed: it is a well-formed trace, and a deterministic one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from missing_here import RELEASED

from mooncake_lab.workload import load, read_trace, write_trace
from mooncake_lab.workload.twin import make_twin
from mooncake_lab.workload.twin.conversation import ConversationProcess, conversation
from mooncake_lab.workload.twin.drafts import Quantiles, spread, stream

NAMES = ("conversation", "synthetic", "toolagent", "arxiv")
twins = st.builds(make_twin, st.sampled_from(NAMES), seed=st.integers(0, 2**32), requests=st.integers(1, 3000))
drawn = settings(max_examples=15, deadline=None)


def columns(trace):
    """Everything a trace says about its requests, as bytes."""
    arrays = (trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.block_ids, trace.block_starts)
    return [array.tobytes() for array in arrays]


class TestShape:
    @given(twins)
    @drawn
    def test_it_is_a_well_formed_trace(self, trace):
        """Arrivals are sorted, nothing is empty, and a request has a block for every 512 tokens of its prompt."""
        assert trace.arrival_s[0] >= 0
        assert (np.diff(trace.arrival_s) >= 0).all()
        assert np.diff(trace.block_starts).tolist() == (-(-trace.input_tokens // 512)).tolist()
        assert min(trace.input_tokens.min(), trace.output_tokens.min()) >= 1

    @given(twins)
    @drawn
    def test_ids_count_blocks_and_name_prefixes(self, trace):
        """Each new block has the next id, and a block always stands behind the same block, at the same place."""
        before = np.concatenate([[-1], np.maximum.accumulate(trace.block_ids)[:-1]])
        assert (trace.block_ids <= before + 1).all()
        begins = np.zeros(len(trace.block_ids), dtype=bool)
        begins[trace.block_starts[:-1]] = True
        parents = np.where(begins, -1, np.concatenate([[-1], trace.block_ids[:-1]]))
        parent_of = np.full(trace.block_ids.max() + 1, -2)
        parent_of[trace.block_ids] = parents
        assert (parent_of[trace.block_ids] == parents).all()

    @given(twins)
    @drawn
    def test_partial_blocks_end_a_prompt(self, trace):
        """A block that one prompt fills only in part is never followed by another: its content would differ."""
        ends = trace.block_starts[1:] - 1
        partial = np.unique(trace.block_ids[ends[trace.input_tokens % 512 != 0]])
        inside = np.delete(trace.block_ids, ends)
        assert not np.isin(partial, inside).any()

    @given(st.sampled_from(["conversation", "toolagent"]), st.integers(0, 100))
    @drawn
    def test_chat_arrives_in_ticks(self, name, seed):
        """The recorder of the production traces looks every three seconds."""
        assert (make_twin(name, seed=seed, requests=500).arrival_s % 3 == 0).all()


class TestDraw:
    @given(st.sampled_from(NAMES), st.integers(0, 2**32))
    @drawn
    def test_a_seed_is_a_trace(self, name, seed):
        """The same name and seed give the same trace, another seed another."""
        one, same, other = (columns(make_twin(name, seed=s, requests=300)) for s in (seed, seed, seed + 1))
        assert one == same
        assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))

    @given(st.sampled_from(NAMES), st.integers(0, 99), st.integers(1, 2000), st.integers(1, 2000))
    @drawn
    def test_a_shorter_twin_is_the_beginning_of_a_longer_one(self, name, seed, one, other):
        """As many requests as asked for, and the same ones first: rates do not depend on the length."""
        short, long = (make_twin(name, seed=seed, requests=n) for n in sorted((one, other)))
        assert [len(short), len(long)] == sorted((one, other))
        assert columns(short) == columns(long.head(len(short)))

    @pytest.mark.parametrize("name", NAMES)
    def test_beyond_the_released_length(self, name):
        """A twin twice as long takes twice the time and begins with the usual one."""
        usual = make_twin(name)
        twice = make_twin(name, requests=2 * len(usual))
        assert len(twice) == 2 * len(usual)
        assert columns(usual) == columns(twice.head(len(usual)))
        assert twice.arrival_s[-1] == pytest.approx(2 * usual.arrival_s[-1], rel=0.05)

    def test_it_reads_back(self, tmp_path):
        """A twin written to a file passes every check of the reader, and comes back the same."""
        trace = make_twin("conversation", requests=200)
        write_trace(tmp_path / "twin.jsonl", trace)
        assert columns(read_trace(tmp_path / "twin.jsonl")) == columns(trace)

    @pytest.mark.parametrize("name", RELEASED)
    def test_no_row_is_copied(self, name):
        """Twin and released trace share hardly more (input, output) pairs than two twins do."""

        def pairs(trace):
            long = trace.input_tokens > 2048  # short prompts meet by chance
            return set(zip(trace.input_tokens[long].tolist(), trace.output_tokens[long].tolist(), strict=True))

        twin, released = pairs(make_twin(name)), pairs(load(name))
        assert len(twin & released) <= 1.5 * len(twin & pairs(make_twin(name, seed=1))) + 10


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"name": "chat"}, "'chat'.*conversation, synthetic, toolagent, arxiv"),
            ({"name": "conversation", "requests": 0}, "0 requests.*at least 1"),
            ({"name": "conversation", "seed": -1}, "seed -1"),
        ],
    )
    def test_what_is_no_twin(self, arguments, said):
        """An unknown name, an empty twin and a negative seed are refused."""
        with pytest.raises(ValueError, match=said):
            make_twin(**arguments)

    @pytest.mark.parametrize(
        ("percent", "values"),
        [((0, 50), (1, 2)), ((0, 100), (2, 1)), ((0, 60, 40, 100), (1, 2, 3, 4)), ((0, 100), (1,))],
    )
    def test_broken_table(self, percent, values):
        """A quantile table that falls, stops short, or has columns of two lengths is refused."""
        with pytest.raises(ValueError, match="is broken"):
            Quantiles(percent, values)


class TestDraws:
    @given(st.integers(0, 1000), st.integers(50, 2000), st.integers(1, 5))
    @drawn
    def test_spread_is_even_over_every_run(self, seed, points, columns):
        """Any fifty neighbours cover each unit interval almost evenly, in every column."""
        u = spread(stream(seed, "test"), points, columns)
        assert ((u >= 0) & (u < 1)).all()
        start = seed % (points - 49)
        run = np.sort(u[:, start : start + 50], axis=1)
        gaps = np.diff(run, axis=1, prepend=run[:, -1:] - 1)
        assert gaps.max() < 0.2

    def test_streams_are_independent_by_name(self):
        """Streams of two names do not repeat each other; the same names give the same stream."""
        a, b, again = (stream(0, *names).random(8).tolist() for names in (("x", 1), ("x", 2), ("x", 1)))
        assert a == again
        assert a != b

    @given(st.integers(0, 50))
    @drawn
    def test_sessions_that_outgrow_the_window_end(self, seed):
        """No prompt is longer than the longest measured one."""
        process = ConversationProcess(sessions_per_hour=300)
        assert conversation(100, seed, process).input_tokens.max() <= process.longest_tokens
