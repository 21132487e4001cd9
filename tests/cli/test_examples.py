"""What `--help` and the pages tell a reader to type can be typed."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException
from typer.testing import CliRunner

from mooncake_lab import cli
from mooncake_lab.cli import app
from mooncake_lab.workload import RELEASES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "book").glob("*.md") if path.name != "extend.md")]
"""tests/test_extend.py runs the commands of the page left out, which need what it adds."""
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(
    r"^(?:\w*\$ )?(?:[A-Z][A-Z0-9_]*=\S* )*(?:\.venv/bin/)?mooncake-lab (.+?)(?:\s+#.*)?$", re.MULTILINE
)
QUOTED = re.compile(r"`(?:[A-Z][A-Z0-9_]*=\S* )*(?:\.venv/bin/)?mooncake-lab ([^`]+)`")
SYNTHESISED = re.compile(r"trace synth .*(?:-o|--output) ([^\s`]+)")
CHEAP = ["cache", "generate", "simulate", "trace stats", "trace synth"]
"""Commands whose example takes a second or two on a small trace; the others have tests of their own."""
FETCHED = [f"data/traces/{release.file_name}" for release in RELEASES.values()]
"""What `make traces` makes."""
OF_THE_READER = [
    "mine.jsonl", "agents.jsonl", "prompts.json", "handed_in/", "servegen/",
    "submissions.zip", "keys.zip", "gradebook.csv", "worksheet.csv", "in/", "build/grades/secret",
]  # fmt: skip
"""What pages and examples ask of a reader; all else they speak of they have to make."""


def leaves(command, path):
    """Every command that does something, with the words that lead to it."""
    found = getattr(command, "commands", None)
    if found is None:
        yield path, command
    else:
        for name, child in found.items():
            yield from leaves(child, f"{path} {name}")


COMMANDS = {path: command for name in cli.COMMANDS for path, command in leaves(cli.load(name), name)}


def example(name):
    """The arguments of a command's example."""
    found = re.search(r"Example: mooncake-lab ((?:.|\n(?!\n))+)", COMMANDS[name].help or "")
    assert found, f"{name} shows no example"
    return shlex.split(" ".join(found[1].split()))


def complaint(arguments, *, whole=True):
    """What the command line has against these arguments: options, values, and files that have to exist.

    Nothing is executed. What is not `whole` is only spoken of, and may leave out what is required.
    """
    for name, command in COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            try:
                command.make_context(name, arguments[len(words) :], resilient_parsing=False)
            except typer.Exit as end:  # --help
                return f"exit code {end.exit_code}" if end.exit_code else None
            except TyperException as error:
                is_missing = type(error).__name__ == "MissingParameter"
                return None if is_missing and not whole else error.format_message()
            return None
    return f"there is no command {' '.join(arguments[:2])!r}"


def spoken_of(text):
    """The commands of a page, each as arguments, and whether it is there to be typed as it stands."""
    found = [(line, True) for line in TYPED.findall(text)]
    found += [(" ".join(line.split()), False) for line in QUOTED.findall(FENCED.sub("", text))]
    return [(shlex.split(re.split(r" [>|] ", line)[0]), whole) for line, whole in found]


def lay_out(folder, names):
    """Files, and folders where a name ends in a slash, with nothing in them."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A working folder with what a reader brings, and the folder of assignments, and nothing else."""
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, [*OF_THE_READER, "notebooks/assignments/"])
    return tmp_path


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("doctor --nonsense", "No such option"),
        ("docter", "no command 'docter'"),
        ("replay mine.jsonl --speed 0", "'--speed'"),
        ("trace stats missing.jsonl", "does not exist"),
        ("serve", "Missing option"),
    ],
)
@pytest.mark.usefixtures("checkout")
def test_what_cannot_be_typed_is_noticed(line, said):
    """The checks below can fail: by an option, a value, a file, a command, and by what is left out."""
    assert said in complaint(shlex.split(line))
    assert bool(complaint(shlex.split(line), whole=False)) == (line != "serve")


@pytest.mark.parametrize(
    "text",
    [
        "mooncake-lab doctor --json",
        "node1$ .venv/bin/mooncake-lab doctor --json > found.json   # what is missing",
        "$ MOONCAKE_LAB_DATA= XDG_CACHE_HOME=/tmp/empty .venv/bin/mooncake-lab doctor --json | less",
        "a machine that (`.venv/bin/mooncake-lab doctor\n--json`) lacks nothing",
    ],
)
def test_commands_are_seen_behind_prompts_and_variables_and_in_sentences(text):
    """However a page shows a command, it is checked."""
    ((arguments, _),) = spoken_of(text)
    assert arguments == ["doctor", "--json"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_of_itself(name, checkout):
    """The example is of this command; its options exist, and take these values."""
    lay_out(checkout, FETCHED)
    arguments = example(name)
    assert arguments[: len(name.split())] == name.split()
    assert complaint(arguments) is None


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_says_what_each_says_itself(name):
    """The list, which imports no command, shows the first line of each command's own help."""
    assert cli.COMMANDS[name][1] == " ".join((cli.load(name).help or "").split("\n\n")[0].split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name):
    """Each command can print its result as one JSON object."""
    assert "--json" in {word for each in COMMANDS[name].params for word in each.opts}


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.usefixtures("folder")
def test_cheap_examples_run(name):
    """Copied as it stands, it ends well."""
    found = CliRunner().invoke(app, example(name))
    assert found.exit_code == 0, found.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_understood(page, checkout):
    """Options exist and take the values given, and files are the reader's or made on the same page."""
    text = page.read_text(encoding="utf-8")
    lay_out(checkout, SYNTHESISED.findall(text))
    lay_out(checkout, FETCHED if "make traces" in text else [])
    found = {shlex.join(arguments): complaint(arguments, whole=whole) for arguments, whole in spoken_of(text)}
    assert {line: said for line, said in found.items() if said} == {}
