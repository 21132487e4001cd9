"""What was read is what is read again after writing, and nothing a file may hold does worse than a TraceError."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.workload import Trace, TraceError, read_trace, write_trace
from mooncake_lab.workload.formats.mooncake import Line

COLUMNS = ("arrival_s", "input_tokens", "output_tokens", "block_ids", "block_starts")
IDS = st.integers(0, 2**64 - 1)
WHOLE_MS = st.integers(0, 10**13).map(float)
FINE_MS = st.floats(0, 1e13, allow_nan=False)


@st.composite
def traces(draw, times_ms=WHOLE_MS) -> Trace:
    """A trace with times that are quotients of milliseconds by 1000, as every reader computes them."""
    block_size = draw(st.integers(1, 1000))
    blocks = draw(st.lists(st.lists(IDS, min_size=1, max_size=5), min_size=1, max_size=8))
    n = len(blocks)
    arrival_ms = sorted(draw(st.lists(times_ms, min_size=n, max_size=n)))
    last_block = draw(st.lists(st.integers(1, block_size), min_size=n, max_size=n))
    lengths = [block_size * (len(ids) - 1) + rest for ids, rest in zip(blocks, last_block, strict=True)]
    sessions = st.lists(st.none() | st.text(), min_size=n, max_size=n).filter(any)
    outputs = np.array(draw(st.lists(st.integers(1, 10**6), min_size=n, max_size=n)))
    stated = draw(st.none() | st.lists(st.none() | st.integers(1, 9), min_size=n, max_size=n).filter(any))
    return Trace(
        name="drawn",
        origin="file",
        block_size_tokens=block_size,
        arrival_s=np.array(arrival_ms) / 1000,
        input_tokens=np.array(lengths),
        output_tokens=outputs,
        block_ids=np.array([one for ids in blocks for one in ids], dtype=np.uint64).view(np.int64),
        block_starts=np.cumsum([0, *map(len, blocks)]),
        sessions=draw(st.none() | sessions.map(tuple)),
        max_tokens=stated
        and np.array([0 if more is None else o + more for o, more in zip(outputs, stated, strict=True)]),
        source="drawn",
    )


def there_and_back(trace) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        write_trace(path, trace)
        assert [entry.name for entry in Path(folder).iterdir()] == ["t.jsonl"]
        return read_trace(path)


def read_bytes(content, *, lenient) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(content)
        return read_trace(path, lenient=lenient)


class TestRoundTrip:
    @given(traces(WHOLE_MS | FINE_MS))
    def test_nothing_changes(self, trace):
        """Writing what was read and reading it gives every column bit for bit, block size and sessions."""
        first = there_and_back(trace)
        for column in ("input_tokens", "output_tokens", "block_starts"):
            assert getattr(first, column).tobytes() == getattr(trace, column).tobytes(), column
        assert first.arrival_s == pytest.approx(trace.arrival_s - trace.arrival_s[0], rel=1e-9, abs=1e-5)
        back = there_and_back(first)
        for column in COLUMNS:
            assert getattr(back, column).tobytes() == getattr(first, column).tobytes(), column
        assert back.block_size_tokens == trace.block_size_tokens
        assert back.sessions == trace.sessions
        assert (back.renamed_blocks, list(back.requests())) == (0, list(first.requests()))

    @given(traces())
    def test_an_id_stands_for_one_prefix(self, trace):
        """After reading, blocks have one id exactly where all ids up to them, and their tokens, are the same."""
        ids, blocks = {}, {}
        for request in (traced.request for traced in there_and_back(trace).requests()):
            for place, key in enumerate(request.block_keys):
                tokens = min(request.block_size_tokens, request.input_tokens - place * request.block_size_tokens)
                block = (request.block_keys[: place + 1], tokens)
                assert ids.setdefault(block, key) == key
                assert blocks.setdefault(key, block) == block

    @given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20).map(sorted))
    def test_any_time_is_kept_to_the_last_digit_but_one(self, times_s):
        """Times that no reader could have computed come back within one rounding, in the same order."""
        n = len(times_s)
        trace = Trace(
            name="drawn", origin="file", arrival_s=np.array(times_s), input_tokens=np.ones(n, np.int64),
            output_tokens=np.ones(n, np.int64), block_ids=np.zeros(n, np.int64), block_starts=np.arange(n + 1),
            source="drawn",
        )  # fmt: skip
        back = there_and_back(trace)
        first_s = trace.arrival_s[0]
        assert (np.abs(back.arrival_s - (trace.arrival_s - first_s)) <= 2 * np.spacing(trace.arrival_s)).all()
        assert (np.diff(back.arrival_s) >= 0).all()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*Line.__struct_fields__, "extra"])
LIKELY = st.integers(-1, 1100) | st.lists(st.integers(-1, 2**65), max_size=3) | st.floats() | st.none()
LINES = (
    st.dictionaries(FIELDS, LIKELY | JSON, min_size=3).map(json.dumps).map(str.encode)
    | JSON.map(json.dumps).map(str.encode)
    | st.binary(max_size=60)
    | st.just(b'{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}')
)


class TestFuzz:
    @given(st.lists(LINES, max_size=5), st.booleans())
    def test_only_a_trace_or_a_trace_error(self, lines, lenient):
        """Whatever a file holds, reading it gives a consistent trace or a TraceError, and lenient never more."""
        try:
            trace = read_bytes(b"\n".join(lines), lenient=lenient)
        except TraceError:
            return
        requests = list(trace.requests())
        assert len(requests) >= 1
        assert (np.diff(trace.arrival_s) >= 0).all()
        assert trace.skipped == 0 or lenient

    @given(traces(), st.data())
    def test_one_flipped_byte(self, trace, data):
        """A written file with one byte changed, or cut, is still a trace or a TraceError."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.jsonl"
            write_trace(path, trace)
            content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        try:
            damaged = read_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]), lenient=False)
        except TraceError:
            return
        assert len(list(damaged.requests())) >= 1
