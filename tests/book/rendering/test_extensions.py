"""What the book's own Sphinx extensions do to a page."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes
from docutils.utils import new_document

EXTENSIONS = Path(__file__).parents[3] / "book" / "_ext"


@pytest.fixture
def extension(monkeypatch):
    """A function that imports one of them."""
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    return importlib.import_module


@pytest.fixture
def page():
    """An empty page."""
    return new_document("page")


def test_a_figure_without_a_picture_is_no_figure(extension, page):
    """Where a cell gave a reason instead of a drawing, the reason stays; figure, caption and number go."""
    reason = nodes.paragraph("", "Not measured.")
    page += nodes.figure("", reason, nodes.caption("", "Rates."), ids=["fig-gpu"], names=["fig-gpu"])
    drawn = nodes.figure("", nodes.image(uri="a.svg"), nodes.caption("", "A curve."), ids=["fig-a"])
    page += drawn
    extension("mooncake_chapters").unnumber_empty_figures(None, page)
    assert list(page.findall(nodes.figure)) == [drawn]
    assert page.astext().count("Not measured.") == 1
    assert "Rates." not in page.astext()
    assert page.children[0]["ids"] == ["fig-gpu"]


def test_a_chapter_opens_with_its_steps_and_its_times(extension, page, tmp_path):
    """Under the title stand the steps of the chapter and how long it takes; other pages stay as they are."""
    cells = [{"cell_type": "markdown", "source": "# Placement\n" + "word " * 660}]
    (tmp_path / "chapters").mkdir()
    executed = {"cells": cells, "metadata": {"papermill": {"duration": 40.0}}}
    (tmp_path / "chapters" / "09_placement.ipynb").write_text(json.dumps(executed))
    page += nodes.section("", nodes.title("", "Placement"), nodes.paragraph("", "The claim."))
    for name in ("serve", "chapters/09_placement"):
        before = len(page[0])
        app = SimpleNamespace(env=SimpleNamespace(docname=name), srcdir=tmp_path)
        extension("mooncake_chapters").open_chapter(app, page)
        assert len(page[0]) == before + 2 * (name != "serve")
    title, strip, times, claim = page[0]
    assert '<li class="here"><strong>decide</strong></li>' in strip.astext()
    assert times.astext() == "3 minutes to read: 661 words, 0 lines of code, 0 figures. It ran for 40 s."
    assert (title.astext(), claim.astext()) == ("Placement", "The claim.")


def test_the_first_viewport_tag_stays(extension, tmp_path):
    """Of three tags one is left, in its place; a page without any stays as it is."""
    tag = '<meta name="viewport" content="width=device-width"/>'
    (tmp_path / "three.html").write_text(f"<head>{tag}<title>T</title>{tag}</head>{tag}<body>B</body>")
    (tmp_path / "none.html").write_text("<head></head><body>B</body>")
    app = SimpleNamespace(builder=SimpleNamespace(format="html"), outdir=tmp_path)
    extension("mooncake_book").mend_pages(app, None)
    assert (tmp_path / "three.html").read_text() == f"<head>{tag}<title>T</title></head><body>B</body>"
    assert (tmp_path / "none.html").read_text() == "<head></head><body>B</body>"


def test_a_drawing_stands_in_the_page(extension, page, tmp_path):
    """The picture of a chapter becomes part of the page with its description; a picture of another kind stays."""
    drawn = tmp_path / "_build" / "jupyter_execute" / "0123456789abcdef.svg"
    drawn.parent.mkdir(parents=True)
    drawn.write_text('<?xml version="1.0"?><svg width="1pt"><path id="p" style="fill: #0069a8"/></svg>')
    figure = nodes.figure("", nodes.image(uri="../_build/jupyter_execute/0123456789abcdef.svg", alt="A curve."))
    logo = nodes.image(uri="/_static/logo.svg", alt="A logo.")
    page += [figure, logo]
    env = SimpleNamespace(docname="chapters/a", doc2path=lambda name: tmp_path / f"{name}.ipynb")
    app = SimpleNamespace(builder=SimpleNamespace(format="html"), srcdir=tmp_path, env=env)
    (tmp_path / "chapters").mkdir()
    extension("mooncake_figures").put_into_page(app, page)
    assert list(page.findall(nodes.image)) == [logo]
    (raw,) = page.findall(nodes.raw)
    assert 'aria-label="A curve."' in raw.astext()
    assert 'id="d01234567-p"' in raw.astext()
    assert "var(--fig-mooncake, #0069a8)" in raw.astext()


@pytest.mark.parametrize("told", [None, "1"])
def test_a_class_gets_no_solutions_and_no_way_to_them(extension, monkeypatch, told):
    """When told so, solutions are hidden, sources are not copied, and no button leads to a notebook."""
    module = extension("mooncake_book")
    if told:
        monkeypatch.setenv(module.WITHOUT_SOLUTIONS, told)
    options = {"use_download_button": True, "launch_buttons": {"colab_url": "https://example.org"}}
    config = SimpleNamespace(hide_solutions=False, html_copy_source=True, html_theme_options=options)
    module.leave_solutions_out(None, config)
    assert config.hide_solutions == bool(told)
    assert config.html_copy_source == options["use_download_button"] == (not told)
    assert bool(options["launch_buttons"]) == (not told)


def test_the_address_is_that_of_the_citation(extension, tmp_path):
    """Buttons and the address of the pages follow from the repository that `CITATION.cff` names."""
    (tmp_path / "CITATION.cff").write_text("repository-code: https://github.com/someone/something\nversion: 1.2\n")
    config = SimpleNamespace(html_theme_options={}, ogp_site_url="")
    extension("mooncake_book").set_address(SimpleNamespace(srcdir=tmp_path / "book"), config)
    assert config.html_theme_options["repository_url"] == "https://github.com/someone/something"
    assert config.version == "1.2"
    assert config.ogp_site_url == "https://someone.github.io/something/"


def test_an_e_book_closes_its_tags(extension, page):
    """Its pages are XML: an open tag is closed, a bare attribute gets a value; a drawing keeps its capitals."""
    texts = ["<table border=1><tr><td hidden>a<br></table>", '<svg viewBox="0 0 1 1"/>']
    page += [nodes.raw("", text, format="html") for text in texts]
    module = extension("mooncake_book")
    module.close_tags(SimpleNamespace(builder=SimpleNamespace(name="epub")), page, "page")
    table, drawing = (raw.astext() for raw in page.findall(nodes.raw))
    assert module.is_xml(table)
    assert "<br/>" in table
    assert drawing == texts[1]
