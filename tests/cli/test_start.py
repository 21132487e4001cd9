"""The command starts light: what one command needs, the others do not wait for."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("heavy", ["pandas", "torch", "matplotlib", "papermill", "transformers"])
def test_the_command_line_starts_without(heavy):
    """Importing the command line imports none of the libraries that take a second and more."""
    code = f"import sys, mooncake_lab.cli; raise SystemExit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
