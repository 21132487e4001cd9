"""`mooncake-lab model`: what a model's KVCache takes, with the equations."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_lab.cli import group
from mooncake_lab.cli.options import Json, at_least, bad_usage_if, fail, one_of
from mooncake_lab.perf import KV_DTYPES, MODELS, KVCacheShape, kvcache_of_config, linear_kvcache, model_shape

app = group("Say what a model's KVCache takes.")
_LENGTHS = (1_024, 8_192, 32_768, 131_072)


@app.command()
def describe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|SHAPE",
            help="A Hugging Face config.json, its folder, or the name of a shape such as llama3-70b.",
        ),
    ],
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, max=2**40, help="Length of a request; may be given several times."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            parser=one_of(KV_DTYPES),
            metavar="|".join(KV_DTYPES),
            help="Type of keys and values; by default what the config says.",
        ),
    ] = None,
    checkpoint_tokens: Annotated[
        int, at_least(1, "Tokens between two checkpoints of windows and recurrent states.")
    ] = 512,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A field of the config that has no effect; may be given several times."),
    ] = None,
    json_: Json = False,
) -> None:
    """Print the KVCache of a model: bytes by length of a request, tokens that a decode step reads, and equations.

    A field of the config that is not known here is refused by name, since the KVCache may depend on it.

    Example: mooncake-lab model describe llama3-70b --tokens 1000 --tokens 128000 --json
    """
    path = Path(model)
    if model in MODELS and not path.exists():
        bad_usage_if(
            (
                bool(kv_dtype or ignore_field),
                f"{model} is a shape of this package; a config.json takes these options",
            )
        )
        found = linear_kvcache(model_shape(model))
    else:
        try:
            raw, source = _read(path)
            found = kvcache_of_config(
                raw,
                source=source,
                kv_dtype=kv_dtype,
                checkpoint_tokens=checkpoint_tokens,
                ignored=ignore_field or (),
            )
        except (OSError, ValueError) as error:
            fail("model describe", str(error))
    _print(found, tokens or list(_LENGTHS), json_=json_)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The JSON object of a config, and its name for errors.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it is none.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{path} is no file, and no shape; shapes are {', '.join(MODELS)}")
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]), str(file)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error


def _print(found: KVCacheShape, lengths: list[int], *, json_: bool) -> None:
    rows = [
        {"tokens": n, "kv_bytes": found.kv_bytes(n), "read_tokens": found.read_tokens(n),
         "reusable_tokens": found.reusable_tokens(n)}
        for n in lengths
    ]  # fmt: skip
    if json_:
        groups = [
            {"kind": each.kind, "layers": each.layers, "token_bytes": each.token_bytes,
             "window_tokens": each.window_tokens, "read_at_most_tokens": each.read_at_most_tokens,
             "state_bytes": each.state_bytes, "equation": each.equation()}
            for each in found.groups
        ]  # fmt: skip
        told = {
            "model": found.name,
            "groups": groups,
            "equations": found.equations(),
            "checkpoint_bytes": found.checkpoint_bytes(),
            "checkpoint_tokens": found.checkpoint_tokens if found.checkpoint_bytes() else None,
            "lengths": rows,
        }
        typer.echo(msgspec.json.encode(told))
        return
    typer.echo(
        f"{found.name}: {sum(each.layers for each in found.groups if each.kind != 'indexer')} layers with KVCache"
    )
    for each in found.groups:
        typer.echo(f"  {each.kind:<24} {each.equation()} = {_amount(each.kv_bytes(1))} for the first token")
    typer.echo("\n".join(found.equations()))
    if found.checkpoint_bytes():
        typer.echo(
            f"a checkpoint has {_amount(found.checkpoint_bytes())}, one every {found.checkpoint_tokens:,} tokens"
        )
    typer.echo(f"{'tokens':>10}  {'KVCache':>12}  {'read tokens':>12}")
    for row in rows:
        typer.echo(f"{row['tokens']:>10,}  {_amount(row['kv_bytes']):>12}  {row['read_tokens']:>12,.0f}")


def _amount(size: float) -> str:
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{size / one:,.4g} {unit}"
    return f"{size:,.0f} B"
