"""Tables and pages that the grader writes again and again, and that a teacher may have edited in between.

The grader remembers the digest of everything it writes. A file that is not as it wrote it is kept beside the new
one, under another name.
"""

import hashlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

from mooncake_lab.core import complete_file

_NAME: Final = "written.sha256"


class OwnFiles:
    """The files of one folder of grades; mutable because it remembers what it wrote.

    Args:
        folder: where the grades are.
        say: told, in a sentence, of each file that was kept.
    """

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._say = folder, say
        self._memory = folder / _NAME
        try:
            self._written = set(self._memory.read_text(encoding="ascii").split())
        except (OSError, ValueError):
            self._written = set[str]()

    def wrote(self, content: bytes) -> bool:
        """Whether the grader has written exactly this before."""
        return _digest(content) in self._written

    def write(self, path: Path, content: bytes) -> None:
        """Write a file of the folder; if someone has edited what is there, it stays under another name."""
        if path.is_file() and (there := path.read_bytes()) != content and _digest(there) not in self._written:
            kept = next(
                free
                for n in count(1)
                if not (free := path.with_name(f"{path.stem}.edited-{n}{path.suffix}")).exists()
            )
            path.rename(kept)
            self._say(f"{path.name} is not as the grader wrote it; the edited file is now {kept.name} beside it")
        self._remember(_digest(content))
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(path) as file:
            file.write(content)

    def _remember(self, digest: str) -> None:
        """Before the file is written: what ends in between leaves a digest too many, which does no harm."""
        if digest not in self._written:
            self._written.add(digest)
            with self._memory.open("a", encoding="ascii") as file:
                file.write(f"{digest}\n")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
