"""Read a trace for a command, or exit with the reason; skipped lines are reported on stderr."""

from pathlib import Path

import typer

from mooncake_lab.workload import Trace, read_trace


def read_or_fail(command: str, file: Path, *, lenient: bool, block_size_tokens: int | None = None) -> Trace:
    """Read a trace for a command of this name.

    Args:
        command: its words after `mooncake-lab`, for the message.
        file: the trace.
        lenient: skip bad lines; how many, and the first of them, go to stderr.
        block_size_tokens: as `read_trace` takes it.

    Raises:
        typer.Exit: with code 1, after the reason went to stderr, when the file cannot be used.
    """
    try:
        trace = read_trace(file, lenient=lenient, block_size_tokens=block_size_tokens)
    except (ValueError, OSError) as error:
        typer.echo(f"mooncake-lab {command}: {error}", err=True)
        raise typer.Exit(1) from error
    if trace.skipped:
        typer.echo(f"bad lines skipped: {trace.skipped}; the first of them:", err=True)
        for reason in trace.skipped_reasons:
            typer.echo(f"  {reason}", err=True)
    return trace
