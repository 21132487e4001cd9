"""The Trace: columns that fit each other, and the requests they make."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

from mooncake_lab.workload import Trace


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


class TestAtSpeed:
    @pytest.mark.parametrize("speed", [0.3, 1.0, 7.0])
    def test_only_the_arrivals_change(self, make_trace, speed):
        """Each arrival is divided by the speed, with the bits that numpy gives; all else stays."""
        trace = make_trace([0, 1], [0, 2], [3], arrival_s=[0.0, 0.7, 4.1])
        faster = trace.at_speed(speed)
        assert (faster.arrival_s == trace.arrival_s / speed).all()
        assert faster.block_ids.tolist() == trace.block_ids.tolist()
        assert len(faster) == 3

    @pytest.mark.parametrize("speed", [0, -1.0, float("inf"), float("nan")])
    def test_no_speed(self, make_trace, speed):
        """A speed that is no positive number is refused."""
        with pytest.raises(ValueError, match="positive numbers are allowed"):
            make_trace([0]).at_speed(speed)


class TestArraysOfTheStandardLibrary:
    def test_they_make_the_same_trace(self, make_trace):
        """Columns given as arrays read as the numpy arrays would, without a copy, and make the same requests."""
        plain = make_trace([0, 1], [0, 2, 3])
        ids = array("Q", plain.block_ids.tolist())
        made = plain.replaced(
            arrival_s=array("d", plain.arrival_s.tolist()),
            input_tokens=array("q", plain.input_tokens.tolist()),
            output_tokens=array("q", plain.output_tokens.tolist()),
            block_ids=ids,
            block_starts=array("q", plain.block_starts.tolist()),
            max_tokens=array("q", [7, 0]),
        )
        assert [traced.request.max_tokens for traced in made.requests()] == [7, None]
        assert list(made.replaced(max_tokens=None).requests()) == list(plain.requests())
        for name in ("arrival_s", "input_tokens", "output_tokens", "block_ids", "block_starts"):
            assert getattr(made, name).dtype == getattr(plain, name).dtype
            assert getattr(made, name).tolist() == getattr(plain, name).tolist()
        ids[0] = 9
        assert made.block_ids[0] == 9
        assert made.head(1).block_ids.tolist() == [9, 1]

    def test_large_block_ids_are_stored_less_two_to_the_64(self, make_trace):
        """An id of 2**64 - 1 is -1 in the column and itself in a request, whichever way it came."""
        plain = make_trace([-1], [3])
        made = plain.replaced(block_ids=array("Q", [2**64 - 1, 3]))
        assert made.block_ids.tolist() == plain.block_ids.tolist() == [-1, 3]
        for trace in (made, plain, plain.replaced(block_ids=np.array([-1, 0, 3, 0])[::2])):
            assert [traced.request.block_keys for traced in trace.requests()] == [(2**64 - 1,), (3,)]

    def test_a_column_that_is_missing_is_named(self):
        """A trace without one of its columns cannot be made."""
        with pytest.raises(TypeError, match="arrival_s"):
            Trace(name="none", origin="file", source="a test")
