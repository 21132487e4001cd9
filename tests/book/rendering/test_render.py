"""The renderer runs when what it reads changed, and only then."""

import subprocess
from pathlib import Path

import pytest

from mooncake_lab.book.experiments import cache
from mooncake_lab.book.rendering import render as module
from mooncake_lab.book.rendering.render import inputs_digest, render

ROOT = Path(__file__).parents[3]


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book folder, and a renderer that only leaves a page and a count."""
    folder = tmp_path / "book"
    (folder / "chapters").mkdir(parents=True)
    (folder / "_config.yml").write_text("title: T\n")
    (folder / "chapters" / "01_alpha.ipynb").write_text("{}")
    (tmp_path / "requirements.lock").write_text("jupyter-book==1\n")
    (tmp_path / "CITATION.cff").write_text("repository-code: https://github.com/a/b\n")
    calls = []

    def rendered(command, *, env, **_):
        calls.append([*command, *(["no solutions"] if module.WITHOUT_SOLUTIONS in env else [])])
        status = 1 if "broken" in (folder / "_config.yml").read_text() else 0
        (folder / "_build" / "html").mkdir(parents=True, exist_ok=True)
        (folder / "_build" / "html" / "index.html").write_text("page")
        return subprocess.CompletedProcess(command, status, stdout="WARNING: broken\n")

    monkeypatch.setattr(module.subprocess, "run", rendered)
    return folder, calls


@pytest.mark.parametrize(
    "change", ["book/chapters/01_alpha.ipynb", "book/new.md", "requirements.lock", "CITATION.cff", None]
)
def test_any_input_counts_and_nothing_else(book, change):
    """A build with nothing to do renders nothing; a changed, new or deleted input renders all again."""
    folder, calls = book
    assert render(folder) == render(folder) == 0
    assert len(calls) == 1
    assert {"-W", "-n", "--keep-going"} <= set(calls[0])
    if change is None:
        (folder / "chapters" / "01_alpha.ipynb").unlink()
    else:
        (folder.parent / change).write_text("other")
    render(folder)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "name", ["rendering/statements.py", "rendering/chapters.py", "paper/scorecard.py", "figures/embed.py"]
)
def test_code_that_writes_pages_counts(monkeypatch, name):
    """A change of the code that the extensions of the book call renders the book again."""
    before = inputs_digest(ROOT / "book")
    whole = cache.file_sha256
    monkeypatch.setattr(
        cache, "file_sha256", lambda path: "new" if path.as_posix().endswith(name) else whole(path)
    )
    assert inputs_digest(ROOT / "book") != before


def test_the_papers_numbers_count(monkeypatch):
    """The scorecard's page shows them."""
    before = inputs_digest(ROOT / "book")
    whole = cache.file_sha256
    monkeypatch.setattr(cache, "file_sha256", lambda path: "new" if path.name == "claims.csv" else whole(path))
    assert inputs_digest(ROOT / "book") != before


def test_a_failed_rendering_is_not_remembered(book, capsys):
    """A rendering with warnings fails each time, with the renderer's words."""
    folder, calls = book
    (folder / "_config.yml").write_text("broken\n")
    assert render(folder) == render(folder) == 1
    assert len(calls) == 2
    assert "WARNING: broken" in capsys.readouterr().err


def test_a_book_with_solutions_is_another_book(book):
    """Without solutions it is rendered again, and so it is with them afterwards."""
    folder, calls = book
    for solutions in (True, False, False, True):
        assert render(folder, solutions=solutions) == 0
    assert ["no solutions" in call for call in calls] == [False, True, False]
