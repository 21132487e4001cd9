"""The command starts light: what one command needs, the others do not wait for."""

import json
import subprocess
import sys

import model_folders
import pytest

HEAVY = {"pandas", "torch", "matplotlib", "seaborn", "papermill", "transformers", "numba", "scipy"}
SERVE = """
import os, signal, sys
from mooncake_lab.cli import app
from mooncake_lab.serving.openai_api import server

real = server.serve

async def serve(*arguments, opened, **rest):
    def look(url):
        print(*sorted({heavy} & sys.modules.keys()))
        os.kill(os.getpid(), signal.SIGTERM)

    await real(*arguments, opened=look, **rest)

server.serve = serve
app(['serve', '--no-api-key', '--port', '0', '--spares', '0', *{options}], standalone_mode=False)
"""
REPLAY = """
import sys
from mooncake_lab.cli import app

app(['replay', *{options}], standalone_mode=False)
print(*sorted({heavy} & sys.modules.keys()))
"""


def last_line(program, *options):
    """Of what a program prints that runs a command with these options."""
    code = program.format(heavy=HEAVY, options=[str(option) for option in options])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def trace(tmp_path):
    """A file with one short request."""
    path = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    path.write_text(json.dumps(request) + "\n")
    return path


def test_a_simulation_imports_nothing_heavy(trace):
    """From the start of the command line to its numbers, `simulate` imports no library that takes a second."""
    heavy = HEAVY | {"mooncake_lab.serving"}
    code = (
        "import sys; from mooncake_lab.cli import app;"
        f" app(['simulate', {str(trace)!r}, '--prefill-nodes', '1', '--decode-nodes', '1', '--json'],"
        " standalone_mode=False);"
        f" print(*sorted({heavy!r} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    numbers, imported = found.stdout.splitlines()
    assert json.loads(numbers)["finished"] == 1
    assert not imported


def test_the_list_of_commands_imports_none_of_them():
    """`--help` needs the command line's library and this package's version, and no module of a command."""
    code = (
        "import sys; from mooncake_lab.cli import app; app(['--help'], standalone_mode=False);"
        " print(*sorted(name for name in sys.modules if name.startswith('mooncake_lab') or name == 'numpy'))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1].split() == ["mooncake_lab", "mooncake_lab.cli"]


def test_the_process_before_a_random_model_imports_nothing_heavy():
    """When `serve` opens, only its workers have imported torch: the process that takes requests needs none."""
    assert not last_line(SERVE, "--model", "random:lab-tiny", "--coupled-nodes", 1)


def test_the_process_before_a_model_directory_imports_nothing_heavy(tmp_path):
    """The same with a tokenizer, a chat template and an SSD, whose size is known before any model is loaded."""
    model_folders.base(tmp_path / "model")
    ssd = ("--ssd-dir", tmp_path / "ssd", "--ssd-tokens", 4096, "--device", "cpu")
    assert not last_line(SERVE, "--model", tmp_path / "model", *ssd)


def test_the_process_that_replays_a_trace_imports_nothing_heavy(trace):
    """`replay` imports torch in its workers only, from its start to its summary."""
    assert not last_line(REPLAY, trace, "--coupled-nodes", 1)
