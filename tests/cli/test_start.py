"""The command starts light: what one command needs, the others do not wait for."""

import json
import subprocess
import sys


def test_a_simulation_imports_nothing_heavy(tmp_path):
    """From the start of the command line to its numbers, `simulate` imports no library that takes a second."""
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
    trace.write_text(json.dumps(request) + "\n")
    heavy = {"pandas", "torch", "matplotlib", "seaborn", "papermill", "transformers", "mooncake_lab.serving"}
    code = (
        "import sys; from mooncake_lab.cli import app;"
        f" app(['simulate', {str(trace)!r}, '--prefill', '1', '--decode', '1', '--json'], standalone_mode=False);"
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
