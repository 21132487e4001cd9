"""Downloads that are checked by fingerprint and appear complete or not at all."""

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

from mooncake_lab.core.files import complete_file

_CHUNK_BYTES: Final = 1 << 18
_SILENCE_S: Final = 30.0
"""How long the server may send nothing."""


class WrongContentError(ValueError):
    """What was sent is complete, but is not the file that was asked for."""


def download(address: str, path: Path, sha256: str, *, progress: bool = False) -> None:
    """Fetch a file; what was at its path is replaced only when the SHA-256 is right.

    Args:
        address: begins with http:// or https://.
        path: of the file; its folder is made.
        sha256: in hexadecimal.
        progress: whether to draw a bar on stderr.

    Raises:
        ConnectionError: when the file cannot be fetched, or not all of it came.
        WrongContentError: when its SHA-256 is another.
        ValueError: when the address is not http:// or https://.
        OSError: when the file cannot be written.
    """
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address!r} is not an address to fetch from; allowed are http:// and https://")
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with complete_file(path) as file:
        for chunk in _received(address, path.name, progress=progress):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != sha256:
            raise WrongContentError(f"its SHA-256 is {digest.hexdigest()}, not {sha256}")


def _received(address: str, name: str, *, progress: bool) -> Generator[bytes]:
    """The content of an answer, piece by piece.

    Raises:
        ConnectionError: when there is no answer, one that is an error, or less of it than it announced.
    """
    received, is_whole = 0, False
    try:
        asked = Request(address, headers={"User-Agent": "mooncake-lab"})  # noqa: S310 - http or https
        with urlopen(asked, timeout=_SILENCE_S) as answer:  # noqa: S310
            announced: int | None = answer.length
            with _bar(name, announced, progress=progress) as show:
                while chunk := answer.read(_CHUNK_BYTES):
                    yield chunk
                    received += len(chunk)
                    show(received)
            is_whole = announced is None or received == announced
    except IncompleteRead:
        pass
    except (OSError, HTTPException) as error:
        raise ConnectionError(_reason(error)) from error
    except ValueError as error:  # of the address, such as a bracket too few
        raise ValueError(f"{address!r} is not an address to fetch from ({error})") from None
    if not is_whole:
        raise ConnectionError(f"the connection ended after {received:,} bytes, before the end of the file")


def _reason(error: Exception) -> str:
    """What went wrong, such as that a name is not known; `URLError` says it in its reason."""
    inner = getattr(error, "reason", error)
    return str(error) if isinstance(inner, str) else str(inner) or type(inner).__name__


@contextmanager
def _bar(name: str, announced: int | None, *, progress: bool) -> Generator[Callable[[int], None]]:
    """A function that is told how many bytes have come, and draws them."""
    if not progress:
        yield lambda _received: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=announced)
        yield lambda received: bar.update(task, completed=received)
