"""The API reference: every public name, and what belongs to a class, as stubs of Python."""

import ast
import re

import pytest

from mooncake_lab.book.rendering.render import FLOORS, PACKAGE, package_page, page_of, stub, write_reference


def test_the_reference_has_every_public_name():
    """Each package has a page, and each name of its `__all__` a definition that was found in the source."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli", "bench", "book"}
    folders |= {f"book.{path.parent.name}" for path in PACKAGE.glob("book/*/__init__.py")} - {"book.chapters"}
    assert set(FLOORS) == folders
    for package in FLOORS:
        entries = package_page(package).split("\n## ")[1:]
        assert entries or package == "course", package
        for entry in entries:
            assert "```python\n" in entry or package == "course", entry


def test_the_contents_list_every_page_of_the_reference():
    """The book's table of contents has the page of each package, in the order of the layers."""
    contents = (PACKAGE.parent / "book" / "_toc.yml").read_text(encoding="utf-8")
    assert re.findall(r"file: reference/(?!index)(\w+)", contents) == list(map(page_of, FLOORS))


def test_the_reference_is_written_once(tmp_path):
    """Pages that say the same already are not touched, so that a build with nothing to do does nothing."""
    write_reference(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_reference(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert len(before) == len(FLOORS) + 1


CLASS = '''\
@final
class Shelf(Base):
    """What is kept."""

    room: int
    """How much fits.

    Never negative.
    """
    bare: int = 0
    _hidden: int = 0
    """Private."""

    def __len__(self) -> int:
        """How many."""
        return 1

    @property
    def full(self) -> bool:
        """Whether nothing more fits."""
        return True

    def _check(self):
        """Private."""

    def silent(self):
        pass

    async def put(
        self, key: str, *, last: bool = False
    ) -> None:
        """Keep it."""
        await self.keep(key)
'''
SHOWN = '''\
```python
@final
class Shelf(Base):
    """What is kept."""
    room: int
    """How much fits.

    Never negative.
    """
    bare: int = 0
    @property
    def full(self) -> bool:
        """Whether nothing more fits."""
    async def put(
        self, key: str, *, last: bool = False
    ) -> None:
        """Keep it."""
```'''


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (CLASS, SHOWN),
        ("def bare(a):\n    return a\n", "```python\ndef bare(a):\n```"),
        ("def short(): ...\n", "```python\ndef short(): ...\n```"),
    ],
)
def test_a_stub_has_what_a_caller_has_to_know(source, shown):
    """Signatures, fields and docstrings as they were written; no code, no private and no undocumented member."""
    assert stub(source, ast.parse(source).body[0]) == shown
