"""`mooncake-lab store`."""

import json

from typer.testing import CliRunner

from mooncake_lab.cli import app


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


def test_unknown_faults_are_refused(tmp_path):
    """The message lists those that there are."""
    done = invoke("store", "soak", "--faults", "fire", "--dir", tmp_path)
    assert done.exit_code == 2
    assert "allowed are kill, flip, full, read" in " ".join(done.stderr.split())
