"""`mooncake-lab trace`: what it prints where, and how it ends."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli.trace import app
from mooncake_lab.workload import read_trace

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'


@pytest.fixture
def call():
    """A function that runs the command and returns its result."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + GOOD.replace("600", "6000"))
    return path


class TestStats:
    def test_json(self, call, file):
        """With --json stdout is one object with the statistics of a good file."""
        file.write_text(GOOD + GOOD.replace(": 0,", ": 2500,"))
        result = call("stats", file, "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, result.stderr) == (0, "")
        assert found["requests"] == 2
        assert found["mean_input_tokens"] == 600
        assert found["mean_output_tokens"] == 3
        assert found["duration_s"] == 2.5
        assert (found["blocks"], found["unique_blocks"], found["ideal_block_hit_rate"]) == (4, 2, 0.5)

    def test_table(self, call, file):
        """Without it a person reads a table."""
        file.write_text(GOOD)
        result = call("stats", file)
        assert result.exit_code == 0
        assert "mean_input_tokens" in result.stdout
        assert "600.0000" in result.stdout

    def test_a_bad_file_fails(self, call, file):
        """A bad line ends with 1, the reason on stderr and nothing on stdout."""
        result = call("stats", file, "--json")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "t.jsonl:2: field 'hash_ids'" in result.stderr

    def test_lenient(self, call, file):
        """With --lenient the bad line is reported on stderr and counted in the object."""
        result = call("stats", file, "--lenient", "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, found["requests"], found["skipped"]) == (0, 1, 1)
        assert "bad lines skipped: 1" in result.stderr
        assert "t.jsonl:2: field 'hash_ids'" in result.stderr

    def test_block_size(self, call, file):
        """The block size can be given where the file does not say it."""
        file.write_text(GOOD)
        assert json.loads(call("stats", file, "--block-size", 300, "--json").stdout)["block_size_tokens"] == 300

    @pytest.mark.parametrize("arguments", [[], ["no-such-file"], ["."], ["t.jsonl", "--block-size", "0"]])
    def test_bad_usage(self, call, file, monkeypatch, arguments):
        """No file, a missing one, a folder, or a block size of 0 are bad usage."""
        monkeypatch.chdir(file.parent)
        assert call("stats", *arguments).exit_code == 2


class TestSynth:
    def test_writes_a_trace(self, call, tmp_path):
        """The file holds as many requests as asked for, and the same seed writes the same bytes."""
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        for path in paths:
            result = call("synth", "--like", "conversation", "--requests", 50, "--seed", 7, "-o", path, "--json")
            assert result.exit_code == 0
            assert json.loads(result.stdout)["requests"] == 50
        assert len(read_trace(paths[0])) == 50
        assert paths[0].read_bytes() == paths[1].read_bytes()

    def test_clients_may_state_what_they_allow(self, call, tmp_path):
        """`--max-tokens` states a limit for each request, doubled where its answer is longer."""
        path = tmp_path / "stated.jsonl"
        arguments = ("synth", "--like", "conversation", "--requests", 300)
        assert call(*arguments, "--max-tokens", 400, "-o", path).exit_code == 0
        stated = read_trace(path)
        assert set(stated.max_tokens.tolist()) > {400, 800}
        assert (stated.max_tokens >= stated.output_tokens).all()
        assert (stated.max_tokens[stated.output_tokens <= 400] == 400).all()
        assert call(*arguments, "-o", tmp_path / "silent.jsonl").exit_code == 0
        assert read_trace(tmp_path / "silent.jsonl").max_tokens is None

    def test_does_not_overwrite(self, call, file):
        """A file that exists is left alone, unless --force says otherwise."""
        before = file.read_bytes()
        arguments = ("synth", "--like", "conversation", "--requests", 5, "-o", file)
        result = call(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "add --force" in result.stderr
        assert file.read_bytes() == before
        assert call(*arguments, "--force").exit_code == 0
        assert len(read_trace(file)) == 5

    def test_the_folder_must_be_there(self, call, tmp_path):
        """A folder that does not exist is named, and nothing is written."""
        result = call("synth", "--like", "conversation", "--requests", 5, "-o", tmp_path / "new" / "x.jsonl")
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"there is no folder {tmp_path / 'new'}" in result.stderr
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("wrong", [["--like", "azure"], ["--like", "conversation", "--requests", "0"], []])
    def test_bad_usage(self, call, tmp_path, wrong):
        """An unknown workload, no requests, or no workload at all are bad usage."""
        assert call("synth", *wrong, "-o", tmp_path / "x.jsonl").exit_code == 2


class TestFetch:
    def test_what_cannot_be_fetched_fails(self, call, tmp_path):
        """A fetch that fails ends with 1, a reason on stderr, and no file."""
        result = call("fetch", "conversation", "--to", tmp_path, "--url", "http://127.0.0.1:9/x")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "could not fetch http://127.0.0.1:9/x" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_bad_usage(self, call):
        """A name that is no workload is bad usage."""
        assert call("fetch", "azure").exit_code == 2
