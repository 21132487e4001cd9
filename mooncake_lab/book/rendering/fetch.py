"""The two traces that the pages are written for, fetched before the book is built if that takes seconds.

    python -m mooncake_lab.book.rendering.fetch data/traces [--offline]

A process of its own fetches them, and is ended at the limit, whatever it waits for: the resolution of a name, the
first byte of an answer, or the rest of one. It writes into a folder of its own, from which a file is moved only
when its fingerprint was right. A failure is no error: the book then uses twins, and one line says so.

No failure is remembered. Most take less than a second, such as a name that is not resolved; the others take the
limit, and whoever builds often on such a network sets `OFFLINE=1`, which the line names.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from mooncake_lab.book.rendering.provenance import BOOK_TRACES
from mooncake_lab.workload.releases import DATA_VARIABLE, Release, fetch_release, find_trace, release_of

LIMIT_S: Final = 17.0
"""With the start of both processes, `make book` loses less than 20 s."""


def fetch_book_traces(folder: Path, *, offline: bool = False, limit_s: float = LIMIT_S) -> str | None:
    """Fetch those of `BOOK_TRACES` that this machine lacks; what to print, or None where there was nothing to do.

    Args:
        folder: where to put them.
        offline: do not try.
        limit_s: for both together.
    """
    if os.environ.get(DATA_VARIABLE):
        return None
    missing = [release_of(name) for name in BOOK_TRACES if find_trace(name) is None]
    if not missing:
        return None
    names = _listed([release.name for release in missing])
    if offline:
        return f"not fetched, because OFFLINE is set: the book uses generated twins of {names}"
    try:
        failures = _fetch(missing, folder, limit_s)
    except OSError as error:
        failures = {release.name: str(error) for release in missing}
    if not failures:
        return f"{names} fetched into {folder}"
    fetched = [release.name for release in missing if release.name not in failures]
    reasons = {why: [name for name in failures if failures[name] == why] for why in failures.values()}
    said = f"{_listed(fetched)} fetched into {folder}; " if fetched else ""
    said += "; ".join(f"{_listed(these)} could not be fetched ({why})" for why, these in reasons.items())
    return f"{said}: the book uses generated twins; OFFLINE=1 does not try"


def _fetch(releases: Sequence[Release], folder: Path, limit_s: float) -> dict[str, str]:
    """Why a release could not be fetched, by its name; those that are not named lie in the folder."""
    ends = time.monotonic() + limit_s
    failures = {release.name: f"not here after {limit_s:.0f} s" for release in releases}
    folder.mkdir(parents=True, exist_ok=True)
    spawning = get_context("spawn")
    told, telling = spawning.Pipe(duplex=False)
    with TemporaryDirectory(prefix=".incomplete-", dir=folder, ignore_cleanup_errors=True) as made:
        process = spawning.Process(target=_fetch_each, args=(releases, Path(made), telling), daemon=True)
        process.start()
        telling.close()
        try:
            with contextlib.suppress(EOFError):  # it ended
                while told.poll(max(0.0, ends - time.monotonic())):
                    name, why = msgspec.json.decode(told.recv_bytes(), type=tuple[str, str])
                    file_name = release_of(name).file_name
                    if why:
                        failures[name] = why
                    else:
                        Path(made, file_name).replace(folder / file_name)
                        del failures[name]
        finally:
            process.kill()
            process.join()
    return failures


def _fetch_each(releases: Sequence[Release], folder: Path, telling: Connection) -> None:
    """Fetch one after the other, and tell the name of each with the reason why it failed, or none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    for release in releases:
        why = ""
        try:
            fetch_release(release, folder, release.url)
        except ConnectionError as error:
            why = _innermost(error)
        except ValueError as error:
            why = "not the released file: its SHA-256 is another" if error.__cause__ else str(error)
        except OSError as error:
            why = str(error)
        telling.send_bytes(msgspec.json.encode((release.name, why)))


def _innermost(error: BaseException) -> str:
    """What the first of a chain of errors says, such as that a name is not known."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(said).split())


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)


def main(arguments: Sequence[str]) -> int:
    """The command line: a folder, and whether not to try."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.book.rendering.fetch", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the traces are kept")
    parser.add_argument("--offline", action="store_true", help="do not try")
    options = parser.parse_args(arguments)
    said = fetch_book_traces(options.folder, offline=options.offline)
    if said:
        sys.stderr.write(f"{'traces':<16} {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
