"""Where hidden workloads come from: 128 bits for each task, and draws that cannot be predicted."""

import hashlib
import random
import secrets
from pathlib import Path
from typing import Any, Final

from mooncake_lab.course.grading.files import replace_file

_SECRET_BYTES: Final = 16
_BESIDE_GRADES: Final = "secret"  # the name of a file


def class_secret(folder: Path) -> str:
    """The random part of a class's hidden seed, which is made and kept in the folder of its grades.

    A seed that a teacher chooses may be short, and a submission that knows this code can try a million of them.
    With this part, no submission can. To draw the same workloads in another folder, copy the file.

    Raises:
        ValueError: when the file holds something else.
    """
    path = folder / _BESIDE_GRADES
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{secrets.token_hex(_SECRET_BYTES)}\n", mode=0o600)
    found = path.read_text(encoding="ascii").strip()
    if len(found) != 2 * _SECRET_BYTES or not set(found) <= set("0123456789abcdef"):
        raise ValueError(f"{path} holds {found[:40]!r}; {2 * _SECRET_BYTES} hexadecimal digits are needed")
    return found


class HiddenDraw(random.Random):
    """Random numbers of a task: a keyed hash that counts.

    The output of Python's own generator can be predicted from enough of its earlier draws.

    Args:
        seed: of the class.
        names: what else tells these draws from others: the topic, the task.
    """

    def __init__(self, seed: str, *names: object) -> None:
        text = "\0".join(map(str, (seed, *names)))
        self._key = hashlib.blake2b(text.encode(), digest_size=_SECRET_BYTES).digest()
        self._count = 0
        super().__init__()

    def seed(self, *given: Any, **named: Any) -> None:
        """Nothing: the key is the seed."""
        del given, named

    def getrandbits(self, k: int, /) -> int:
        """Draw `k` random bits."""
        found = 0
        for _ in range(0, k, 512):
            self._count += 1
            text = self._count.to_bytes(8, "little")
            found = found << 512 | int.from_bytes(hashlib.blake2b(text, key=self._key).digest(), "little")
        return found >> (-k % 512)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self.getrandbits(53) / 2**53
