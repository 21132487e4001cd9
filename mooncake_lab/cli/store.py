"""`mooncake-lab store` and `bench store`: SSD folders verified, soaked under faults, and media measured."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_lab.bench.soak import FAULTS, Soak, SoakReport
from mooncake_lab.bench.store import MEDIA, Measured, measure_media
from mooncake_lab.bench.store_lookup import Lookup, measure_lookup
from mooncake_lab.core import GB, MIB
from mooncake_lab.store.backends import FolderReport, StorageError, verify_folder

app = typer.Typer(
    help="Check SSD folders of KVCache blocks, and test the store under faults.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def store() -> None:
    """Check SSD folders of KVCache blocks, and test the store under faults."""


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of an SSD tier; no other process may have it open.")],
    repair: Annotated[bool, typer.Option("--repair", help="Drop damaged blocks and rebuild the index.")] = False,
    json_: Json = False,
) -> None:
    """Read every block and compare it with its checksums.

    The exit code is 1 if something is damaged, even if it was repaired.

    Example: mooncake-lab store verify /var/cache/kvcache --repair
    """
    try:
        reports = verify_folder(folder, repair=repair)
    except (StorageError, ValueError, OSError) as error:
        typer.echo(f"mooncake-lab store verify: {error}", err=True)
        raise typer.Exit(1) from error
    if json_:
        models = [{**asdict(report), "is_sound": report.is_sound} for report in reports]
        typer.echo(msgspec.json.encode({"folder": str(folder), "models": models}))
    else:
        for report in reports:
            typer.echo(_told(report))
    if not all(report.is_sound for report in reports):
        raise typer.Exit(1)


def _told(report: FolderReport) -> str:
    lines = [f"model {report.fingerprint}: {report.blocks:,} blocks, {report.payload_bytes:,} bytes"]
    lines += [f"  damaged: {key}" for key in report.damaged]
    if report.trouble is not None:
        lines.append(f"  the blocks of this model could not be read, or not repaired: {report.trouble}")
    elif not report.index_is_whole:
        lines.append("  the index is damaged")
    if report.repaired:
        lines.append("  repaired: damaged blocks dropped, index rebuilt")
    return "\n".join(lines)


@app.command()
def soak(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the SSD tier; created if it is missing.")],
    seconds: Annotated[float, typer.Option(min=0, help="Duration (s).")] = 30,
    faults: Annotated[
        str, typer.Option(help=f"Faults to inject: some of {','.join(FAULTS)}, or none.")
    ] = ",".join(FAULTS),
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    json_: Json = False,
) -> None:
    """Use DRAM, SSD and TCP tiers under injected faults; the exit code is 1 if a byte was wrong, lost or leaked.

    The faults: the process of the store is killed, bits of its files are flipped, writes find no space or are cut
    off, reads fail, permission is lost, and the peer closes its connection.

    Example: mooncake-lab store soak --dir /tmp/soak --seconds 600 --json
    """
    try:
        report = Soak(folder, [] if faults == "none" else faults.split(","), seed).run(seconds)
    except (StorageError, ValueError, OSError) as error:
        typer.echo(f"mooncake-lab store soak: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(msgspec.json.encode(report.plain()) if json_ else _summary(report))
    if not report.passed:
        raise typer.Exit(1)


def _summary(report: SoakReport) -> str:
    injected = ", ".join(f"{count} {name}" for name, count in report.faults.items())
    return (
        f"{report.seconds:g} s, {report.lives} lives, {report.operations:,} operations; injected: {injected}\n"
        f"{report.blocks_checked:,} blocks checked, {report.damage_detected} damaged ones detected\n"
        f"wrong bytes {report.wrong_bytes}, lost committed blocks {report.lost_committed_blocks},"
        f" leaked bytes {report.leaked_bytes}, crashes {report.crashes}"
    )


def bench_store(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder on the SSD to measure; the temporary folder by default.")
    ] = None,
    media: Annotated[str, typer.Option(help=f"Backends to measure: some of {','.join(MEDIA)}.")] = "dram,ssd,tcp",
    block_mib: Annotated[list[int] | None, typer.Option(min=1, help="Block size (MiB); may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the medians are printed.")] = 5,
    working_set_mib: Annotated[
        int, typer.Option(min=1, help="Data moved per pass (MiB); should exceed the CPU caches.")
    ] = 128,
    out: Annotated[Path | None, typer.Option(help="Write a JSON file, for data/measured.", dir_okay=False)] = None,
    json_: Json = False,
) -> None:
    """Compare the store with memcpy, pwrite and pread (cached and O_DIRECT), a plain socket, and Mooncake's API.

    Both sides run in alternation; a ratio above 1 means that the store is faster. Blocks have 32 layers. SSD
    writes of both sides are synced. mooncake needs the extra of that name. The last line is the time to look up a
    prompt of 128k tokens.

    Example: mooncake-lab bench store --media dram,ssd,tcp --block-mib 2 --block-mib 16 --json
    """
    sizes = [size * MIB for size in block_mib or [2, 16]]
    try:
        place = folder or Path(tempfile.gettempdir())
        rows = measure_media(
            place,
            media.split(","),
            block_bytes=sizes,
            rounds=rounds,
            working_set_bytes=working_set_mib * MIB,
        )
        lookup = measure_lookup()
        found = _numbers(rows, lookup, rounds)
        if out is not None:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except (StorageError, ValueError, OSError) as error:
        typer.echo(f"mooncake-lab bench store: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(msgspec.json.encode(found) if json_ else f"{_table(rows)}\n{_lookup_line(lookup)}")


def _numbers(rows: list[Measured], lookup: Lookup, rounds: int) -> dict[str, Any]:
    from mooncake_lab.bench.machine import provenance

    return {
        **provenance(),
        "rounds": rounds,
        "layers": 32,
        "rows": [asdict(row) for row in rows],
        "lookup": asdict(lookup),
    }


def _lookup_line(found: Lookup) -> str:
    return (
        f"keys of {found.tokens:,} tokens: {1e3 * found.keys_s:.3f} ms ({1e3 * found.floor_s:.3f} ms as one hash);"
        f" matched over {found.instances} instances: {1e3 * found.match_s:.3f} ms"
    )


def _table(rows: list[Measured]) -> str:
    head = f"{'medium':16} {'operation':10} {'MiB':>5} {'GB/s':>7}   {'floor':17} {'GB/s':>7} {'ratio':>6}"
    lines = [
        f"{row.medium:16} {row.operation:10} {row.block_bytes / MIB:5.0f} {row.bytes_per_s / GB:7.2f}   "
        f"{row.floor:17} {row.floor_bytes_per_s / GB:7.2f} {row.ratio:6.2f}"
        for row in rows
    ]
    return "\n".join([head, *lines])
