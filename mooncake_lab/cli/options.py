"""What several commands share: options, progress, results on stdout, and reasons of failure on stderr."""

import contextlib
import os
from collections.abc import Callable, Collection, Generator, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import msgspec
import typer

from mooncake_lab.batching import BATCHING_POLICIES
from mooncake_lab.conductor import ADMISSION_POLICIES, PLACEMENT_POLICIES
from mooncake_lab.workload import FORMATS, Trace, read_trace


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A parser of an option whose values are the names of a registry."""
    allowed = tuple(names)

    def parse(text: str) -> str:
        if text not in allowed:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


def _policy(names: Collection[str], sentence: str) -> Any:
    return typer.Option(parser=one_of(names), metavar="NAME", help=f"{sentence} Allowed are {', '.join(names)}.")


def at_least(least: float, help_: str, *, most: float | None = None) -> Any:
    """An option that is a number, up to `LARGEST` where no `most` is given; infinity is larger."""

    def bounded(number: float | None) -> float | None:
        if number is not None and number > LARGEST:
            raise typer.BadParameter(f"{number} is too large; allowed are numbers from {least} to {LARGEST}")
        return number

    return typer.Option(min=least, max=most, callback=bounded, help=help_)


def file_to_write(help_: str, *, appends: bool = False) -> Any:
    """An option that names a file; one that cannot be written is refused before any work.

    What is replaced needs a folder that can be written; what is appended to, a device or a pipe needs that itself.
    """

    def checked(path: Path | None) -> Path | None:
        if path is None:
            return None
        kept = path.exists() and (appends or not path.is_file())
        if not os.access(path if kept else path.resolve().parent, os.W_OK):
            why = "you may not write to it" if kept else f"you cannot create files in {path.parent}"
            raise typer.BadParameter(f"{path} cannot be written: {why}")
        return path

    return typer.Option(dir_okay=False, callback=checked, help=help_)


LARGEST: Final = 2**53
"""The largest number that an option takes: up to here whole numbers are exact as floats and in JSON."""
BATCHING_NAMES: Final = tuple(name for name in BATCHING_POLICIES if name not in {"prefill_only", "decode_only"})
"""Policies that do both prefill and decode."""

TraceFile = Annotated[
    Path,
    typer.Argument(
        help="A trace of any format of --format, plain, gzipped or with Zstandard.", exists=True, dir_okay=False
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        parser=one_of(FORMATS),
        metavar="NAME",
        help=f"Format of the trace, by default what its beginning says. Allowed are {', '.join(FORMATS)}.",
    ),
]
Lenient = Annotated[bool, typer.Option("--lenient", help="Skip bad lines and report how many.")]
BlockSize = Annotated[
    int | None,
    at_least(
        1, "Tokens per block of a trace that does not say so; by default those of its format, 512 for Mooncake's."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[str, typer.Option(metavar="DIR|random:SHAPE", help="A Hugging Face Llama, or a random one.")]
Speed = Annotated[float, at_least(1e-6, "Speed of the replay; 2 is twice as fast as recorded.")]
TTFT = Annotated[float, at_least(1e-9, "Limit of the time to first token (s).")]
TBT = Annotated[float, at_least(1e-9, "Limit of the time between tokens (s).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")]
DType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="float32 on CPU, bfloat16 on GPU.")
]
Backend = Annotated[
    Literal["auto", "dense", "cpu", "cuda"], typer.Option(help="Implementation of the tensor operations.")
]
Batching = Annotated[str, _policy(BATCHING_NAMES, "Batching policy of an instance that does prefill and decode.")]
Placement = Annotated[
    str | None,
    _policy(
        PLACEMENT_POLICIES,
        "Placement policy; by default kvcache_centric, or fewest_requests with --coupled-nodes.",
    ),
]
Admission = Annotated[str, _policy(ADMISSION_POLICIES, "Admission policy.")]
DecodeSeconds = Annotated[
    float | None,
    at_least(1e-9, "Decode time per request that --admission predictive assumes (s); no default."),
]
PrefillNodes = Annotated[int | None, at_least(1, "Prefill workers; 1 by default.")]
DecodeNodes = Annotated[int | None, at_least(1, "Decode workers; 1 by default.")]
CoupledNodes = Annotated[
    int | None, at_least(1, "Workers that do both prefill and decode, instead of separate workers.")
]
Transfer = Annotated[
    Literal["tcp", "mooncake"],
    typer.Option(help="How KVCache is transferred; mooncake needs the extra of that name."),
]
Threads = Annotated[int, at_least(1, "Threads of each worker.")]
LiveSeed = Annotated[int, at_least(0, "Seed of random weights and of random placement.")]


def fail(command: str, reason: object, *, code: int = 1) -> NoReturn:
    """Exit, after the reason went to stderr under the words of the command."""
    typer.echo(f"mooncake-lab {command}: {reason}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def failing(command: str, *more: type[Exception]) -> Generator[None]:
    """Turn a ValueError, an OSError and exceptions of more kinds into one line on stderr and exit code 1."""
    try:
        yield
    except (ValueError, OSError, *more) as error:
        fail(command, error)


def bad_usage_if(*contradictions: tuple[bool, str]) -> None:
    """Refuse the first of several contradictions that holds.

    Raises:
        typer.BadParameter: with the sentence that belongs to it.
    """
    for holds, sentence in contradictions:
        if holds:
            raise typer.BadParameter(sentence)


def refuse_same_file(trace: Path, **written: Path | None) -> None:
    """Refuse to write what is read, or two outputs into one file; a device may take both.

    Raises:
        typer.BadParameter: naming the option.
    """
    seen = {trace.resolve(): "the trace"}
    for name, path in written.items():
        if path is not None and (path.is_file() or not path.exists()):
            other = seen.setdefault(path.resolve(), f"--{name}")
            bad_usage_if((other != f"--{name}", f"--{name} {path} is the file of {other}; name another file"))


def refuse_typed(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were typed but would have no effect; defaults are never refused.

    Args:
        context: of the command.
        names: of parameters, such as `ttft_slo`; those that the command does not have are ignored.
        why: ends the sentence.

    Raises:
        typer.BadParameter: naming the options that were typed.
    """
    sources = {name: context.get_parameter_source(name) for name in names}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    options = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
    bad_usage_if((bool(typed), f"leave out {options}: {why}"))


def read_or_fail(
    command: str, file: Path, *, lenient: bool, block_size_tokens: int | None = None, **options: Any
) -> Trace:
    """Read a trace for a command; skipped lines and contradicting block ids are reported on stderr.

    Args:
        command: its words.
        file: of the trace.
        lenient: see `read_trace`, as for the following.
        block_size_tokens: of a file that does not say so.
        options: more of `read_trace`; what is None is left to the format.

    Raises:
        typer.Exit: with code 1, after the reason went to stderr, when the file cannot be used.
    """
    given = {name: value for name, value in options.items() if value is not None}
    with failing(command), _reading(file) as progress:
        trace = read_trace(file, lenient=lenient, block_size_tokens=block_size_tokens, progress=progress, **given)
    if trace.skipped:
        typer.echo(f"bad lines skipped: {trace.skipped}; the first of them:", err=True)
        for reason in trace.skipped_reasons:
            typer.echo(f"  {reason}", err=True)
    if trace.renamed_blocks:
        typer.echo(
            f"block ids that stand for another block than before: {trace.renamed_blocks}; an id names a block and"
            " all before it, so each counts as a block of its own",
            err=True,
        )
    if trace.ids == "none":
        typer.echo(f"{file} has no block ids: {NO_HIT_RATE}", err=True)
    elif trace.ids == "minted":
        typer.echo(
            f"{file} has no block ids, but how much of each prompt was cached; ids are made from this, which"
            " requests share only with their own session",
            err=True,
        )
    return trace


NO_HIT_RATE: Final = "what its prompts share is unknown, so no hit rate follows"
"""Said of a trace without ids."""
_LARGE_BYTES: Final = 1 << 25


@contextlib.contextmanager
def _reading(file: Path) -> Generator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal's stderr while a large file is read."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal or file.stat().st_size < _LARGE_BYTES:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"reading {file.name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def without_hit_rate(numbers: dict[str, Any], trace: Trace) -> dict[str, Any]:
    """The numbers of a run, without a hit rate where the trace does not say what prompts share."""
    return numbers if trace.ids != "none" else {**numbers, "token_hit_rate": None}


def print_numbers(numbers: dict[str, Any], *, json_: bool) -> None:
    """One JSON object, or one line per number; lines leave out the settings of the run."""
    if json_:
        typer.echo(msgspec.json.encode(numbers))
        return
    for name, value in numbers.items():
        if not isinstance(value, dict):
            shown = "none" if value is None else f"{value:,.4f}" if isinstance(value, float) else value
            typer.echo(f"{name:28} {shown}")
