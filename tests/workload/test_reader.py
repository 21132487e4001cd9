"""Reading trace files: what is accepted, and what a refusal says."""

import gzip
import json

import numpy as np
import pytest

from mooncake_lab.workload import TraceError, read_trace

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def with_fields(**fields):
    return {**GOOD, **fields}


def without(name, **fields):
    return {key: value for key, value in with_fields(**fields).items() if key != name}


@pytest.fixture
def trace_file(tmp_path):
    """A function that writes lines (objects, or raw text) to a file and returns its path."""

    def write(*lines):
        path = tmp_path / "some_trace.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


class TestAccepted:
    def test_columns(self, trace_file):
        """A good file becomes columns: seconds, tokens, flat block ids and where each request's begin."""
        trace = read_trace(trace_file(GOOD, with_fields(timestamp=1500.5, input_length=513, output_length=1)))
        assert trace.arrival_s.tolist() == [0.0, 1.5005]
        assert trace.input_tokens.tolist() == [600, 513]
        assert trace.output_tokens.tolist() == [3, 1]
        assert trace.block_ids.tolist() == [0, 1, 0, 1]
        assert trace.block_starts.tolist() == [0, 2, 4]
        assert (trace.name, trace.origin, trace.sessions) == ("some", "file", None)

    def test_aliases(self, trace_file):
        """The names other tools write mean the same as the released ones."""
        other = {"created_time": 7, "input_tokens": 600, "output_tokens": 3, "hash_ids": [0, 1], "session_id": "a"}
        trace = read_trace(trace_file(GOOD, other))
        assert trace.arrival_s.tolist() == [0.0, 0.007]
        assert trace.input_tokens.tolist() == [600, 600]
        assert trace.sessions == (None, "a")

    @pytest.mark.parametrize("name", ["delay", "delay_ms"])
    def test_a_delay_counts_from_the_line_before_in_its_session(self, trace_file, name):
        """A line with a delay arrives that long after its session's previous line, and is sorted in."""
        first = with_fields(timestamp=1000, session_id="a")
        second = without("timestamp", session_id="a", output_length=4, **{name: 500})
        third = with_fields(timestamp=1200, session_id="b", output_length=5)
        fourth = without("timestamp", session_id="a", output_length=6, **{name: 0.5})
        trace = read_trace(trace_file(first, second, third, fourth))
        assert trace.arrival_s.tolist() == [1.0, 1.2, 1.5, 1.5005]
        assert trace.output_tokens.tolist() == [3, 5, 4, 6]
        assert trace.sessions == ("a", "b", "a", "a")

    def test_what_clients_allow(self, trace_file):
        """`max_tokens` is what a client allows for the answer; where a line has none, nothing is stated."""
        lines = (GOOD, with_fields(max_tokens=3), with_fields(max_tokens=None), with_fields(max_tokens=400))
        trace = read_trace(trace_file(*lines))
        assert trace.max_tokens.tolist() == [0, 3, 0, 400]
        assert [each.request.max_tokens for each in trace.requests()] == [None, 3, None, 400]
        assert trace.head(2).max_tokens.tolist() == [0, 3]
        assert read_trace(trace_file(GOOD)).max_tokens is None

    def test_the_block_size(self, trace_file):
        """`trace_block_size` decides how many ids a prompt needs; where the file is silent, the argument does."""
        assert read_trace(trace_file(with_fields(trace_block_size=300))).block_size_tokens == 300
        assert read_trace(trace_file(GOOD), block_size_tokens=400).block_size_tokens == 400

    def test_ids_beyond_32_bits_stay_apart(self, trace_file):
        """Ids that agree in their low 32 bits, or differ only beyond 63, are different block keys of a request."""
        ids = [1, 1 + 2**32, 1 + 2**62, 1 + 2**63, 2**64 - 1]
        trace = read_trace(trace_file(with_fields(input_length=5 * 512, hash_ids=ids)))
        assert len(np.unique(trace.block_ids)) == 5
        (traced,) = trace.requests()
        assert traced.request.block_keys == tuple(ids)

    def test_gzip_by_content(self, trace_file, tmp_path):
        """A gzipped file is read whatever it is called."""
        packed = tmp_path / "packed"
        packed.write_bytes(gzip.compress(trace_file(GOOD).read_bytes()))
        assert len(read_trace(packed)) == 1

    def test_blank_lines_and_line_ends(self, tmp_path):
        """Blank lines, Windows line ends and a missing last line end do not matter; numbers still count them."""
        path = tmp_path / "t.jsonl"
        good = json.dumps(GOOD)
        path.write_bytes(f"\r\n{good}\r\n\n{good}".encode())
        assert len(read_trace(path)) == 2
        path.write_bytes(f"\r\n{good}\r\n\nnonsense".encode())
        with pytest.raises(TraceError, match=r"t\.jsonl:4: "):
            read_trace(path)


REFUSED = {
    "wrong JSON": ('{"timestamp": 0', None, "one JSON object"),
    "no object": ("[1, 2]", None, "one JSON object"),
    "deep nesting": ("[" * 100_000, None, "one JSON object"),
    "not a number": ('{"timestamp": NaN}', None, "finite numbers"),
    "infinite": (json.dumps(GOOD).replace("0,", "1e999,", 1), None, "finite"),
    "missing field": (without("output_length"), "output_length", "missing"),
    "missing time": (without("timestamp"), "timestamp", "missing"),
    "missing ids": (without("hash_ids"), "hash_ids", "missing"),
    "extra field": (with_fields(prompt="hello"), "prompt", "one of the fields timestamp, input_length"),
    "fraction of a token": (with_fields(input_length=1.5), "input_length", "is 1.5; allowed is a whole number"),
    "boolean length": (with_fields(output_length=True), "output_length", "is True"),
    "boolean time": (with_fields(timestamp=False), "timestamp", "is False"),
    "text length": (with_fields(input_length="600"), "input_length", "is '600'"),
    "null time": (with_fields(timestamp=None), "timestamp", "is None"),
    "negative time": (with_fields(timestamp=-1), "timestamp", "is -1; allowed is a finite number"),
    "negative length": (with_fields(output_length=-3), "output_length", "is -3; allowed is a whole number from 1"),
    "empty answer": (with_fields(output_length=0), "output_length", "is 0; allowed is a whole number from 1"),
    "empty prompt": (with_fields(input_length=0, hash_ids=[]), "input_length", "a whole number from 1"),
    "huge length": (with_fields(output_length=10**30), "output_length", "a whole number"),
    "too few ids": (with_fields(hash_ids=[0]), "hash_ids", "a list of 1 ids; allowed is 2 ids"),
    "too many ids": (with_fields(hash_ids=[0, 1, 2]), "hash_ids", "a list of 3 ids; allowed is 2 ids"),
    "fractional id": (with_fields(hash_ids=[0, 0.5]), "hash_ids", "a list with 0.5 at 1"),
    "boolean id": (with_fields(hash_ids=[0, True]), "hash_ids", "a list with True at 1"),
    "negative id": (with_fields(hash_ids=[0, -1]), "hash_ids", "a list with -1"),
    "id beyond 64 bits": (
        with_fields(hash_ids=[0, 2**64]),
        "hash_ids",
        "whole numbers from 0 to 18446744073709551615",
    ),
    "ids no list": (with_fields(hash_ids={"0": 1}), "hash_ids", "a list of whole numbers"),
    "limit of nothing": (
        with_fields(max_tokens=0),
        "max_tokens",
        "is 0; allowed is a whole number from 1, or null",
    ),
    "limit below the answer": (
        with_fields(max_tokens=2),
        "max_tokens",
        "is 2; allowed is at least the output_length",
    ),
    "session number": (with_fields(session_id=5), "session_id", "a string or null"),
    "both names": (with_fields(input_tokens=600), "input_tokens", "not both"),
    "both names of time": (with_fields(created_time=0), "created_time", "not both"),
    "time and delay": (with_fields(delay=3), "timestamp", "either 'timestamp' or 'delay', not both"),
    "delay of no session": (without("timestamp", delay=3), "delay", "same 'session_id'"),
    "alias out of range": (without("input_length", input_tokens=-1), "input_tokens", "is -1"),
    "other block size": (
        with_fields(trace_block_size=300),
        "trace_block_size",
        "512, the block size of this trace",
    ),
    "earlier time": (with_fields(timestamp=1), "timestamp", "is 1; allowed is at least 2"),
}


class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_names_file_line_field_and_what_is_allowed(self, trace_file, case):
        """A bad second line is refused with file, line, field, value and what is allowed there."""
        line, field, words = REFUSED[case]
        path = trace_file(with_fields(timestamp=2 if case == "earlier time" else 0), line)
        with pytest.raises(TraceError) as refusal:
            read_trace(path)
        message = str(refusal.value)
        assert message.startswith(f"{path}:2: ")
        assert words in message
        assert (f"field '{field}'" if field else "the line") in message
        assert "allowed is" in message
        assert len(message) < len(str(path)) + 400

    def test_lenient_skips_and_counts(self, trace_file):
        """Lenient reading leaves bad lines out, counts them, and keeps the first reasons and the good lines."""
        lines = [line for line, *_ in REFUSED.values()]
        trace = read_trace(trace_file(with_fields(timestamp=2), *lines, with_fields(timestamp=9)), lenient=True)
        assert (len(trace), trace.skipped, len(trace.skipped_reasons)) == (2, len(REFUSED), 5)
        assert ":2: " in trace.skipped_reasons[0]
        assert f"bad lines skipped: {len(REFUSED)}" in trace.source

    def test_a_bad_first_line_decides_nothing(self, trace_file):
        """A line that is left out does not set the block size of the trace."""
        trace = read_trace(trace_file(with_fields(trace_block_size=16), GOOD), lenient=True)
        assert (trace.block_size_tokens, len(trace)) == (512, 1)

    def test_empty_file(self, tmp_path):
        """A file without a request is refused, lenient or not."""
        path = tmp_path / "empty.jsonl"
        path.write_text("\n")
        for lenient in (False, True):
            with pytest.raises(TraceError, match="holds no request"):
                read_trace(path, lenient=lenient)
        path.write_text("x\ny\n")
        with pytest.raises(TraceError, match=r"all 2 lines are bad, the first: .*:1: the line"):
            read_trace(path, lenient=True)

    @pytest.mark.parametrize("keep", [2, 11, -9, -1])
    def test_truncated_gzip(self, tmp_path, keep):
        """A gzip file cut short is refused as such."""
        packed = gzip.compress(json.dumps(GOOD).encode() * 3)
        path = tmp_path / "cut.gz"
        path.write_bytes(packed[:keep])
        with pytest.raises(TraceError, match="damaged gzip"):
            read_trace(path)

    def test_block_size_argument_is_checked(self, trace_file):
        """A block size below 1 is refused before the file is looked at."""
        with pytest.raises(ValueError, match="block_size_tokens is 0"):
            read_trace(trace_file(GOOD), block_size_tokens=0)

    def test_argument_against_file(self, trace_file):
        """A block size that contradicts the file is refused, not followed."""
        with pytest.raises(TraceError, match="is 512; allowed is 256"):
            read_trace(trace_file(with_fields(trace_block_size=512)), block_size_tokens=256)

    def test_delays_that_leave_the_numbers(self, trace_file):
        """Delays whose sum is not finite any more are refused."""
        first = with_fields(timestamp=1.7e308, session_id="a")
        with pytest.raises(TraceError, match="still finite"):
            read_trace(trace_file(first, without("timestamp", session_id="a", delay=1.7e308)))
