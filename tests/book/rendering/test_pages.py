"""The pages of a batch: MyST as a browser can show it."""

import re
from pathlib import Path

import nbformat
import pytest

from mooncake_lab.book.rendering.pages import notebook_html, plain_markdown

ROOT = Path(__file__).parents[3]
FORMULA = re.compile(r"<math.*?</math>", re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`]*`", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("see {term}`blocks <block>` and {cite}`a` in {eq}`b`", "see blocks and (a) in (b)"),
        ("```{hint}\n:class: dropdown\n\nLook.\n```", "<details><summary>Hint</summary>\n\nLook.\n\n</details>"),
        ("```{exercise} easy\n:label: ex\n\nCompute.\n```", "> **Exercise** (easy)\n>\n> Compute."),
        ("````{note}\n```{hint}\nLook.\n```\n````", "> **Note**\n>\n> <details><summary>Hint</summary>"),
        ("costs \\$3 or `$HOME` and `{x}`", "costs \\$3 or `$HOME` and `{x}`"),
        ("```python\nprice = '$1 $2'\n```", "```python\nprice = '$1 $2'\n```"),
        ("$x^2$ here", "<msup><mi>x</mi><mn>2</mn></msup>"),
        ("$$\nx\n$$ (eq-x)", 'display="block"'),
        ("1 : 2\n: 3", "1 : 2\n&#58; 3"),
    ],
)
def test_myst_becomes_markdown(written, shown):
    """Directives, roles and formulas are translated, and code stays as it is."""
    assert shown in plain_markdown(written)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_nothing_of_the_chapters_is_left_as_source(path):
    """No directive, no option of one, no role, no formula, and no command of TeX that MathML does not have."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n\n".join(plain_markdown(cell.source) for cell in cells if cell.cell_type == "markdown")
    assert re.findall(r"\\[A-Za-z]+", "".join(FORMULA.findall(text))) == []
    assert (
        re.findall(
            r"(?<!\\)\$|^[`:]{3,}\{|^:[a-z]+:|\{[a-z:]+\}`", CODE.sub("", FORMULA.sub("", text)), re.MULTILINE
        )
        == []
    )


def test_a_page_shows_what_the_book_shows(tmp_path):
    """Cells and inputs that the book hides are hidden, and nothing is loaded from another machine."""
    cells = [
        nbformat.v4.new_markdown_cell("# A\n\n$x$"),
        nbformat.v4.new_code_cell("secret = 1", metadata={"tags": ["remove-cell"]}),
        nbformat.v4.new_code_cell("shown = 2"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    page = notebook_html(tmp_path / "a.ipynb")
    assert "secret" not in page
    assert "shown" in page
    assert "<math" in page
    assert re.findall(r"<script|https?://(?!www\.w3\.org)", page) == []
