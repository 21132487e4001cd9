"""Reading the files of `tests/workload/files`: each format, right and wrong."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mooncake_lab.workload import FORMATS, TraceError, load_or_read, read_trace, reusable_blocks, write_trace

FILES = Path(__file__).parent / "files"
RIGHT = json.loads((FILES / "right.json").read_text())
WRONG = json.loads((FILES / "wrong.json").read_text())


def floats(column):
    return [None if np.isnan(value) else value for value in column.tolist()]


def read(name, told, **more):
    return read_trace(FILES / name, **told.get("options", {}), **more)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_file_becomes_what_is_written_beside_it(name):
    """Format, times, lengths, block size, shared blocks, sessions and waits are those of the file."""
    told = RIGHT[name]
    trace = read(name, told)
    assert (trace.format, trace.ids, trace.block_size_tokens) == (
        told["format"],
        told["ids"],
        told["block_size_tokens"],
    )
    assert trace.arrival_s.tolist() == told["arrival_s"]
    assert trace.input_tokens.tolist() == told["input_tokens"]
    assert trace.output_tokens.tolist() == told["output_tokens"]
    assert reusable_blocks(trace).tolist() == told["reusable_blocks"]
    assert trace.sessions == (tuple(told["sessions"]) if "sessions" in told else None)
    assert trace.wait_for == (tuple(map(tuple, told["wait_for"])) if "wait_for" in told else None)
    assert (trace.delay_s is None) == ("delay_s" not in told)
    if trace.delay_s is not None:
        assert floats(trace.delay_s) == told["delay_s"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_file_keeps_its_content_when_it_is_converted(name, tmp_path):
    """What `write_trace` makes of a file in any format reads as the same requests in Mooncake's."""
    trace = read(name, RIGHT[name])
    write_trace(tmp_path / "t.jsonl", trace)
    back = read_trace(tmp_path / "t.jsonl")
    assert back.format == "mooncake"
    assert list(back.requests()) == list(trace.requests())
    assert (back.ids == "none") == (trace.ids == "none")


@pytest.mark.parametrize("name", RIGHT)
def test_the_format_may_be_named(name):
    """A file reads the same where its format is named."""
    trace = read(name, RIGHT[name])
    options = {**RIGHT[name].get("options", {}), "format": trace.format}
    assert list(read_trace(FILES / name, **options).requests()) == list(trace.requests())


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_its_line_and_field(name, tmp_path):
    """The sentence names file, line, field, value and what is allowed; lenient reading counts bad records."""
    told = WRONG[name]
    path = Path(shutil.copy(FILES / name, tmp_path))
    before = path.read_bytes()
    with pytest.raises(ValueError) as refusal:
        read_trace(path, **told.get("options", {}))
    assert told["says"] in str(refusal.value)
    assert isinstance(refusal.value, TraceError) == ("options" not in told or "format" in told["options"])
    if told["lenient"] is None:
        with pytest.raises(ValueError):
            read_trace(path, lenient=True, **told.get("options", {}))
    else:
        trace = read_trace(path, lenient=True)
        assert [len(trace), trace.skipped] == told["lenient"]
        assert told["says"] in trace.skipped_reasons[0]
    assert path.read_bytes() == before


def test_each_format_has_a_right_file():
    """No format is without a file here, but for texts, whose files need a tokenizer."""
    assert {told["format"] for told in RIGHT.values()} | {"text"} == FORMATS.keys()


def test_the_page_has_a_row_for_each_format():
    """The table of the book says of each format where it comes from and what is lost."""
    page = (Path(__file__).parents[2] / "book/formats.md").read_text()
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {row for row in rows if not row.startswith("--")} == FORMATS.keys()


def test_a_chapter_takes_no_trace_without_ids():
    """What compares caches and placement needs to know what prompts share."""
    assert len(load_or_read(str(FILES / "bailian.jsonl"))) == 4
    with pytest.raises(TraceError, match="has no block ids"):
        load_or_read(str(FILES / "azure_2023.csv"))


AIPERF = json.loads((FILES / "aiperf.json").read_text())
NO_LOADER = ["no loader for this format"]
DIFFERENT = {
    "mooncake_other_names.jsonl": ["ValidationError"],  # AIPerf has the names of the released traces only
    "mooncake_seconds.jsonl": ["times"],  # AIPerf has no option for the unit
    "mooncake_local_ids.jsonl": ["hits"],  # nor for the scope of ids, which is the file here
    "weka_shared_ids.jsonl": ["hits"],  # and the session there
    "tracelab.jsonl": ["times"],  # AIPerf counts the times of each session from its own beginning
    "tracelab_large_blocks.jsonl": ["hits"],  # its block size is an option, and 64 here
    "burstgpt_ms.csv": ["times"],
    **dict.fromkeys(
        ("azure_2023.csv", "azure_2024.csv", "azure_2025.csv.gz", "splitwise.csv", "vidur.csv"), NO_LOADER
    ),
}
"""Files that AIPerf reads otherwise, and why."""


def differences(name, theirs):
    """Where our trace is not what AIPerf reads."""
    trace = read(name, RIGHT[name])
    found = [key for key in ("input_tokens", "output_tokens") if getattr(trace, key).tolist() != theirs[key]]
    if None not in theirs["at_ms"]:
        ours = (trace.arrival_s + theirs["at_ms"][0] / 1000).tolist()
        found += [] if ours == pytest.approx([at / 1000 for at in theirs["at_ms"]], abs=1e-6) else ["times"]
    blocks = np.diff(trace.block_starts)
    if theirs.get("hit_shares") is not None:
        found += (
            [] if (reusable_blocks(trace) / blocks).tolist() == pytest.approx(theirs["hit_shares"]) else ["hits"]
        )
    if "hit_blocks" in theirs:
        found += [] if reusable_blocks(trace).tolist() == theirs["hit_blocks"] else ["hits"]
    return found


@pytest.mark.parametrize("name", AIPERF)
def test_lengths_times_and_shared_blocks_are_those_of_aiperf(name):
    """Its own loaders, whose answers are recorded, read the same from a file, or the difference is named."""
    theirs = AIPERF[name]
    found = [theirs["refused"].partition(":")[0]] if "refused" in theirs else differences(name, theirs)
    assert found == DIFFERENT.get(name, [])


@pytest.mark.slow
def test_aiperf_still_reads_them_so(tmp_path):
    """Where AIPerf is installed as a peer, its loaders answer what is recorded."""
    python = Path(__file__).parents[2] / ".peers/aiperf_traces/bin/python"
    if not python.is_file():
        pytest.skip("no AIPerf here; `python benchmarks/peer_environments.py AIPerf` installs it")
    script = Path(__file__).parents[2] / "benchmarks/peers/aiperf_traces.py"
    subprocess.run([str(python), str(script), str(tmp_path / "now.json")], check=True)
    assert json.loads((tmp_path / "now.json").read_text()) == AIPERF
