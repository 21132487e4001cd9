"""`mooncake-lab bench`: the speed of the store on this machine, compared with the simplest programs."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_lab.cli import group
from mooncake_lab.cli.options import Json, Measured, failing

app = group("Measure speed on this machine.")


def _write(out: Path | None, found: dict[str, Any]) -> None:
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


@app.command()
def store(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder on the SSD to measure; the temporary folder by default.")
    ] = None,
    media: Annotated[
        str, typer.Option(help="Backends to measure: some of dram,ssd,tcp,mooncake.")
    ] = "dram,ssd,tcp",
    block_mib: Annotated[list[int] | None, typer.Option(min=1, help="Block size (MiB); may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the medians are printed.")] = 5,
    working_set_mib: Annotated[
        int, typer.Option(min=1, help="Data moved per pass (MiB); should exceed the CPU caches.")
    ] = 128,
    out: Measured = None,
    json_: Json = False,
) -> None:
    """Compare the store with memcpy, pwrite and pread (cached and O_DIRECT), a plain socket, and Mooncake's API.

    Both sides run in alternation; a ratio above 1 means that the store is faster. Blocks have 32 layers. SSD
    writes of both sides are synced. mooncake needs the extra of that name. The last line is the time to look up a
    prompt of 128k tokens.

    Example: mooncake-lab bench store --media dram,ssd,tcp --block-mib 2 --block-mib 16 --json
    """
    from mooncake_lab.bench.machine import provenance
    from mooncake_lab.bench.store import measure_media
    from mooncake_lab.bench.store_lookup import measure_lookup
    from mooncake_lab.core import GB, MIB
    from mooncake_lab.store.backends import StorageError

    with failing("bench store", StorageError):
        rows = measure_media(
            folder or Path(tempfile.gettempdir()),
            media.split(","),
            block_bytes=[size * MIB for size in block_mib or [2, 16]],
            rounds=rounds,
            working_set_bytes=working_set_mib * MIB,
        )
        lookup = measure_lookup()
        measured = {"rows": [asdict(row) for row in rows], "lookup": asdict(lookup)}
        found = {**provenance(), "rounds": rounds, "layers": 32, **measured}
        _write(out, found)
    if json_:
        typer.echo(msgspec.json.encode(found))
        return
    typer.echo(f"{'medium':16} {'operation':10} {'MiB':>5} {'GB/s':>7}   {'floor':17} {'GB/s':>7} {'ratio':>6}")
    for row in rows:
        typer.echo(
            f"{row.medium:16} {row.operation:10} {row.block_bytes / MIB:5.0f} {row.bytes_per_s / GB:7.2f}   "
            f"{row.floor:17} {row.floor_bytes_per_s / GB:7.2f} {row.ratio:6.2f}"
        )
    typer.echo(
        f"keys of {lookup.tokens:,} tokens: {1e3 * lookup.keys_s:.3f} ms"
        f" ({1e3 * lookup.floor_s:.3f} ms as one hash);"
        f" matched over {lookup.instances} instances: {1e3 * lookup.match_s:.3f} ms"
    )
