"""The command line: `mooncake-lab`.

Results go to stdout, messages to stderr. Exit codes: 0 done, 1 failed, 2 bad usage.
"""

import importlib
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from mooncake_lab import __version__

COMMANDS: Final = {
    "trace": ("trace:app", "Describe and convert traces, fetch the released ones, and generate new ones."),
    "cache": ("cache:cache", "Replay a trace through one cache and print its hit rate."),
    "simulate": (
        "simulate:simulate",
        "Replay a trace on a simulated cluster in virtual time, and print a summary.",
    ),
    "model": ("model:app", "Say what a model's KVCache takes."),
    "generate": (
        "generate:generate",
        "Generate answers to all prompts of a file, with continuous batching and a paged KVCache.",
    ),
    "serve": (
        "live:serve",
        "Serve a model behind OpenAI's completions and chat API; each prefill or decode worker is a process.",
    ),
    "calibrate": (
        "calibrate:calibrate",
        "Fit the simulator to an OpenAI-compatible server, predict held-out runs, and print the errors.",
    ),
    "replay": (
        "live:replay",
        "Replay the beginning of a trace on a live cluster in real time, and print a summary.",
    ),
    "batch": (
        "batch:batch",
        "Execute notebooks with papermill, in parallel; a notebook that is up to date is not executed again.",
    ),
    "verdicts": (
        "verdicts:verdicts",
        "Print the verdict on each claim of the papers, with the paper's number, ours, and the band.",
    ),
    "store": ("store:app", "Test the store of KVCache blocks under faults."),
    "classroom": ("classroom:app", "Build the notebooks that students get, and grade what they hand in."),
    "doctor": ("doctor:doctor", "Report what this machine can run, and how to install the rest."),
}
"""Each command: where it is defined, and the first line of its help."""

NEEDS: Final = {
    "generate": "engine",
    "serve": "serve",
    "calibrate": "stats",
    "replay": "engine",
    "batch": "book",
    "verdicts": "stats",
    "store": "stats",
    "classroom": "classroom",
}
"""The extra that a command needs; the others do without, but for what they say when it is asked for."""

RENAMED_OPTIONS: Final = {
    "--prefill": ("--prefill-nodes",),
    "--decode": ("--decode-nodes",),
    "--coupled": ("--coupled-nodes",),
    "--max-num-seqs": ("--max-requests",),
    "--max-total-tokens": ("--device-tokens",),
    "--chunked-prefill-size": ("--chunk-tokens",),
    "--max-num-batched-tokens": ("--pack-tokens", "--max-batch-tokens"),
    "--transfer-backend": ("--transfer",),
    "--pool": ("--shared-store",),
    "--pool-tokens": ("--shared-store-tokens",),
    "--pool-address": ("--shared-store-address",),
    "--enable-prefix-caching": ("--prefix-caching",),
    "--no-enable-prefix-caching": ("--no-prefix-caching",),
}
"""The names of options that had another one in the release before, by that; a command has at most one of them."""


def _new_name(option: str | None, error: Any) -> str | None:
    """The name that an unknown option has in its command now; None if it never had another."""
    if option not in RENAMED_OPTIONS:
        return None
    known = {name for each in error.ctx.command.params for name in (*each.opts, *each.secondary_opts)}
    return next((name for name in RENAMED_OPTIONS[option] if name in known), None)


class Commands(TyperGroup):
    """Imports the module of a command when the command runs; the list of commands needs no import."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # the interface of typer
        """All names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # the interface of typer
        """A stand-in that has the name and the first line of help, or None."""
        if cmd_name not in COMMANDS:
            return None
        stub = typer.Typer(add_completion=False)
        stub.command(cmd_name, short_help=COMMANDS[cmd_name][1])(lambda: None)
        return typer.main.get_command(stub)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, imported now."""
        name, _, rest = super().resolve_command(ctx, args)
        ctx.invoked_subcommand = name  # known to `invoke` from here on, also if the import fails
        return name, None if name is None else load(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; where a library is missing, one sentence names its extra.

        An option that had another name in the release before is refused with its new name.
        """
        try:
            return super().invoke(ctx)
        except TyperException as error:
            option = getattr(error, "option_name", None)  # of an option that the command does not have
            if (name := _new_name(option, error)) is None:
                raise
            raise typer.BadParameter(f"{option} is called {name} now") from None
        except ModuleNotFoundError as error:
            from mooncake_lab.core.extras import missing_extra  # the list of commands does without

            sentence = missing_extra(error, NEEDS.get(ctx.invoked_subcommand))
            if sentence is None:
                raise
            typer.echo(f"mooncake-lab {ctx.invoked_subcommand}: {sentence}", err=True)
            raise typer.Exit(1) from error


def group(help_text: str) -> typer.Typer:
    """An empty group of commands, with the settings that all commands share."""
    found = typer.Typer(
        help=help_text,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,
    )
    found.callback()(lambda: None)  # with it, also a group of one command is a group
    return found


def load(name: str) -> Any:
    """The command of a name, with its options; imports its module."""
    module, attribute = COMMANDS[name][0].split(":")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        alone.command(name)(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    for each in getattr(command, "commands", {}).values():  # else the list cuts their sentences off
        each.short_help = (each.help or "").partition("\n\n")[0]
    return command


app = typer.Typer(
    cls=Commands,
    help="Reproduce the Mooncake papers: traces, caches, engines, simulated and live clusters, chapters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # half of the time that the list of commands takes would be the import of rich
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mooncake-lab {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point of the `mooncake-lab` command."""
    app()
