"""`mooncake-lab cache`: what it prints, and how it fails."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app

# two users: A asks, B asks, A asks again with a longer prompt; block 0 is shared by all
ROWS = [([0, 1, 2], 1500), ([0, 3], 1000), ([0, 1, 2, 4], 2000), ([5, 3], 700)]


@pytest.fixture
def file(tmp_path):
    """A trace of four requests."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": tokens, "output_length": 5, "hash_ids": ids}
        for i, (ids, tokens) in enumerate(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cache(*arguments):
    """Run the command."""
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def test_json_is_one_object_with_the_promised_fields(file):
    """`--json` prints one object; hits behind a miss are not prefix hits."""
    result = cache(file, "--capacity", 6, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    promised = {key: found[key] for key in ("policy", "capacity_blocks", "accesses", "hits", "prefix_hits")}
    assert promised == {"policy": "lru", "capacity_blocks": 6, "accesses": 11, "hits": 5, "prefix_hits": 4}
    assert found["hit_rate"] == 5 / 11
    assert found["prefix_hit_rate"] == 4 / 11


def test_tokens_are_rounded_down_to_blocks(file):
    """3,583 tokens are 6 blocks of 512; without `--json` a person reads policy, size and both rates."""
    assert cache(file, "--capacity", 3583, "--unit", "tokens").stdout.splitlines() == [
        "lru, 6 blocks of 512 tokens: 4 requests, 11 accesses",
        "hit rate        0.4545  (5 hits)",
        "prefix hit rate 0.3636  (4 prefix hits)",
    ]
    assert "unlimited" in cache(file, "--capacity", "inf").stdout


def test_bad_lines_fail_or_are_skipped(file):
    """A bad line fails with exit code 1 and its place; `--lenient` skips it and says so on stderr."""
    with file.open("a") as handle:
        handle.write("not json\n")
    failed = cache(file, "--capacity", 6, "--json")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert f"{file}:5" in failed.stderr
    lenient = cache(file, "--capacity", 6, "--json", "--lenient")
    assert lenient.exit_code == 0
    assert json.loads(lenient.stdout)["skipped"] == 1
    assert "bad lines skipped: 1" in lenient.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--capacity", "-1"),
        ("--capacity", "1.5"),
        ("--capacity", "9" * 401),
        ("--capacity", "9" * 5000),
        (),
        ("--capacity", "5", "--policy", "mru"),
    ],
)
def test_bad_usage_is_exit_code_2(file, arguments):
    """A bad option is bad usage, and prints nothing to stdout."""
    result = cache(file, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
