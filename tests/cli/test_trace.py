"""`mooncake-lab trace`: what it prints where, and how it ends."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli.trace import app
from mooncake_lab.workload import read_trace

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'
SYNTH = ("synth", "--like", "conversation", "--requests")


def call(*arguments):
    """Run the command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path):
    """A trace whose second line is bad."""
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + GOOD.replace("600", "6000"))
    return path


def test_statistics_are_an_object_or_a_table(file):
    """With --json stdout is one object with the statistics of a good file, without it a table."""
    file.write_text(GOOD + GOOD.replace(": 0,", ": 2500,"))
    result = call("stats", file, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (found["requests"], found["mean_input_tokens"], found["duration_s"]) == (2, 600, 2.5)
    assert (found["blocks"], found["unique_blocks"], found["ideal_block_hit_rate"]) == (4, 2, 0.5)
    assert "600.0000" in call("stats", file).stdout
    file.write_text(GOOD)
    assert json.loads(call("stats", file, "--block-size", 300, "--json").stdout)["block_size_tokens"] == 300


def test_a_bad_line_fails_or_is_skipped(file):
    """It ends with 1, the reason on stderr and nothing on stdout; --lenient skips it, and counts it."""
    result = call("stats", file, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "t.jsonl:2: field 'hash_ids'" in result.stderr
    result = call("stats", file, "--lenient", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["requests"], found["skipped"]) == (0, 1, 1)
    assert "bad lines skipped: 1" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", "no-such-file"],
        ["stats", "t.jsonl", "--block-size", "0"],
        ["synth", "--like", "azure", "-o", "x.jsonl"],
        ["synth", "-o", "x.jsonl"],
        ["fetch", "azure"],
    ],
)
def test_bad_usage(file, monkeypatch, arguments):
    """A missing file, an unknown workload, none at all, or a block size of 0 are bad usage."""
    monkeypatch.chdir(file.parent)
    assert call(*arguments).exit_code == 2


def test_a_seed_writes_the_same_bytes(tmp_path):
    """The file holds as many requests as asked for, the same each time."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        result = call(*SYNTH, 50, "--seed", 7, "-o", path, "--json")
        assert json.loads(result.stdout)["requests"] == len(read_trace(path)) == 50
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    """The file has the same trace in it, and a seed writes the same bytes."""
    paths = [tmp_path / name for name in ("a.jsonl", "a.jsonl.gz", "b.gz")]
    for path in paths:
        assert call(*SYNTH, 50, "--seed", 7, "-o", path).exit_code == 0
    plain, first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert gzip.decompress(first) == plain
    assert len(read_trace(paths[1])) == 50


def test_clients_may_state_what_they_allow(tmp_path):
    """`--max-tokens` states a limit for each request, doubled where its answer is longer."""
    path = tmp_path / "stated.jsonl"
    assert call(*SYNTH, 300, "--max-tokens", 400, "-o", path).exit_code == 0
    stated = read_trace(path)
    assert set(stated.max_tokens.tolist()) > {400, 800}
    assert (stated.max_tokens >= stated.output_tokens).all()
    assert (stated.max_tokens[stated.output_tokens <= 400] == 400).all()


def test_no_file_is_overwritten_and_no_folder_made(file, tmp_path):
    """A file that exists is left alone unless --force says otherwise; a missing folder is named."""
    before = file.read_bytes()
    result = call(*SYNTH, 5, "-o", file)
    assert (result.exit_code, result.stdout, file.read_bytes()) == (1, "", before)
    assert "add --force" in result.stderr
    assert call(*SYNTH, 5, "-o", file, "--force").exit_code == 0
    assert len(read_trace(file)) == 5
    result = call(*SYNTH, 5, "-o", tmp_path / "new" / "x.jsonl")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"there is no folder {tmp_path / 'new'}" in result.stderr


def test_what_cannot_be_fetched_fails(tmp_path):
    """A fetch that fails ends with 1, a reason on stderr, and no file."""
    result = call("fetch", "conversation", "--to", tmp_path, "--url", "http://127.0.0.1:9/x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "could not fetch http://127.0.0.1:9/x" in result.stderr
    assert list(tmp_path.iterdir()) == []
