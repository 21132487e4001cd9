"""The renderer runs when what it reads changed, and only then."""

import subprocess

import pytest

from mooncake_lab.batch import render as module
from mooncake_lab.batch.render import main, render


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book folder, and a renderer that only leaves a page and a count."""
    folder = tmp_path / "book"
    (folder / "chapters").mkdir(parents=True)
    (folder / "_config.yml").write_text("title: T\n")
    (folder / "chapters" / "01_alpha.ipynb").write_text("{}")
    (tmp_path / "requirements.lock").write_text("jupyter-book==1\n")
    calls = []

    def rendered(command, **_):
        calls.append(command)
        status = 1 if "broken" in (folder / "_config.yml").read_text() else 0
        (folder / "_build" / "html").mkdir(parents=True, exist_ok=True)
        (folder / "_build" / "html" / "index.html").write_text("page")
        return subprocess.CompletedProcess(command, status, stdout="WARNING: broken\n")

    monkeypatch.setattr(module.subprocess, "run", rendered)
    return folder, calls


def test_nothing_changed_nothing_rendered(book, capsys):
    """The second build renders nothing and still says where the book is."""
    folder, calls = book
    assert render(folder) == render(folder) == 0
    assert len(calls) == 1
    assert capsys.readouterr().out.count("index.html") == 2


@pytest.mark.parametrize("change", ["book/chapters/01_alpha.ipynb", "book/new.md", "requirements.lock"])
def test_any_input_counts(book, change):
    """An executed chapter, a new page, another version of the renderer: each renders again."""
    folder, calls = book
    render(folder)
    (folder.parent / change).write_text("other")
    render(folder)
    assert len(calls) == 2


def test_a_deleted_page_counts(book):
    """So does a page that is gone."""
    folder, calls = book
    render(folder)
    (folder / "chapters" / "01_alpha.ipynb").unlink()
    render(folder)
    assert len(calls) == 2


def test_a_failed_rendering_is_not_remembered(book, capsys):
    """A rendering with warnings fails each time, with the renderer's words."""
    folder, calls = book
    (folder / "_config.yml").write_text("broken\n")
    assert render(folder) == render(folder) == 1
    assert len(calls) == 2
    assert "WARNING: broken" in capsys.readouterr().err


def test_warnings_are_errors(book):
    """The renderer is told to fail on warnings and on references to nothing."""
    folder, calls = book
    render(folder)
    assert {"-W", "-n", "--keep-going"} <= set(calls[0])


def test_bad_usage(capsys):
    """Without a folder there is nothing to render."""
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
