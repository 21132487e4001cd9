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


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        *[(command, f"--{role}", f"--{role}-nodes")
          for command in ("simulate", "serve", "replay") for role in ("prefill", "decode", "coupled")],
        ("serve", "--max-num-seqs", "--max-requests"),
        ("serve", "--max-total-tokens", "--device-tokens"),
        ("serve", "--chunked-prefill-size", "--chunk-tokens"),
        ("serve", "--max-num-batched-tokens", "--pack-tokens"),
        ("serve", "--transfer-backend", "--transfer"),
        ("replay", "--transfer-backend", "--transfer"),
        ("serve", "--pool", "--shared-store"),
        ("serve", "--pool-tokens", "--shared-store-tokens"),
        ("serve", "--pool-address", "--shared-store-address"),
        ("store soak", "--pool", "--shared-store"),
        ("generate", "--max-num-seqs", "--max-requests"),
        ("generate", "--max-total-tokens", "--device-tokens"),
        ("generate", "--chunked-prefill-size", "--chunk-tokens"),
        ("generate", "--max-num-batched-tokens", "--max-batch-tokens"),
        ("generate", "--no-enable-prefix-caching", "--no-prefix-caching"),
    ],
)  # fmt: skip
def test_an_old_name_of_an_option_is_refused_with_the_new_one(command, old, new):
    """Both ways to give a value are recognised, and the new name is an option of the command."""
    for words in ((old, "2"), (f"{old}=2",)):
        found = CliRunner().invoke(cli.app, [*command.split(), *words])
        assert (found.exit_code, found.stdout) == (2, "")
        assert f"{old} is called {new} now" in " ".join(found.stderr.replace("│", " ").split())
    name, *rest = command.split()
    leaf = dict(leaves(cli.load(name), ()))[tuple(rest)]
    assert any(new in (*option.opts, *option.secondary_opts) for option in leaf.params)


def test_an_option_that_never_was_is_refused_as_before():
    """Neither is one that had another name, but in another command."""
    for words in (["simulate", "--max-num-seqs", "2"], ["trace", "stats", "--pool", "remote"]):
        assert "No such option" in CliRunner().invoke(cli.app, words).stderr


def test_the_largest_number_is_allowed():
    """It is refused for something else."""
    found = CliRunner().invoke(cli.app, ["trace", "stats", "--block-size", str(2**53)])
    assert "Missing argument" in found.stderr
