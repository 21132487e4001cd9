"""Files of a class, which whoever ends in the middle must not leave half written."""

from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file so that whoever reads it finds the old one or the new one, whole.

    Args:
        path: of the file.
        text: all of it.
        mode: who may read and write a new file, before the umask.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.touch(mode=mode)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
