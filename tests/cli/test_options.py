"""What all commands ask of the numbers that their options take."""

import pytest
from typer.testing import CliRunner

from mooncake_lab import cli


def leaves(command, path):
    """Every command that does something, with the words that lead to it."""
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    yield path, command


NUMBERS = {
    (*path, option.opts[0]): option.type_descriptor.annotation
    for name in cli.COMMANDS
    for path, command in leaves(cli.load(name), (name,))
    for option in command.params
    if option.type_descriptor.annotation in (int, float)
    and (*path, option.name) not in {("cache", "capacity"), ("store", "soak", "seed")}
}
"""The options that are left out take infinity, and any whole number."""


@pytest.mark.parametrize("words", NUMBERS, ids=" ".join)
def test_numbers_are_bounded(words):
    """Infinity, no number, and a number of 401 digits are refused: which option, and what is allowed."""
    for value in ("inf", "-inf", "nan", "1e999") if NUMBERS[words] is float else ("9" * 401, str(2**53 + 1)):
        found = CliRunner().invoke(cli.app, [*words, value])
        said = " ".join(found.stderr.replace("│", " ").split())
        assert (found.exit_code, found.stdout) == (2, "")
        assert f"Invalid value for '{words[-1]}': " in said
        assert any(allowed in said for allowed in ("allowed are numbers from", "Input should be"))


def test_the_largest_number_is_allowed():
    """It is refused for something else."""
    found = CliRunner().invoke(cli.app, ["trace", "stats", "--block-size", str(2**53)])
    assert "Missing argument" in found.stderr
