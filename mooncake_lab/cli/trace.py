"""`mooncake-lab trace`: inspect traces, fetch the released ones, and generate new ones."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mooncake_lab.cli import group
from mooncake_lab.cli.options import BlockSize, Json, Lenient, TraceFile, at_least, fail, failing, read_or_fail
from mooncake_lab.workload import TraceStatistics, fetch_trace, statistics, write_trace
from mooncake_lab.workload.twin import make_twin

Workload: TypeAlias = Literal["conversation", "synthetic", "toolagent", "arxiv"]
_Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]

app = group("Inspect traces, fetch the released ones, and generate new ones.")


@app.command()
def stats(
    file: TraceFile,
    lenient: Lenient = False,
    block_size: BlockSize = None,
    json_: Json = False,
) -> None:
    """Check a trace line by line and print its statistics.

    Example: mooncake-lab trace stats data/traces/conversation_trace.jsonl --json
    """
    trace = read_or_fail("trace stats", file, lenient=lenient, block_size_tokens=block_size)
    numbers = statistics(trace)
    if json_:
        _print_json(
            {
                "file": str(file),
                "skipped": trace.skipped,
                "renamed_blocks": trace.renamed_blocks,
                **asdict(numbers),
            }
        )
    else:
        _print_table(file, numbers)


@app.command()
def fetch(
    name: Annotated[Workload, typer.Argument(help="Which released trace.")],
    to: Annotated[Path | None, typer.Option(help="Folder for the trace; the user's cache by default.")] = None,
    url: Annotated[str | None, typer.Option(help="Another address of the same file, such as a mirror.")] = None,
    force: _Force = False,
    json_: Json = False,
) -> None:
    """Fetch a released trace from its authors and check its SHA-256.

    Example: mooncake-lab trace fetch conversation --to data/traces
    """
    with failing("trace fetch"):
        path = fetch_trace(name, folder=to, url=url, force=force)
    if json_:
        _print_json({"name": name, "path": str(path), "bytes": path.stat().st_size})
    else:
        typer.echo(path)


@app.command()
def synth(
    like: Annotated[Workload, typer.Option(help="The workload whose statistics the trace should have.")],
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The file to write.")],
    requests: Annotated[
        int | None, at_least(1, "Number of requests; by default as many as in the released trace.")
    ] = None,
    seed: Annotated[int, at_least(0, "The same seed gives the same trace.")] = 0,
    max_tokens: Annotated[
        int | None,
        at_least(1, "Limit that clients set for an answer, doubled for longer answers; not stated by default."),
    ] = None,
    force: _Force = False,
    json_: Json = False,
) -> None:
    """Generate a trace with the statistics of a workload: its twin.

    Example: mooncake-lab trace synth --like conversation --requests 1000 --seed 7 -o small.jsonl
    """
    if output.exists() and not force:
        fail("trace synth", f"{output} exists already; name another file, or add --force to replace it")
    if not output.parent.is_dir():
        fail("trace synth", f"{output} cannot be written: there is no folder {output.parent}")
    with failing("trace synth"):
        trace = make_twin(like, seed=seed, requests=requests)
        trace = trace if max_tokens is None else trace.with_max_tokens(max_tokens)
        write_trace(output, trace)
    if json_:
        made = {"file": str(output), "like": like, "seed": seed, "requests": len(trace), "source": trace.source}
        _print_json(made)
    else:
        typer.echo(f"{output}: {len(trace):,} requests, {trace.source}")


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(msgspec.json.encode(content))


def _print_table(file: Path, numbers: TraceStatistics) -> None:
    table = Table(title=str(file), title_justify="left", show_header=False)
    table.add_column("statistic")
    table.add_column("value", justify="right")
    for name, value in asdict(numbers).items():
        if isinstance(value, dict):
            for percentile, number in value.items():
                table.add_row(f"{name} {percentile}", _shown(number))
        else:
            table.add_row(name, _shown(value))
    Console().print(table)


def _shown(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
