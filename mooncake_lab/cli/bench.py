"""`mooncake-lab bench`: the speed of the engine on this machine, compared with a peer and the machine's peaks."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="A Llama shape; its weights are random.")] = "lab-30m",
    peer: Annotated[
        Literal["hf", "hf-continuous", "none"], typer.Option(help="The program to compare with.")
    ] = "hf",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Data type of the weights.")] = "float32",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device on which both run.")] = "cpu",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch size of a decode case; may be repeated.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of the prefill and decode cases.")
    ] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps per round.")] = 16,
    mixed: Annotated[int, typer.Option(min=0, help="Requests in the mixed burst; 0 for no burst.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of paired runs; the medians are printed.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write a JSON file, for data/measured.", dir_okay=False)] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time prefill, decode batches and a mixed burst, paired with a peer on the same weights.

    A ratio above 1 means that our engine is faster. The floor is the least time at the highest bandwidth and FLOP
    rate that this machine reached, in separate matrix products and reads or in one of the timed cases.

    Example: mooncake-lab bench engine --model lab-30m --peer hf --batch 1 --batch 8 --out engine.json
    """
    try:
        found = _measure(
            model, peer, dtype, device, batch or [1, 8, 32], prompt_tokens, steps, mixed, rounds
        )  # fmt: skip  # one line of plain values
        if out is not None:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        typer.echo(f"mooncake-lab bench engine: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(
        msgspec.json.encode({key: found[key] for key in found if key != "table"}) if json_ else found["table"]
    )
    if not json_:
        typer.echo(f"{found['machine']}; load average {found['load_average'][0]:.1f}", err=True)


def _measure(
    model: str,
    peer: str,
    dtype: str,
    device: str,
    batches: list[int],
    prompt_tokens: int,
    steps: int,
    mixed: int,
    rounds: int,
) -> dict[str, Any]:
    """All comparisons, as plain values."""
    from mooncake_lab.bench import engine as measure
    from mooncake_lab.engine.loading import DTYPES

    cases = [measure.prefill_case(prompt_tokens)]
    cases += [measure.decode_case(batch, prompt_tokens, steps) for batch in batches]
    cases += [measure.mixed_case(mixed)] if mixed else []
    turns = rounds + 2
    room = max(
        sum(case.prompt_tokens) + turns * (sum(case.new_tokens) + 16 * len(case.new_tokens)) for case in cases
    )
    bench = measure.Bench(model, dtype, device, cache_tokens=room)
    rows = [bench.compare(case, peer, rounds) for case in cases]
    rows = measure.compared_with_all(rows, bench.peaks, DTYPES[dtype].itemsize)
    about = {"model": model, "dtype": dtype, "peer": peer}
    return about | measure.report(rows, bench.peaks, device) | {"table": measure.table(rows)}
