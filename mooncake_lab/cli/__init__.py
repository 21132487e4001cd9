"""The command line: `mooncake-lab`.

Results go to stdout, messages to stderr. Exit codes: 0 done, 1 failed, 2 bad usage.
"""

from typing import Annotated

import typer

from mooncake_lab import __version__
from mooncake_lab.cli.batch import batch
from mooncake_lab.cli.bench import app as bench_app
from mooncake_lab.cli.cache import cache
from mooncake_lab.cli.classroom import app as classroom_app
from mooncake_lab.cli.doctor import doctor
from mooncake_lab.cli.generate import generate
from mooncake_lab.cli.replay import replay
from mooncake_lab.cli.serve import serve
from mooncake_lab.cli.simulate import simulate
from mooncake_lab.cli.store import app as store_app
from mooncake_lab.cli.store import bench_store
from mooncake_lab.cli.trace import app as trace_app
from mooncake_lab.cli.verdicts import verdicts

app = typer.Typer(
    help="Reproduce the Mooncake papers: traces, caches, engines, simulated and live clusters, chapters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(trace_app, name="trace")
app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")
app.add_typer(classroom_app, name="classroom")
bench_app.command("store")(bench_store)
app.command()(cache)
app.command()(batch)
app.command()(doctor)
app.command()(generate)
app.command()(simulate)
app.command()(serve)
app.command()(replay)
app.command()(verdicts)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mooncake-lab {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point of the `mooncake-lab` command."""
    app()
