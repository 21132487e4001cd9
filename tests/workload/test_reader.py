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
        trace = read_trace(trace_file(GOOD, with_fields(timestamp=1500.5, output_length=1)))
        assert trace.arrival_s.tolist() == [0.0, 1.5005]
        assert trace.input_tokens.tolist() == [600, 600]
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
        assert trace.arrival_s.tolist() == [0.0, 0.2, 0.5, 0.5005]
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

    @pytest.mark.parametrize("origin_ms", [0, 3_600_000, 1_787_000_000_000, 0.25])
    def test_times_count_from_the_first_request(self, trace_file, origin_ms):
        """A trace from 0, one that begins late, and one with epoch times have the same arrivals, bit for bit."""
        lines = [with_fields(timestamp=origin_ms + gap) for gap in (0, 0, 1, 1300, 100_000)]
        assert read_trace(trace_file(*lines)).arrival_s.tolist() == [0.0, 0.0, 0.001, 1.3, 100.0]
        assert read_trace(trace_file("bad", *lines), lenient=True).arrival_s[-1] == 100.0

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
    "huge answer": (with_fields(output_length=10**30), "output_length", "from 1 to 9007199254740992"),
    "huge prompt": (with_fields(input_length=2**53 + 1), "input_length", "from 1 to 9007199254740992"),
    "huge limit": (with_fields(max_tokens=2**63), "max_tokens", "from 1 to 9007199254740992, or null"),
    "huge block": (with_fields(trace_block_size=2**64), "trace_block_size", "from 1 to 9007199254740992"),
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
        "is 0; allowed is a whole number from 1 to 9007199254740992, or null",
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


def prompt(*ids, tokens=None):
    """A line with these ids, of whole blocks unless a number of tokens is given."""
    return with_fields(hash_ids=list(ids), input_length=512 * len(ids) if tokens is None else tokens)


def shared(path):
    """How many blocks each prompt has in common with the first."""
    first, *others = [traced.request.block_keys for traced in read_trace(path).requests()]
    return [len({*first} & {*keys}) for keys in others]


CONTRADICTIONS = {
    "another position": ((1, 2, 3), (2, 3), 2),
    "another prefix": ((1, 2, 3), (7, 2, 3), 2),
    "another prefix in the middle": ((1, 2, 3, 4), (1, 9, 3, 4), 2),
    "twice in a prompt": ((1, 2), (1, 5, 5), 1),
    "only twice in a prompt": ((1, 2), (6, 6, 6), 2),
    "the order turned round": ((1, 2, 3), (3, 2, 1), 3),
}


class TestContradictions:
    @pytest.mark.parametrize("case", CONTRADICTIONS)
    def test_an_id_of_two_blocks_is_two_blocks(self, trace_file, case):
        """The block that an id stands for later is not the one it stood for first; equal prompts agree."""
        first, second, renamed = CONTRADICTIONS[case]
        trace = read_trace(trace_file(prompt(*first), prompt(*second), prompt(*second), prompt(*first)))
        one, two, again, last = (traced.request.block_keys for traced in trace.requests())
        assert (one, two) == (last, again) == (first, two)
        assert trace.renamed_blocks == 2 * renamed
        chains = [keys[:n] for keys in (one, two) for n in range(1, len(keys) + 1)]
        assert len({chain[-1] for chain in chains}) == len(set(chains))  # an id for each prefix

    def test_consistent_prompts_keep_their_ids(self, trace_file):
        """Prefixes that branch, in any order, are no contradiction."""
        path = trace_file(prompt(1, 2, 3), prompt(1, 2), prompt(1, 4, 5), prompt(6), prompt(1, 4, 7, tokens=1030))
        trace = read_trace(path)
        assert trace.block_ids.tolist() == [1, 2, 3, 1, 2, 1, 4, 5, 6, 1, 4, 7]
        assert trace.renamed_blocks == 0

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (prompt(1, 2, tokens=600), prompt(1, 2, tokens=700)),
            (prompt(1, 2, tokens=600), prompt(1, 2)),
            (prompt(1, 2), prompt(1, 2, tokens=600)),
            (prompt(1, 2, tokens=600), prompt(1, 2, 3)),
            (prompt(1, 2, 3), prompt(1, 2, tokens=600)),
        ],
    )
    def test_a_partial_block_is_no_fuller_block(self, trace_file, first, second):
        """A last block with fewer tokens is another block than one with more, though both have one id."""
        path = trace_file(first, second, first)
        assert shared(path) == [1, len(first["hash_ids"])]
        assert read_trace(path).renamed_blocks >= 1

    def test_a_prompt_renamed_before_stays_reusable(self, trace_file):
        """Where ids hash the tokens of a block alone, a block is found again after the same prefix."""
        path = trace_file(prompt(7, 2, 3), prompt(1, 2, 3), prompt(1, 2, 3, 4), prompt(7, 2, 5))
        keys = [traced.request.block_keys for traced in read_trace(path).requests()]
        assert keys[2][:3] == keys[1]
        assert keys[3][:2] == keys[0][:2]
        assert not set(keys[0]) & set(keys[1])

    def test_a_session_does_not_go_back(self, trace_file):
        """A turn may not arrive before the turn before it, which a delay may have put after later lines."""
        first, second = with_fields(timestamp=0, session_id="a"), without("timestamp", session_id="a", delay=5000)
        with pytest.raises(TraceError, match=r":3: field 'timestamp' is 4000; allowed is at least 5000"):
            read_trace(trace_file(first, second, with_fields(timestamp=4000, session_id="a")))
        assert len(read_trace(trace_file(first, second, with_fields(timestamp=4000, session_id="b")))) == 3


FOREIGN = {
    "BOM": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "byte order mark (BOM)"),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), "is UTF-16 text"),
    "big-endian UTF-16": (b"\xfe\xff" + json.dumps(GOOD).encode("utf-16-be"), "is UTF-16 text"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    "array": (json.dumps([GOOD, GOOD], indent=1).encode(), "holds a JSON array"),
    "array in a line": (json.dumps([GOOD]).encode() + b"\n", "holds a JSON array"),
    "xz": (b"\xfd7zXZ\x00", "is compressed with xz; allowed are plain text, gzip and Zstandard"),
    "Parquet": (b"PAR1\x15", "is a Parquet file"),
    "zip": (b"PK\x03\x04\x14", "is a zip archive"),
    "CSV": (b"timestamp,input_length,output_length,hash_ids\n0,600,3,0 1\n", "a table with columns, such as CSV"),
    "quoted CSV": (b'"Timestamp","Request tokens"\n"0","600"\n', "a table with columns, such as CSV"),
    "semicolons": (b"TIMESTAMP;ContextTokens\n0;600\n", "a table with columns, such as CSV"),
    "tabs": (b"time\ttokens\n0\t600\n", "a table with columns, such as CSV"),
    "page": (b"<!DOCTYPE html>", "is a page of HTML"),
}


class TestRefused:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("case", FOREIGN)
    def test_a_file_of_another_kind_is_named(self, tmp_path, case, packed):
        """A file that is no list of JSON lines is refused as what it is, gzipped or not, lenient or not."""
        content, words = FOREIGN[case]
        path = tmp_path / "t.jsonl"
        path.write_bytes(gzip.compress(content) if packed else content)
        for lenient in (False, True):
            with pytest.raises(TraceError) as refusal:
                read_trace(path, lenient=lenient)
            assert str(refusal.value).startswith(f"{path} ")
            assert words in str(refusal.value)

    @pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp437"])
    def test_text_in_another_encoding_is_named(self, tmp_path, encoding):
        """The refusal names the line and its first byte that is no UTF-8; lenient reading leaves the line out."""
        path = tmp_path / "t.jsonl"
        good, text = json.dumps(GOOD), json.dumps(with_fields(session_id="caf\u00e9"), ensure_ascii=False)
        path.write_bytes(f"{good}\n{text}\n".encode(encoding))
        place = text.index("\u00e9") + 1
        byte = "\u00e9".encode(encoding)[0]
        with pytest.raises(
            TraceError, match=rf":2: the line is no UTF-8: its byte {place} is 0x{byte:02x}; allowed is"
        ):
            read_trace(path)
        assert (len(read_trace(path, lenient=True)), read_trace(path, lenient=True).skipped) == (1, 1)

    def test_a_line_of_words_makes_no_table(self, trace_file):
        """Lenient reading skips what stands before the first JSON object."""
        assert len(read_trace(trace_file("made by a tool, version 2", GOOD), lenient=True)) == 1

    def test_the_block_size_that_fits_is_named(self, trace_file):
        """Where the number of ids is that of another block size, the refusal says of which."""
        path = trace_file(with_fields(input_length=1000, hash_ids=list(range(63))))
        with pytest.raises(TraceError, match=r"63 ids; allowed is 2 ids, .*\(with a block size of 16 it would be"):
            read_trace(path)
        assert len(read_trace(path, block_size_tokens=16)) == 1

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
