"""Texts that students read: short, printable, and without the folders of the grading machine.

Every text about a submission goes through `one_line` before it reaches a page or a table. Errors quote paths: of
the package, of Python, of the folder in which submissions lie. Of an absolute path only its last name is shown.
"""

import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import mooncake_lab
from mooncake_lab.course.grading.collect import printable

LONGEST_REMARK: Final = 500
"""Letters of a remark that are kept."""
_QUOTED: Final = re.compile(r"""(?P<quote>['"`])(?:file://)?/[^'"`]*?(?P<name>[^/'"`]+)/?(?P=quote)""")
"""A path between quotes, which may hold spaces."""
_END: Final = r"""\s'"`,;:()\[\]{}<>|"""
_BARE: Final = re.compile(
    rf"(?:file://|(?<![\w/.~…:])/+|(?<![\w/.~…]))/(?=[\w.~+@%…-])[^{_END}]*?(?P<name>[^/{_END}]+)/?(?=[{_END}]|$)"
)
"""A path in running text: not a part of a URL, of a relative path or of a quotient."""


def one_line(text: str) -> str:
    """A text as a remark: in one line, printable, without folders, and not longer than `LONGEST_REMARK`."""
    words = without_folders(" ".join(text[: 8 * LONGEST_REMARK].split()))
    shown = printable(words)
    return shown if len(shown) <= LONGEST_REMARK else f"{shown[: LONGEST_REMARK - 1]}…"


def without_folders(text: str) -> str:
    """A text in which absolute paths are cut to their last name: `/home/ada/keys.ipynb` is `…/keys.ipynb`."""
    for folder in _known_folders():
        text = text.replace(folder, "/…")
    return _BARE.sub(_last_name, _QUOTED.sub(_last_name, text))


def _last_name(found: re.Match[str]) -> str:
    quote = found.groupdict().get("quote") or ""
    return f"{quote}…/{found['name']}{quote}"


@cache
def _known_folders() -> tuple[str, ...]:
    """Folders whose names may hold letters that end a path in a text, such as spaces; the longest first."""
    package = Path(mooncake_lab.__file__).parent.parent
    known = {
        package,
        Path.home(),
        Path.cwd(),
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(tempfile.gettempdir()),
    }
    names = {str(one) for each in known for one in (each, each.resolve())}
    return tuple(sorted((name for name in names if name.count("/") > 1), key=len, reverse=True))
