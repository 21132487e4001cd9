"""`mooncake-lab calibrate`: fit the simulator to a server, and compare its predictions with what it does."""

import contextlib
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_lab.calibrate.observations import CalibrationError, Reply
from mooncake_lab.calibrate.settings import SCHEDULERS
from mooncake_lab.cli.options import (
    BlockSize,
    Format,
    Json,
    Lenient,
    at_least,
    fail,
    file_to_write,
    one_of,
    read_or_fail,
)
from mooncake_lab.workload import Trace

_DEFAULT_TRACE = "conversation"
"""Its twin where it is not at hand."""


def _shares(text: str) -> tuple[float, ...]:
    """Shares of saturation."""
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < share <= 10 for share in found):
        raise typer.BadParameter(f"{text!r}; allowed are numbers above 0 and up to 10, separated by commas")
    return tuple(dict.fromkeys(found))


def calibrate(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server, such as http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, typer.Option(help="The model's name in requests; by default the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MOONCAKE_LAB_API_KEY", help="Key that the server requires.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace of the held-out runs; by default the conversation trace or its twin.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    divide: Annotated[int, at_least(1, "Divide all lengths and the block size of the trace by this number.")] = 32,
    num_prompts: Annotated[int, at_least(2, "Requests of each held-out run.")] = 100,
    rates: Annotated[
        Any,
        typer.Option(
            parser=_shares, metavar="SHARES", help="Rates of the held-out runs over the saturation rate."
        ),
    ] = "0.3,0.5,0.7,0.85,1.1",
    repetitions: Annotated[int, at_least(1, "How often everything is measured, in turn.", most=100)] = 3,
    max_concurrency: Annotated[int, at_least(1, "Clients of the largest closed loop.", most=1024)] = 16,
    scheduler: Annotated[
        str | None,
        typer.Option(
            parser=one_of(SCHEDULERS),
            metavar="NAME",
            help=f"How the server plans iterations, by default vllm_today. Allowed are {', '.join(SCHEDULERS)}.",
        ),
    ] = None,
    max_num_seqs: Annotated[int | None, at_least(1, "Requests of an iteration of the server.")] = None,
    max_num_batched_tokens: Annotated[int | None, at_least(1, "Tokens of an iteration of the server.")] = None,
    kv_tokens: Annotated[int | None, at_least(1, "Tokens of KVCache that the server holds.")] = None,
    block_size: Annotated[int | None, at_least(1, "Tokens of a block of the server's KVCache.")] = None,
    max_model_len: Annotated[int | None, at_least(1, "Tokens of a prompt and its answer together.")] = None,
    timeout: Annotated[float, at_least(0.1, "How long the server may be silent (s).", most=86_400)] = 60.0,
    seed: Annotated[int, at_least(0, "Seed of arrivals and intervals.")] = 0,
    html: Annotated[Path | None, file_to_write("Write a page with the scatter here.")] = None,
    trace_format: Format = None,
    trace_block_size: BlockSize = None,
    lenient: Lenient = False,
    json_: Json = False,
) -> None:
    """Fit the simulator to an OpenAI-compatible server, predict held-out runs, and print the errors.

    Clients time prompts alone, crowds that decode together, and prompts in a queue; then they send requests of a
    trace at several rates, which the simulator predicts. What the server does not say about itself is an option,
    or assumed and shown as assumed. Ctrl-C ends the measuring and keeps what was observed.

    Example: mooncake-lab calibrate http://127.0.0.1:8000 --num-prompts 50 --repetitions 2 --html calibration.html
    """
    from mooncake_lab.calibrate import HeldOut, HttpServer, Observed, StudyPlan, conclude, learn_settings, observe
    from mooncake_lab.calibrate.report import as_plain, lines

    given = {
        "scheduler": scheduler,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    given |= {"kv_tokens": kv_tokens, "block_size": block_size, "max_model_len": max_model_len}
    source = _trace(trace, seed, lenient=lenient, block_size_tokens=trace_block_size, format_=trace_format)
    plan = StudyPlan(
        shares=rates, repetitions=repetitions, most_lanes=max_concurrency, seed=seed, salt=secrets.randbits(32)
    )
    seen = Observed()
    try:
        server = HttpServer(url, model=model, api_key=api_key, timeout_s=timeout)
        settings, read = learn_settings(given, server.metrics(), server.described)
        held_out = HeldOut.of(source, settings, divide=divide, requests=num_prompts)
        with _progress() as told:
            observe(server, settings, held_out, plan, told, seen)
        done = conclude(seen, settings, plan)
    except CalibrationError as error:
        fail("calibrate", error)
    about = {"url": url, "served_model": server.dialect.model, "prompts_as": server.dialect.form}
    about |= {"divided_by": divide, "seed": seed, "salt": plan.salt, "read": list(read)}
    plain = as_plain(done, held_out, about)
    if html is not None:
        _write_page(html, plain)
    typer.echo(msgspec.json.encode(plain) if json_ else "\n".join(lines(plain)))
    if seen.ended_by is not None:
        fail("calibrate", f"{seen.ended_by}; what was observed until then is above")


def _trace(
    path: Path | None, seed: int, *, lenient: bool, block_size_tokens: int | None, format_: str | None
) -> Trace:
    if path is not None:
        return read_or_fail(
            "calibrate", path, lenient=lenient, block_size_tokens=block_size_tokens, format=format_
        )
    from mooncake_lab.workload import load

    return load(_DEFAULT_TRACE, seed=seed)


def _write_page(path: Path, plain: dict[str, Any]) -> None:
    from mooncake_lab.calibrate.report import page
    from mooncake_lab.calibrate.scatter import scatter_svg

    svg = None
    if plain["rates"]:
        svg = scatter_svg(plain["rates"], f"{plain['served_model']} at {plain['url']}; {plain['trace']}")
    try:
        path.write_text(page(plain, svg), encoding="utf-8")
    except OSError as error:
        fail("calibrate", f"--html {path} cannot be written: {error.strerror}")


@contextlib.contextmanager
def _progress() -> Generator[Any]:
    """A bar on a terminal's stderr, or else a line for each phase."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def told(phase: str, reply: Reply | None, requests: int) -> None:
            if reply is not None:
                bar.advance(task)
                return
            bar.reset(task, description=phase, total=requests or None)
            if not console.is_terminal:
                typer.echo(phase, err=True)

        yield told
