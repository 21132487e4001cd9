"""`mooncake-lab trace`: describe and convert traces of any format, fetch the released ones, generate new ones."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mooncake_lab.cli import group
from mooncake_lab.cli.options import (
    BlockSize,
    Format,
    Json,
    Lenient,
    TraceFile,
    at_least,
    fail,
    failing,
    file_to_write,
    read_or_fail,
    refuse_same_file,
)
from mooncake_lab.workload import Trace, fetch_trace, statistics, write_trace
from mooncake_lab.workload.trace_summary import OF_IDS

Workload: TypeAlias = Literal["conversation", "synthetic", "toolagent", "arxiv"]
_Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]

_TimeUnit: TypeAlias = Annotated[
    Literal["s", "ms", "us", "ns"] | None, typer.Option(help="Of the times in the file; by default its format's.")
]
_IdScope: TypeAlias = Annotated[
    Literal["file", "session"] | None,
    typer.Option(help="Within what a block id stands for one block; by default as its format has it."),
]
_Tokenizer: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Counts the tokens of a file with texts: a tokenizer.json, or its folder."),
]
_OutputTokens: TypeAlias = Annotated[
    int | None, at_least(1, "Length of the answers that a file with texts does not state.")
]

app = group("Describe and convert traces, fetch the released ones, and generate new ones.")


@app.command()
def stats(
    file: TraceFile,
    format_: Format = None,
    lenient: Lenient = False,
    block_size: BlockSize = None,
    json_: Json = False,
) -> None:
    """Check a trace line by line and print its statistics.

    Example: mooncake-lab trace stats data/traces/conversation_trace.jsonl --json
    """
    trace = read_or_fail("trace stats", file, lenient=lenient, block_size_tokens=block_size, format=format_)
    numbers = asdict(statistics(trace))
    if trace.ids == "none":
        numbers |= dict.fromkeys(OF_IDS)
    if json_:
        _print_json(
            {
                "file": str(file),
                "skipped": trace.skipped,
                "renamed_blocks": trace.renamed_blocks,
                **numbers,
            }
        )
    else:
        _print_table(file, numbers)


@app.command("describe")
def describe_command(
    file: TraceFile,
    plot: Annotated[Path | None, file_to_write("Write the figure here, as SVG.")] = None,
    html: Annotated[Path | None, file_to_write("Write a page with the figure and the numbers here.")] = None,
    format_: Format = None,
    lenient: Lenient = False,
    block_size: BlockSize = None,
    time_unit: _TimeUnit = None,
    id_scope: _IdScope = None,
    tokenizer: _Tokenizer = None,
    output_tokens: _OutputTokens = None,
    json_: Json = False,
) -> None:
    """Print what a trace says about sessions and reuse: turns, growth of prompts, gaps, ceiling of the hit rate.

    What the file does not say is none. A ceiling of the hit rate is that of a cache without limit.

    Example: mooncake-lab trace describe data/traces/conversation_trace.jsonl --plot described.svg
    """
    from mooncake_lab.workload.description import describe

    refuse_same_file(file, plot=plot, html=html)
    options = {"format": format_, "time_unit": time_unit, "id_scope": id_scope}
    options |= {"tokenizer": tokenizer, "output_tokens": output_tokens}
    trace = read_or_fail("trace describe", file, lenient=lenient, block_size_tokens=block_size, **options)
    told = describe(trace)
    numbers = {name: value for name, value in asdict(told).items() if name not in _ONLY_DRAWN}
    if plot is not None or html is not None:
        from mooncake_lab.book.figures.described import described_page, described_svg

        with failing("trace describe"):
            svg = described_svg(told, trace.source)
            if plot is not None:
                plot.write_text(svg, encoding="utf-8")
            if html is not None:
                html.write_text(described_page(file.name, numbers, svg), encoding="utf-8")
    if json_:
        _print_json(
            {"file": str(file), "skipped": trace.skipped, "renamed_blocks": trace.renamed_blocks, **numbers}
        )
    else:
        _print_table(file, numbers)


_ONLY_DRAWN = frozenset({"gaps_s", "turn_counts", "prompts_by_turn"})


@app.command()
def convert(
    file: TraceFile,
    output: Annotated[Path, typer.Argument(help="The file to write; a name that ends in .gz is compressed.")],
    format_: Format = None,
    lenient: Lenient = False,
    block_size: BlockSize = None,
    time_unit: _TimeUnit = None,
    id_scope: _IdScope = None,
    tokenizer: _Tokenizer = None,
    output_tokens: _OutputTokens = None,
    requests_per_s: Annotated[
        float | None, at_least(1e-9, "Let requests arrive as a Poisson process, as for a file without times.")
    ] = None,
    seed: Annotated[int, at_least(0, "Of these arrivals.")] = 0,
    force: _Force = False,
    json_: Json = False,
) -> None:
    """Convert a trace of another format to Mooncake's, with sessions and who waits for whom.

    The file appears complete or not at all. The page on traces of others says what is lost, format by format.

    Example: mooncake-lab trace convert data/traces/conversation_trace.jsonl converted.jsonl.gz
    """
    refuse_same_file(file, output=output)
    _may_write("trace convert", output, force=force)
    options = {"format": format_, "time_unit": time_unit, "id_scope": id_scope}
    options |= {"tokenizer": tokenizer, "output_tokens": output_tokens}
    trace = read_or_fail("trace convert", file, lenient=lenient, block_size_tokens=block_size, **options)
    with failing("trace convert"):
        write_trace(output, _with_arrivals(trace, requests_per_s, seed))
    made = {"file": str(output), "from": str(file), "format": trace.format, "requests": len(trace)}
    made |= {"skipped": trace.skipped, "block_size_tokens": trace.block_size_tokens, "block_ids": trace.ids}
    if json_:
        _print_json(made)
    else:
        typer.echo(f"{output}: {len(trace):,} requests of {file}, which has the format {trace.format}")


def _with_arrivals(trace: Trace, requests_per_s: float | None, seed: int) -> Trace:
    if requests_per_s is None:
        return trace
    from mooncake_lab.workload import with_poisson_arrivals

    return with_poisson_arrivals(trace, requests_per_s, seed=seed)


@app.command()
def servegen(
    folder: Annotated[
        Path,
        typer.Argument(help="Of ServeGen's clients, as its data/language/m-small.", exists=True, file_okay=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The file to write.")],
    start: Annotated[float, at_least(0, "Where in the models' days to begin (s).")] = 0,
    duration: Annotated[float, at_least(1e-3, "How long a part to draw (s).")] = 600,
    speed: Annotated[float, at_least(1e-6, "2 doubles the rate of each client.")] = 1,
    seed: Annotated[int, at_least(0, "The same seed gives the same trace.")] = 0,
    force: _Force = False,
    json_: Json = False,
) -> None:
    """Draw requests from ServeGen's models of clients: times and lengths, without block ids.

    Example: mooncake-lab trace servegen servegen/ --duration 3600 --seed 7 -o drawn.jsonl
    """
    from mooncake_lab.workload.servegen import servegen_trace

    _may_write("trace servegen", output, force=force)
    with failing("trace servegen"):
        trace = servegen_trace(folder, start_s=start, duration_s=duration, speed=speed, seed=seed)
        write_trace(output, trace)
    if json_:
        _print_json({"file": str(output), "requests": len(trace), "seed": seed, "source": trace.source})
    else:
        typer.echo(f"{output}: {len(trace):,} requests, {trace.source}")


def _may_write(command: str, output: Path, *, force: bool) -> None:
    if output.exists() and not force:
        fail(command, f"{output} exists already; name another file, or add --force to replace it")
    if not output.parent.is_dir():
        fail(command, f"{output} cannot be written: there is no folder {output.parent}")


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
    from mooncake_lab.workload.twin import make_twin  # twins are drawn with numpy, which the extra `stats` brings

    _may_write("trace synth", output, force=force)
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


def _print_table(file: Path, numbers: dict[str, Any]) -> None:
    table = Table(title=str(file), title_justify="left", show_header=False)
    table.add_column("statistic")
    table.add_column("value", justify="right")
    for name, value in numbers.items():
        if isinstance(value, dict):
            for percentile, number in value.items():
                table.add_row(f"{name} {percentile}", _shown(number))
        else:
            table.add_row(name, _shown(value))
    Console().print(table)


def _shown(value: float | str | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, str | bool):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
