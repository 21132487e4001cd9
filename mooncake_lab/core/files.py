"""Files that appear complete or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def complete_file(path: Path, *, mode: int = 0o666) -> Generator[BinaryIO]:
    """A file to write, which takes its name once all is written; where the writing fails, what was there stays.

    A link stays a link. What is no regular file, such as a device or a pipe, is written to as it is.

    Args:
        path: of the file.
        mode: its permissions, as far as the process's mask allows them.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", 1 << 20, opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
