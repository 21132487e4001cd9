# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""The pages that are no notebooks, with the numbers of the run and marks on what is not so in it.

Chapters get both when they are executed. These pages are read as they are written, so they get both when Sphinx
reads them; where no chapter was executed, there is no run, and they stay as they are.
"""

from functools import cache
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from mooncake_lab.book.rendering.expressions import Records
from mooncake_lab.book.rendering.provenance import read_provenance
from mooncake_lab.book.rendering.statements import told_page

RECORDS = "_generated"
STATEMENTS = "statements"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the reader."""
    app.connect("source-read", tell)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def tell(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the text of a page that has statements."""
    folder = Path(app.srcdir)
    page, sidecar = folder / f"{name}.md", folder / STATEMENTS / f"{name}.toml"
    if page.is_file() and sidecar.is_file() and read_provenance(folder / RECORDS):
        source[0] = told_page(page, sidecar, records(folder / RECORDS))


@cache
def records(folder: Path) -> Records:
    """The records of a build, which are read once for all pages."""
    return Records(folder)
