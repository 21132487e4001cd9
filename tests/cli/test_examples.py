"""What `--help` and the pages tell a reader to type can be typed."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mooncake_lab.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "book").glob("*.md"))]
TYPED = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?mooncake-lab (.+?)(?:\s+#.*)?$", re.MULTILINE)
CHEAP = ["cache", "generate", "simulate", "trace stats", "trace synth"]
"""Commands whose example takes a second or two on a small trace; the others have tests of their own."""


def leaves(command, path=()):
    """Every command that does something, with the words that lead to it."""
    found = getattr(command, "commands", None)
    if found is None:
        yield " ".join(path), command
    else:
        for name, child in found.items():
            yield from leaves(child, (*path, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))


def example(name):
    """The arguments of a command's example."""
    found = re.search(r"Example: mooncake-lab ((?:.|\n(?!\n))+)", COMMANDS[name].help or "")
    assert found, f"{name} shows no example"
    return shlex.split(" ".join(found[1].split()))


def understood(arguments):
    """What the command line says to these arguments when it only reads them: options have to exist."""
    return CliRunner().invoke(app, [*arguments, "--help"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with everything the examples speak of, small, and no other."""
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "data" / "traces" / "conversation_trace.jsonl"
    trace.parent.mkdir(parents=True)
    twin = ["trace", "synth", "--like", "conversation", "--requests", "60", "-o", str(trace)]
    made = CliRunner().invoke(app, twin)
    assert made.exit_code == 0, made.stderr
    (tmp_path / "prompts.json").write_text(json.dumps([[1, 2, 3], [4, 5]]))


def test_an_option_that_does_not_exist_is_noticed():
    """The check below can fail."""
    assert understood(["doctor", "--nonsense"]).exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_of_itself(name):
    """The example is of this command, and each of its options exists."""
    arguments = example(name)
    assert arguments[: len(name.split())] == name.split()
    said = understood(arguments)
    assert said.exit_code == 0, said.stderr


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.usefixtures("folder")
def test_cheap_examples_run(name):
    """Copied as it stands, it ends well."""
    found = CliRunner().invoke(app, example(name))
    assert found.exit_code == 0, found.stderr


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in TYPED.findall(page.read_text(encoding="utf-8"))],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_commands_of_the_pages_are_understood(page, line):
    """Every command line of the README and the book names commands and options that exist."""
    arguments = shlex.split(line.split(" > ")[0].split(" | ")[0])
    said = understood(arguments)
    assert said.exit_code == 0, f"{page.name}: {line}: {said.stderr}"
