"""The run log."""

from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from mooncake_lab.core import BlockKey, FirstToken, Record, read_log, write_log

TIMES = st.floats(0, 1e6, allow_nan=False)
IDS = st.integers(0, 2**40)
NAMES = st.text(max_size=8)
KEYS = st.lists(IDS | st.binary(min_size=1, max_size=16), max_size=4).map(tuple)
FIELDS = {
    float: TIMES,
    int: IDS,
    str: NAMES,
    float | None: st.none() | TIMES,
    str | None: st.none() | NAMES,
    tuple[int, ...]: st.lists(IDS, max_size=4).map(tuple),
    tuple[BlockKey, ...]: KEYS,
    dict[int, int]: st.dictionaries(IDS, IDS, max_size=4),
}
RECORDS = st.one_of(
    [st.builds(kind, **{each.name: FIELDS[each.type] for each in fields(kind)}) for kind in get_args(Record)]
)


class TestRoundTrip:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(RECORDS, max_size=8))
    def test_what_was_written_is_read(self, tmp_path, records):
        """Every record survives the file bit for bit, times included."""
        path = tmp_path / "run.jsonl"
        write_log(path, records)
        assert list(read_log(path)) == records

    def test_an_interrupted_write_leaves_the_old_file(self, tmp_path):
        """When the source of records fails, the log that was there stays whole."""
        path = tmp_path / "run.jsonl"
        write_log(path, [FirstToken(at_s=1.0, request_id=1)])

        def broken():
            yield FirstToken(at_s=2.0, request_id=2)
            raise RuntimeError("power cut")

        with pytest.raises(RuntimeError, match="power cut"):
            write_log(path, broken())
        assert [record.request_id for record in read_log(path)] == [1]


class TestBadInput:
    @pytest.mark.parametrize(
        "line",
        [
            "{",
            "[]",
            '{"event":"warp","at_s":1}',
            '{"event":"first_token","at_s":1}',
            '{"event":"first_token","at_s":1,"request_id":1,"x":2}',
        ],
    )
    def test_error_names_file_and_line(self, tmp_path, line):
        """A line that is not a record is refused with its place."""
        path = tmp_path / "run.jsonl"
        path.write_text('{"event":"first_token","at_s":1,"request_id":1}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"run\.jsonl:2: not a record"):
            list(read_log(path))
