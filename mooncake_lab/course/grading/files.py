"""Files of a class: an interrupted writer must not leave them half written."""

from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file so that each reader finds the complete old file or the complete new one.

    Args:
        path: of the file.
        text: all of it.
        mode: who may read and write a new file, before the umask.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.touch(mode=mode)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
