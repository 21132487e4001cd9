"""How files are read: in pieces, packed in several ways, and with their progress told."""

import gzip
import json
import sys
from array import array
from itertools import accumulate
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.workload import TraceError, prefixes, read_trace
from mooncake_lab.workload.formats import files

LINE = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
CALL = {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}
SESSION = {"block_size": 64, "hash_id_scope": "local", "requests": [CALL]}


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_do_not_matter(tmp_path, monkeypatch, size, packed):
    """Lines, objects over several lines, and rows of a table are the same in pieces of any length."""
    path = tmp_path / "trace"
    sessions = json.dumps(
        [{"id": f's\u00e9{i} "quoted" {{[', **SESSION} for i in range(5)], ensure_ascii=False, indent=3
    )
    texts = {
        "lines": "\n".join(json.dumps({**LINE, "timestamp": i}) for i in range(5)),
        "array": sessions,
        "table": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "2024-05-11 07:00:00,1800,60\r\n" * 5,
    }
    for text in texts.values():
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        whole = list(read_trace(path).requests())
        assert len(whole) == 5
        with monkeypatch.context() as short:
            short.setattr(files, "_PIECE_BYTES", size)
            assert list(read_trace(path).requests()) == whole


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    """It is told in bytes of the file as it lies there, never fewer than before."""
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress((json.dumps(LINE) + "\n").encode() * 1000))
    told = []
    read_trace(path, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (path.stat().st_size,) * 2


def test_zstandard_needs_a_library(tmp_path, monkeypatch):
    """Where Python has none, the refusal names the package; where it has one, the file is read by its content."""
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(files._ZSTD_MAGIC + b"rest")
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        TraceError, match=r"compressed with Zstandard, which needs Python 3\.14 or .*backports\.zstd"
    ):
        read_trace(path)
    stand_in = ModuleType("backports.zstd")
    stand_in.ZstdError = RuntimeError
    stand_in.ZstdFile = lambda raw: gzip.GzipFile(fileobj=_after_magic(raw))
    monkeypatch.setitem(sys.modules, "backports.zstd", stand_in)
    path.write_bytes(files._ZSTD_MAGIC + gzip.compress(json.dumps(LINE).encode()))
    assert len(read_trace(path)) == 1


def _after_magic(raw):
    raw.read(4)
    return raw


def test_real_zstandard(tmp_path):
    """A file of the library itself is read, and a damaged one named; skipped where there is no library."""
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    path = tmp_path / "t"
    packed = zstd.compress((json.dumps(LINE) + "\n").encode() * 3)
    path.write_bytes(packed)
    assert len(read_trace(path)) == 3
    path.write_bytes(packed[:-3])
    with pytest.raises(TraceError, match="is a damaged Zstandard file"):
        read_trace(path)


def test_a_line_that_is_cut_is_one_bad_record(tmp_path):
    """Where records stand a line each, lenient reading goes on after one that is no JSON, in every format."""
    path = tmp_path / "t"
    good = [json.dumps({"id": f"s{i}", **SESSION}) for i in range(3)]
    path.write_text("\n".join([good[0], good[1][:-9], good[2]]))
    with pytest.raises(TraceError, match=":2: the line is"):
        read_trace(path)
    assert (len(read_trace(path, lenient=True)), read_trace(path, lenient=True).skipped) == (2, 1)


def test_blank_lines_before_a_table(tmp_path):
    """The first line that is not blank has the names of the columns."""
    path = tmp_path / "t.csv"
    path.write_text("\n\nTIMESTAMP,ContextTokens,GeneratedTokens\n\n2024-05-11 07:00:00,1800,60\n")
    assert read_trace(path).input_tokens.tolist() == [1800]


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    """What is no text does not fill the memory."""
    monkeypatch.setattr(files, "_LONGEST_RECORD_BYTES", 1000)
    monkeypatch.setattr(files, "_PIECE_BYTES", 100)
    path = tmp_path / "t"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + b"x" * 5000)
    with pytest.raises(TraceError, match=":2: the line is longer than 1000 bytes"):
        read_trace(path)
    path.write_text('{"id": "s", "hash_id_scope": "local", "requests": [' + " " * 5000)
    with pytest.raises(TraceError, match=":1: no object ends within 1000 bytes"):
        read_trace(path)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 4)), min_size=1, max_size=9
)


@given(PROMPTS)
def test_a_look_at_all_ids_at_once_says_the_same(prompts):
    """Whether numpy says first that no id stands for two blocks, or dictionaries find it out, ids are the same."""
    tokens = array("q", (4 * (len(ids) - 1) + last for ids, last in prompts))
    starts = array("q", accumulate((len(ids) for ids, _ in prompts), initial=0))
    found = []
    for many in (0, 10**9):
        ids = array("Q", (one for prompt, _ in prompts for one in prompt))
        found.append((prefixes.unambiguous(ids, starts, tokens, 4, many=many), ids))
    assert found[0] == found[1]
