"""`mooncake-lab bench engine`: what it prints and writes, and how it fails. Nothing here asserts a time."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli.bench import app

SMALL = ["--model", "lab-tiny", "--input-len", "8", "--output-len", "2", "--batch-size", "2", "--rounds", "1"]


def bench(*arguments):
    return CliRunner().invoke(app, ["engine", *SMALL, *map(str, arguments)])


def test_it_compares_and_writes_plain_numbers(tmp_path):
    """One object on stdout and in the file: each case with ratio, floor and what bounds it."""
    result = bench("--json", "--out", tmp_path / "engine.json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [case["case"] for case in found["cases"]] == ["prefill 1 x 8", "decode 2 at 8"]
    assert all(case["floor_seconds"] > 0 and case["ratio"] is not None for case in found["cases"])
    assert json.loads((tmp_path / "engine.json").read_text())["cases"] == found["cases"]


def test_alone_there_is_no_ratio():
    """Without a peer only our own speed and the floor are printed."""
    result = bench("--peer", "none")
    assert result.exit_code == 0, result.stderr
    assert "decode 2 at 8" in result.stdout
    assert "load average" in result.stderr


@pytest.mark.slow
def test_transformers_own_batching_gets_the_same_tokens():
    """The mixed burst runs beside transformers' continuous batching and both generate what was asked."""
    result = bench("--peer", "hf-continuous", "--mixed", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["cases"][-1]["kind"] == "mixed"


@pytest.mark.parametrize(("options", "code"), [(("--model", "lab-giant"), 1), (("--peer", "nobody"), 2)])
def test_failures(options, code):
    """An unknown shape is exit code 1 with a sentence, an unknown peer bad usage."""
    result = bench(*options)
    assert result.exit_code == code
    assert result.stdout == ""
