"""The book as one document, for paper."""

import re

import pytest

from mooncake_lab.batch.single import find_browser, main, one_document, print_to_pdf

LIST = (
    '<ul><li class="toctree-l1"><a class="reference internal" href="chapters/01_a.html">A</a></li>'
    '<li class="toctree-l1"><a class="reference internal" href="reference/index.html">API</a></li></ul>'
)


@pytest.fixture
def build(tmp_path):
    """A rendered book of a front page, a chapter and a reference page."""
    (tmp_path / "html/chapters").mkdir(parents=True)
    head = "<head><script>document.documentElement.dataset.theme = x;</script><link href='x'></head>"
    front = (
        f'<html>{head}{LIST}<article class="bd-article"><h1 id="top">Front</h1>'
        '<a href="chapters/01_a.html">a</a><a href="chapters/01_a.html#x">x</a><a href="#top">t</a>'
        '<a href="reference/index.html">r</a><a href="https://example.org/y">out</a></article></html>'
    )
    (tmp_path / "html/intro.html").write_text(front)
    chapter = '<article><h1 id="x">A</h1><img src="../_images/f.svg" loading="lazy"></article>'
    (tmp_path / "html/chapters/01_a.html").write_text(chapter)
    return tmp_path


def test_links_stay_inside_the_document(build):
    """Links between pages become links within it, each to an anchor that is there and nowhere twice."""
    text = one_document(build)
    anchors = re.findall(r'id="([^"]+)"', text)
    assert len(anchors) == len(set(anchors))
    inside = re.findall(r'href="#([^"]+)"', text)
    assert inside == ["chapters-01_a", "chapters-01_a--x", "intro--top"]
    assert set(inside) <= set(anchors)


def test_pictures_and_what_stays_out_are_found_beside_it(build):
    """Pictures and the reference are named from where the document lies; other sites stay as they are."""
    text = one_document(build)
    assert 'src="html/_images/f.svg"' in text
    assert 'href="html/reference/index.html"' in text
    assert 'href="https://example.org/y"' in text
    assert "lazy" not in text
    assert "dataset" not in text


def test_nothing_rendered_nothing_printed(tmp_path, capsys):
    """Without a book, or with a browser that fails, the reason is said in a sentence."""
    with pytest.raises(ValueError, match="run `make book` first"):
        one_document(tmp_path)
    with pytest.raises(RuntimeError, match="printed nothing"):
        print_to_pdf(tmp_path / "book.html", tmp_path / "book.pdf", browser="/bin/false")
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_browser_prints_every_page(build, capsys):
    """Where there is a browser, the command leaves a PDF of all pages, and the document it was printed from."""
    if find_browser() is None:
        pytest.skip("no Chromium on PATH; on Debian: apt-get install chromium")
    assert main([str(build)]) == 0
    pdf = (build / "mooncake.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 2  # the front page, and the chapter on a new one
    assert (build / "book.html").is_file()
    assert str(build / "mooncake.pdf") in capsys.readouterr().out
