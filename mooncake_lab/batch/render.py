"""The book as HTML: Jupyter Book over the executed chapters, warnings as errors, skipped when nothing changed.

    python -m mooncake_lab.batch.render book

All pages or none: Sphinx can render only the pages that changed, but then links between pages go stale
(the numbers of citations), and pages that were deleted stay. So the digest of everything it reads is kept
beside the result; when it is the same, nothing is done, and else the book is rendered whole.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mooncake_lab.batch.provenance import read_provenance, tree_digest
from mooncake_lab.batch.reference import write_reference
from mooncake_lab.figures.embed import STATIC

_STAMP: Final = "inputs.sha256"
_GENERATED: Final = ("_build", "__pycache__")
_FLAGS: Final = ("-W", "-n", "--keep-going", "-q")


def render(book: Path, *, force: bool = False) -> int:
    """Render a Jupyter Book folder into `book/_build/html`; the exit status of the renderer.

    Args:
        book: the folder with `_config.yml` and `_toc.yml`.
        force: render even if nothing changed.
    """
    build = book / "_build"
    index, stamp = build / "html" / "index.html", build / _STAMP
    digest = inputs_digest(book)
    if force or not index.is_file() or not stamp.is_file() or stamp.read_text() != digest:
        shutil.rmtree(build, ignore_errors=True)
        status = _jupyter_book(book)
        if status != 0:
            sys.stderr.write(
                f"The book was not rendered; jupyter-book ended with {status}, its warnings are above.\n"
            )
            return status
        stamp.write_text(digest)
    else:
        sys.stderr.write("HTML             up to date\n")
    _say_where(index, book)
    return 0


def inputs_digest(book: Path) -> str:
    """One name for all that the renderer reads: pages, executed chapters, widgets, configuration, version pins."""
    inputs = [
        path
        for path in book.rglob("*")
        if path.is_file() and not any(part in _GENERATED for part in path.relative_to(book).parts)
    ]
    pins = book.parent / "requirements.lock"
    widgets = tree_digest(STATIC, STATIC.iterdir())
    return hashlib.sha256(
        (tree_digest(book, inputs) + tree_digest(book.parent, [pins]) + widgets).encode()
    ).hexdigest()


def _jupyter_book(book: Path) -> int:
    command = [Path(sys.executable).with_name("jupyter-book"), "build", *_FLAGS, str(book)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}  # deprecations inside the renderer's own libraries
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own interpreter and folder
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
    return done.returncode


def _say_where(index: Path, book: Path) -> None:
    provenance = read_provenance(book / "_generated")
    if provenance and provenance.banner:
        sys.stderr.write(f"\nNOTE: {provenance.banner}\n")
    sys.stdout.write(f"\nThe book is ready: open {index.resolve()}, or run `make serve-book` for search.\n")


def main(arguments: Sequence[str]) -> int:
    """The command line: one folder."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m mooncake_lab.batch.render BOOK_FOLDER\n")
        return 2
    book = Path(arguments[0])
    write_reference(book / "reference")
    return render(book)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
