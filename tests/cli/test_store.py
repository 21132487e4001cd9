"""`mooncake-lab store` and `bench store`."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.store.backends import StorageError
from mooncake_lab.store.backends.mooncake_client import load_wheel


def invoke(*arguments):
    """Run the command line."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_soak_prints_its_numbers(tmp_path):
    """A second of faults is exit 0 and one JSON object."""
    done = invoke("store", "soak", "--dir", tmp_path, "--seconds", 1, "--faults", "kill,flip", "--json")
    numbers = json.loads(done.stdout)
    assert done.exit_code == 0
    assert {name: numbers[name] for name in ("wrong_bytes", "lost_committed_blocks", "leaked_bytes")} == {
        "wrong_bytes": 0,
        "lost_committed_blocks": 0,
        "leaked_bytes": 0,
    }
    assert numbers["faults"]["kill"] > 0


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (("store", "soak", "--faults", "fire"), "kill, flip, full, read"),
        (("bench", "store", "--media", "tape"), "dram, ssd, tcp"),
    ],
)
def test_unknown_faults_and_media_are_refused(tmp_path, arguments, allowed):
    """The message lists those that there are."""
    done = invoke(*arguments, "--dir", tmp_path)
    assert done.exit_code == 1
    assert f"allowed are {allowed}" in done.stderr


@pytest.mark.parametrize("medium", ["dram", "tcp", "ssd", "mooncake"])
def test_bench_compares_with_floors(tmp_path, medium):
    """Every row has ours, the floor and their ratio; nothing is left in the folder."""
    if medium == "mooncake":
        try:
            load_wheel()
        except StorageError as error:
            pytest.skip(str(error))
    arguments = ["--dir", tmp_path, "--media", medium, "--block-mib", 1, "--rounds", 1, "--json"]
    arguments += ["--working-set-mib", 8]
    done = invoke("bench", "store", *arguments)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    rows = found["rows"]
    assert found["lookup"]["tokens"] == 131_072
    assert found["lookup"]["keys_s"] > found["lookup"]["floor_s"] / 2 > 0
    assert {row["operation"].split()[-1] for row in rows} == {"write", "read"}
    assert all(row["ratio"] > 0 and row["bytes_per_s"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
