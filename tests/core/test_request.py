"""Requests, service levels, units."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import Request, TracedRequest, blocks_for


def make(**changes) -> Request:
    fields = {"id": 7, "arrival_s": 1.0, "input_tokens": 600, "block_keys": (1, 2)}
    return Request(**{**fields, **changes})


class TestRequest:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"arrival_s": -1.0}, "arrives at -1.0 s"),
            ({"arrival_s": math.nan}, "arrives at nan s"),
            ({"input_tokens": 0}, "0 input tokens; at least 1"),
            ({"max_tokens": 0}, "max_tokens 0; at least 1 is needed, or None"),
            ({"block_keys": (1,)}, "1 block keys for 600 input tokens; blocks of 512 tokens make it 2"),
        ],
    )
    def test_refuses_what_cannot_be(self, changes, message):
        """A field out of range is refused with its value and what is allowed."""
        with pytest.raises(ValueError, match=message):
            make(**changes)

    def test_no_answer_is_empty(self):
        """Prefill produces its first token, so an answer of no token could not be replayed as recorded."""
        with pytest.raises(ValueError, match="0 output tokens; at least 1 is needed"):
            TracedRequest(make(), 0)

    @given(st.integers(1, 10**6), st.integers(1, 5000), st.none() | st.integers(0, 100))
    def test_what_its_client_allows_covers_its_answer(self, output, default, more):
        """A stated limit stands; the default covers every answer, and is the same for all that fit into it."""
        stated = None if more is None else output + more
        allowed = TracedRequest(make(max_tokens=stated), output).max_tokens_or(default)
        assert allowed >= output
        if stated is not None:
            assert allowed == stated
        elif output <= default:
            assert allowed == default
        else:
            assert allowed < 2 * output
            assert (allowed // default).bit_count() == 1
            assert allowed % default == 0


class TestUnits:
    @given(st.integers(0, 10**9), st.integers(1, 4096))
    def test_blocks_hold_the_tokens_and_no_block_is_empty(self, tokens, size):
        """The blocks are enough, and one less would not be."""
        blocks = blocks_for(tokens, size)
        assert (blocks - 1) * size < tokens <= blocks * size or blocks == tokens == 0
