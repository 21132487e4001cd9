"""`mooncake-lab store`: faults in the store."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mooncake_lab.bench.soak import FAULTS, Soak, SoakReport
from mooncake_lab.bench.soak_process import POOLS
from mooncake_lab.cli import group
from mooncake_lab.cli.options import Json, at_least, failing
from mooncake_lab.store.backends import StorageError

app = group("Test the store of KVCache blocks under faults.")


@app.command()
def soak(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the SSD tier; created if it is missing.")],
    seconds: Annotated[float, at_least(0, "Duration (s).")] = 30,
    faults: Annotated[
        str, typer.Option(help=f"Faults to inject: some of {','.join(FAULTS)}, or none.")
    ] = ",".join(FAULTS),
    shared_store: Annotated[
        str, typer.Option(help=f"The last tier, which two stores share: one of {','.join(POOLS)}.")
    ] = "remote",
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    json_: Json = False,
) -> None:
    """Use DRAM, SSD and a shared store under injected faults; exit code 1 if a byte was wrong, lost or leaked.

    The faults: the process of the store is killed, bits of its files are flipped, writes find no space or are cut
    off, reads fail, permission is lost, and the remote store closes its connections.

    Example: mooncake-lab store soak --dir /tmp/soak --seconds 600 --json
    """
    try:
        soaking = Soak(folder, [] if faults == "none" else faults.split(","), seed, shared_store)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with failing("store soak", StorageError):
        report = soaking.run(seconds)
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
