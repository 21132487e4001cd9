"""How the book numbers chapters, figures and tables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_lab.book.paper.scorecard import chapter_number

EXTENSIONS = Path(__file__).parents[3] / "book" / "_ext"
SETTINGS = f"""
import sys
sys.path.insert(0, {str(EXTENSIONS)!r})
extensions = ["myst_parser", "mooncake_numbers"]
numfig = True
html_theme = "basic"
"""
FIGURE = "```{figure} /picture.svg\n:name: NAME\nA caption.\n```\n"
PAGES = {
    "index": "# Book\n\n```{toctree}\nchapters/00_start\nchapters/09_placement\nchapters/14_compression\n```\n"
    + FIGURE.replace("NAME", "fig-front"),
    "chapters/00_start": "# Start\n\n## What\n\n" + FIGURE.replace("NAME", "fig-start"),
    "chapters/09_placement": "# Placement\n\n## One\n\n"
    + FIGURE.replace("NAME", "fig-a")
    + "\n## Two\n\n"
    + FIGURE.replace("NAME", "fig-b")
    + "\nSee {numref}`fig-start`.\n",
    "chapters/14_compression": "# Smaller\n\n" + FIGURE.replace("NAME", "fig-small"),
}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The text of every page of a small book, without tags."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "chapters").mkdir()
    (folder / "conf.py").write_text(SETTINGS)
    (folder / "picture.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>')
    for name, text in PAGES.items():
        (folder / f"{name}.md").write_text(text)
    made = folder / "html"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(folder), str(made)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: re.sub(r"<[^>]+>", "", (made / f"{name}.html").read_text()) for name in PAGES}


def test_a_chapter_has_the_number_of_its_file(book):
    """Title and side bar say 9 where the file says 09, whatever place it has; an appendix has a letter."""
    assert "0. Start" in book["chapters/00_start"]
    assert "9. Placement" in book["chapters/09_placement"]
    assert "A. Smaller" in book["chapters/14_compression"]
    assert all(title in book["index"] for title in ("0. Start", "9. Placement", "A. Smaller"))


def test_figures_count_from_one_in_each_chapter(book):
    """The second figure of chapter 9 is Figure 9.2, and a reference to a figure of chapter 0 says Figure 0.1.

    Sections, and figures outside the chapters, have no number.
    """
    found = {name: re.findall(r"Fig\. ([\w.]+?\d) ", text) for name, text in book.items()}
    assert found["chapters/00_start"] == ["0.1"]
    assert [each for each in found["chapters/09_placement"] if each != "0.1"] == ["9.1", "9.2"]
    assert "See Fig. 0.1." in book["chapters/09_placement"]
    assert found["chapters/14_compression"] == ["A.1"]
    assert not re.search(r"\d\. (One|Two|What)", "".join(book.values()))
    assert "A caption." in book["index"]
    assert "Fig." not in book["index"]


def test_only_chapters_have_a_number():
    """Only what is called NN_topic is a chapter."""
    for stem in ("serve", "placement_09"):
        with pytest.raises(ValueError, match=stem):
            chapter_number(stem)
