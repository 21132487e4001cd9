"""`mooncake-lab store` and `bench store`."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.store.backends import SsdBackend, StorageError
from mooncake_lab.store.backends.mooncake_client import load_wheel


@pytest.fixture
def folder(tmp_path):
    """A closed SSD folder of three blocks."""
    medium = SsdBackend(tmp_path / "kv", 2**20, fingerprint=b"model")
    for key in (b"a", b"b", b"c"):
        block = medium.reserve(key, [5000])
        medium.write(block, [key * 5000])
        medium.commit(block)
    medium.close()
    return tmp_path / "kv"


def invoke(*arguments):
    """Run the command line."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def damage(folder):
    """Flip a byte of the first block's payload."""
    with (folder / b"model".hex() / "slab").open("r+b") as file:
        file.seek(4096 + 9)
        file.write(b"!")


def test_verify_says_what_is_there(folder):
    """A sound folder is exit 0, with its models and blocks."""
    done = invoke("store", "verify", folder)
    assert done.exit_code == 0
    assert done.stdout == f"model {b'model'.hex()}: 3 blocks, 15,000 bytes\n"


def test_verify_fails_on_damage_until_it_is_repaired(folder):
    """One flipped byte is exit 1 and names the block; after a repair the rest is sound."""
    damage(folder)
    done = invoke("store", "verify", folder, "--json")
    assert done.exit_code == 1
    (model,) = json.loads(done.stdout)["models"]
    assert model["damaged"] == [b"a".hex()]
    done = invoke("store", "verify", folder, "--repair")
    assert done.exit_code == 1
    assert f"damaged: {b'a'.hex()}\n  repaired" in done.stdout
    done = invoke("store", "verify", folder, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["models"][0]["blocks"] == 2


def test_verify_of_a_folder_in_use_or_without_a_store_fails(folder, tmp_path):
    """Both are one sentence on stderr, and exit 1."""
    medium = SsdBackend(folder, None, fingerprint=b"model")
    done = invoke("store", "verify", folder)
    medium.close()
    assert done.exit_code == 1
    assert "is open in process" in done.stderr
    done = invoke("store", "verify", tmp_path)
    assert done.exit_code == 1
    assert "holds no block store" in done.stderr


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


def test_soak_refuses_unknown_faults(tmp_path):
    """It lists those that it knows."""
    done = invoke("store", "soak", "--dir", tmp_path, "--faults", "fire")
    assert done.exit_code == 1
    assert "allowed are kill, flip, full, read" in done.stderr


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


def test_bench_refuses_what_it_does_not_know(tmp_path):
    """An unknown medium is an error that lists the known ones."""
    done = invoke("bench", "store", "--dir", tmp_path, "--media", "tape")
    assert done.exit_code == 1
    assert "allowed are dram, ssd, tcp" in done.stderr
