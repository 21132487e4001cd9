"""The files of a server that grow while it serves: its run log, and its traffic as a trace."""

import contextlib
from pathlib import Path
from typing import Any, Self, final

import msgspec
import typer


@final
class GrowingFile:
    """Appends records to a file. Mutable: after a record that cannot be written, it writes no more.

    The server continues without it: a full disk must not stop requests.

    Args:
        path: the file.
        what: the word for it in messages.
        replaces: begin anew in place of appending to what is there.
    """

    def __init__(self, path: Path, what: str = "log", *, replaces: bool = False) -> None:
        self._path = path
        self._what = what
        self._file = path.open("wb" if replaces else "ab", buffering=0)
        self.is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, record: Any) -> None:
        """Append one record, whole or not at all."""
        if self.is_broken:
            return
        line = msgspec.json.encode(record) + b"\n"
        size = self._file.tell() if self._file.seekable() else None  # a pipe has no end to go back to
        try:
            written = self._file.write(line)
            reason = f"{written} of {len(line)} bytes of a record were taken"
        except OSError as error:
            written, reason = 0, str(error)
        if written != len(line):
            self.is_broken = True
            with contextlib.suppress(OSError):  # stderr may be full for the same reason
                typer.echo(f"the {self._what} {self._path} ends here, but requests continue: {reason}", err=True)
            if size is not None:
                with contextlib.suppress(OSError):
                    self._file.truncate(size)
