"""`mooncake-lab cache`: what it prints, and how it fails."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app

# two users: A asks, B asks, A asks again with a longer prompt; block 0 is shared by all, and 3 and 6 are not full
ROWS = [([0, 1, 2], 1536), ([0, 3], 1000), ([0, 1, 2, 4], 2048), ([5, 6], 700)]


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
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    promised = {key: found[key] for key in ("policy", "capacity_blocks", "accesses", "hits", "prefix_hits")}
    assert promised == {"policy": "lru", "capacity_blocks": 6, "accesses": 11, "hits": 4, "prefix_hits": 4}
    assert found["hit_rate"] == found["prefix_hit_rate"] == 4 / 11
    assert found["renamed_blocks"] == 0
    behind = json.loads(cache(file, "--capacity", 3, "--policy", "lfu", "--json").stdout)
    assert behind["hits"] >= behind["prefix_hits"]


def test_an_id_after_another_prefix_is_another_block(tmp_path):
    """An id at another position, after another prefix or of a fuller block is no hit; stderr counts it."""
    path = tmp_path / "trace.jsonl"
    rows = [([1, 2, 3], 1536), ([3, 2], 1024), ([1, 3, 2], 1536), ([1, 2, 3], 1500)]
    path.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 5, "hash_ids": ids}) + "\n"
            for ids, tokens in rows
        )
    )
    result = cache(path, "--capacity", "inf", "--json")
    found = json.loads(result.stdout)
    assert (found["accesses"], found["hits"], found["renamed_blocks"]) == (11, 3, 5)
    assert "block ids that stand for another block than before: 5" in result.stderr


def test_a_trace_in_other_blocks(file):
    """`--block-size` reads a file that does not say its own block size."""
    rows = [{"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}] * 2
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cache(file, "--capacity", 9).exit_code == 1
    found = json.loads(cache(file, "--capacity", 9, "--block-size", 16, "--json").stdout)
    assert (found["block_size_tokens"], found["accesses"], found["prefix_hits"]) == (16, 6, 3)


def test_tokens_are_rounded_down_to_blocks(file):
    """3,583 tokens are 6 blocks of 512; without `--json` a person reads policy, size and both rates."""
    assert cache(file, "--capacity", 3583, "--unit", "tokens").stdout.splitlines() == [
        "lru, 6 blocks of 512 tokens: 4 requests, 11 accesses",
        "hit rate        0.3636  (4 hits)",
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
