"""The Trace: columns that fit each other, and the requests they make."""

from dataclasses import replace

import numpy as np
import pytest


class TestColumns:
    def test_requests_carry_the_columns(self, make_trace):
        """Requests come in order with the blocks, lengths and times of their columns."""
        trace = make_trace([0, 1], [0, 2, 3])
        requests = list(trace.requests())
        assert [traced.request.id for traced in requests] == [0, 1]
        assert [traced.request.block_keys for traced in requests] == [(0, 1), (0, 2, 3)]
        assert [traced.request.input_tokens for traced in requests] == [8, 12]
        assert [traced.request.arrival_s for traced in requests] == [0.0, 1.0]
        assert all(type(key) is int for traced in requests for key in traced.request.block_keys)

    def test_blocks_of(self, make_trace):
        """The blocks of a request are a view of its stretch of the flat ids."""
        trace = make_trace([0, 1], [0, 2, 3])
        assert trace.blocks_of(1).tolist() == [0, 2, 3]
        assert np.shares_memory(trace.blocks_of(1), trace.block_ids)

    @pytest.mark.parametrize("index", [-1, 2])
    def test_no_such_request(self, make_trace, index):
        """An index that names no request is refused, also a negative one."""
        with pytest.raises(IndexError, match=f"no request {index}; allowed are 0 to 1"):
            make_trace([0], [1]).blocks_of(index)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"input_tokens": np.ones(3, np.int64)}, "3 input lengths"),
            ({"block_starts": np.array([0, 1])}, "2 block starts"),
            ({"block_starts": np.array([0, 2, 4])}, "run from 0 to 4"),
            ({"sessions": ("a",)}, "1 sessions"),
        ],
    )
    def test_columns_that_do_not_fit(self, make_trace, changes, words):
        """Columns of lengths that contradict each other are refused."""
        with pytest.raises(ValueError, match=words):
            replace(make_trace([0, 1], [0]), **changes)


class TestHead:
    @pytest.mark.parametrize("n", [0, 1, 2])
    def test_is_the_first_requests(self, make_trace, n):
        """The head holds exactly the first requests and says so."""
        trace = replace(make_trace([0, 1], [0, 2, 3], [4]), sessions=("a", None, "b"))
        head = trace.head(n)
        assert list(head.requests()) == list(trace.requests())[:n]
        assert head.source == f"made by a test, first {n} requests"

    def test_of_a_short_trace_is_all_of_it(self, make_trace):
        """Asking for more than there is gives the trace itself."""
        trace = make_trace([0], [1])
        assert trace.head(2) is trace

    def test_negative(self, make_trace):
        """A negative number of requests is refused."""
        with pytest.raises(ValueError, match="first -1 requests"):
            make_trace([0]).head(-1)
