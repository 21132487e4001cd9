"""What a reader of a chapter would miss: figures without words, exercises without solutions, broken boxes."""

import ast
import re

import pytest

from mooncake_lab.book.rendering.notebook import Cell, read_notebook
from mooncake_lab.book.rendering.plan import parameter_defaults

FENCE = re.compile(r"^(`{3,}|~{3,}|:{3,}).*$", re.MULTILINE)
CITED = re.compile(r"\b(?:Figures?|Fig\.|Tables?|Equations?|Eqs?\.) \d")
"""What a paper numbers; the book's own figures are cited by reference."""
PAPER = re.compile(r"FAST['’]25|arXiv|SARATHI|Sarathi-Serve|SnapKV|MiniCache|report")


@pytest.fixture
def notebook(chapter):
    """The chapter, parsed."""
    return read_notebook(chapter)


def code_cells(notebook) -> list[Cell]:
    """The code cells, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook) -> str:
    """All the markdown, in order."""
    return "\n\n".join(cell.text for cell in notebook.cells if cell.cell_type == "markdown")


def has_figure(cell: Cell) -> bool:
    """Whether a cell says that it shows a figure, or ends with something that was drawn."""
    last = cell.text.rstrip().split("\n")[-1]
    return "figure" in cell.metadata.get("mystnb", {}) or bool(re.match(r"fig(ure)?\w*$", last))


def draws(cell: Cell, modules: set[str]) -> bool:
    """Whether the last thing a cell does is to call a function of a module of figures, by that module's name."""
    statements = ast.parse(cell.text).body
    match statements[-1] if statements else None:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in modules
    return False


def test_first_code_cell_holds_the_parameters(notebook):
    """A reader who executes a chapter sets scale, seed and folder in its first cell of code, and nowhere else."""
    first, *others = code_cells(notebook)
    assert "parameters" in first.tags
    assert not any("parameters" in cell.tags for cell in others)
    assert list(parameter_defaults(notebook).items())[:3] == [
        ("scale", "classroom"),
        ("seed", 0),
        ("out_dir", "out"),
    ]


def test_no_line_of_a_sentence_is_markup(notebook):
    """No line begins with what MyST takes for a comment, an end of the block, or an underline of a title."""
    lines = FENCE.sub("", prose(notebook)).splitlines()
    assert [line for line in lines if re.match(r"%|\+\+\+|=+$|-+$", line)] == []


def test_figures_have_name_caption_and_alternative_text(notebook):
    """Every figure can be referred to, says what it claims, and can be read by ear."""
    figures = [cell for cell in code_cells(notebook) if has_figure(cell)]
    assert figures
    code = "\n".join(cell.text for cell in code_cells(notebook))
    modules = set(
        re.findall(r"^from mooncake_lab\.book\.chapters\.\w+ import figures as (\w+)$", code, re.MULTILINE)
    )
    forgotten = [cell.text for cell in code_cells(notebook) if draws(cell, modules) and not has_figure(cell)]
    assert forgotten == []
    names = []
    for cell in figures:
        about = cell.metadata.get("mystnb", {})
        assert about["figure"]["caption"].strip(), cell.text
        assert len(about["image"]["alt"].split()) >= 5, cell.text
        names.append(about["figure"]["name"])
    assert len(set(names)) == len(names)


def test_figures_of_papers_are_cited_with_their_paper(notebook):
    """A bare Figure 9 could be ours: the paragraph says first whose it is, or at once of which edition."""
    captions = [cell.metadata["mystnb"] for cell in code_cells(notebook) if has_figure(cell)]
    texts = [
        prose(notebook),
        *(text for each in captions for text in (each["figure"]["caption"], each["image"]["alt"])),
    ]
    paragraphs = [part for text in texts for part in re.split(r"\n\n|\n(?=\|)", text)]
    bare = [
        paragraph[max(0, found.start() - 40) : found.end() + 40]
        for paragraph in paragraphs
        for found in CITED.finditer(paragraph)
        if not PAPER.search(paragraph[: found.start()]) and not PAPER.search(paragraph[found.end() :][:25])
    ]
    assert bare == []


def test_no_outputs_are_kept(notebook):
    """The repository holds sources; outputs are made by whoever builds."""
    assert all(cell.outputs == [] for cell in notebook.cells)
    assert "papermill" not in notebook.metadata


def test_kernel_is_named(notebook):
    """Papermill and Colab need to know what runs it."""
    assert notebook.metadata["kernelspec"]["name"] == "python3"


def test_exercises_have_folded_solutions(notebook):
    """Each exercise has a solution that shows itself only when asked."""
    text = prose(notebook)
    exercises = re.findall(r"^`{3,}\{exercise(?:-start)?\}.*?:label: (\S+)", text, re.MULTILINE | re.DOTALL)
    solutions = re.findall(r"^`{3,}\{solution(?:-start)?\} (\S+)(.*?)^`{3,}", text, re.MULTILINE | re.DOTALL)
    assert exercises
    assert {label for label, _ in solutions} == set(exercises)
    assert all(":class: dropdown" in body for _, body in solutions)


def test_no_exercise_hides_inside_another(notebook):
    """An exercise, hint or solution begins after the fence of the one before; each cell closes its last fence."""
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        outer = ""
        for fence, info in re.findall(r"^(`{3,})(.*)$", cell.text, re.MULTILINE):
            assert not outer or not info.startswith(("{exercise", "{hint", "{solution")), info
            if not outer:
                outer = fence
            elif not info.strip() and len(fence) >= len(outer):
                outer = ""
        assert not outer, cell.text[-80:]
