"""The shape of a chapter: thin code, generous prose, figures that can be read by everybody."""

import ast
import re
import statistics

import pytest

from mooncake_lab.book.rendering.notebook import Cell, read_notebook
from mooncake_lab.book.rendering.plan import parameter_defaults, topic_of

LONGEST_CELL_LINES = 15
LONGEST_MEDIAN_LINES = 5
PROSE_WORDS_PER_CODE_LINE = 8
FENCE = re.compile(r"^(`{3,}|~{3,}|:{3,}).*$", re.MULTILINE)
OPENING = ("**The claim.**", "**Why it matters.**", "**Its place.**", "**Our verdict.**")
"""How the first cell says what a chapter is about."""
SECTIONS = (
    "What you need", "The model in words", "The code that is the idea", "With pencil and paper",
    "The papers and us", "Exercises", "Takeaways",
)  # fmt: skip
"""What a chapter has, in this order; what it measures stands between."""
OTHERWISE = {
    "00_start": {"The model in words", "The code that is the idea", "The papers and us"},  # a tour without numbers
    "14_compression": {"The papers and us"},  # its table of verdicts ends the last experiment
    "13_scorecard": {
        "The model in words", "The code that is the idea", "With pencil and paper", "The papers and us",
    },  # it sums what the others found
}  # fmt: skip
"""The sections that a chapter may do without."""
UNJUDGED = {"00_start", "12_live", "13_scorecard"}
"""Chapters without a table of verdicts: a tour, one that holds us against ourselves, and the sum of all tables."""


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


def lines_of(cell: Cell) -> int:
    """Lines that are not blank."""
    return sum(bool(line.strip()) for line in cell.text.splitlines())


def is_exercise(cell: Cell) -> bool:
    """Whether a reader is meant to write here."""
    return "exercise" in cell.tags


def imports_only(cell: Cell) -> bool:
    """Whether a cell does nothing but import."""
    return all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in ast.parse(_python(cell)).body)


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


def test_name_is_number_and_topic(chapter):
    """A chapter is called NN_topic, and the package has an experiment and a figure module of that topic."""
    assert re.fullmatch(r"\d\d_[a-z]+", chapter.stem)
    folder = chapter.parents[1] / "mooncake_lab" / "book" / "chapters" / topic_of(chapter)
    assert (folder / "experiment.py").is_file()
    assert (folder / "figures.py").is_file()


def test_first_code_cell_holds_the_parameters(notebook):
    """Scale, seed and out_dir, each with a type, a default and a comment, come first; a chapter may have more."""
    first, *others = code_cells(notebook)
    assert "parameters" in first.tags
    assert not any("parameters" in cell.tags for cell in others)
    defaults = list(parameter_defaults(notebook).items())
    assert defaults[:3] == [("scale", "classroom"), ("seed", 0), ("out_dir", "out")]
    for line in first.text.strip().splitlines():
        assert re.fullmatch(r"\w+: \w+ = .+  # .+", line), line


def test_cells_are_short(notebook):
    """No cell above fifteen lines, half of them at most five."""
    lengths = [lines_of(cell) for cell in code_cells(notebook)]
    assert max(lengths) <= LONGEST_CELL_LINES
    assert statistics.median(lengths) <= LONGEST_MEDIAN_LINES


def test_parameters_imports_and_recording_are_folded(notebook):
    """A page shows the code that is the idea; what every notebook needs is one click away."""
    for cell in code_cells(notebook):
        needed = (
            "parameters" in cell.tags or imports_only(cell) or re.search(r"^record\(", cell.text, re.MULTILINE)
        )
        assert is_exercise(cell) or not needed or "hide-input" in cell.tags, cell.text


def test_the_first_figure_comes_before_the_method(notebook):
    """A reader sees what came out before what is needed and how it works."""
    figure = next(number for number, cell in enumerate(notebook.cells) if has_figure(cell))
    needs = next(
        number
        for number, cell in enumerate(notebook.cells)
        if cell.cell_type == "markdown" and "## What you need" in cell.text
    )
    assert figure < needs


def test_nothing_is_defined_outside_exercises(notebook):
    """Functions and classes live in the package; a reader writes some in exercises."""
    for cell in code_cells(notebook):
        tree = ast.parse(_python(cell))
        defined = [
            n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        ]
        assert not defined or is_exercise(cell), defined


def test_no_loop_runs_things(notebook):
    """A sweep is a product of fields that the package runs, not a loop in a cell."""
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(_python(cell))):
            if isinstance(node, ast.For | ast.While | ast.comprehension):
                called = {_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
                assert not called & {"run", "replay", "simulate", "load", "execute"}, cell.text


def test_prose_outweighs_code(notebook):
    """At least eight words of prose a line of code."""
    words = len(re.findall(r"\w+", FENCE.sub("", prose(notebook))))
    assert words >= PROSE_WORDS_PER_CODE_LINE * sum(lines_of(cell) for cell in code_cells(notebook))


def test_no_line_of_a_sentence_is_markup(notebook):
    """No line begins with what MyST takes for a comment, an end of the block, or an underline of a title."""
    lines = FENCE.sub("", prose(notebook)).splitlines()
    assert [line for line in lines if re.match(r"%|\+\+\+|=+$|-+$", line)] == []


def test_code_cells_are_introduced(notebook):
    """No two long code cells stand together without a word between them."""
    previous = None
    for cell in notebook.cells:
        if cell.cell_type == "code" and previous is not None and previous.cell_type == "code":
            assert min(lines_of(cell), lines_of(previous)) <= LONGEST_MEDIAN_LINES, cell.text
        previous = cell


def test_figures_have_name_caption_and_alternative_text(notebook, chapter):
    """Every figure can be referred to, says what it claims, and can be read by ear."""
    figures = [cell for cell in code_cells(notebook) if has_figure(cell)]
    assert figures, "a chapter draws"
    code = "\n".join(cell.text for cell in code_cells(notebook))
    modules = set(re.findall(r"^from mooncake_lab\.figures import \w+ as (\w+)$", code, re.MULTILINE))
    forgotten = [cell.text for cell in code_cells(notebook) if draws(cell, modules) and not has_figure(cell)]
    assert forgotten == []
    names = []
    for cell in figures:
        about = cell.metadata.get("mystnb", {})
        assert len(about["figure"]["caption"].split()) >= 8, cell.text
        assert len(about["image"]["alt"].split()) >= 5, cell.text
        names.append(about["figure"]["name"])
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"fig-{topic_of(chapter)}-") for name in names)


def test_figures_are_read_to_the_reader(notebook):
    """After a figure comes a sentence that says what to see."""
    for cell, following in zip(notebook.cells, notebook.cells[1:], strict=False):
        if cell.cell_type == "code" and has_figure(cell):
            assert following.cell_type == "markdown", cell.text
            assert len(following.text.split()) >= 12, following.text


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


def test_title_comes_first(notebook):
    """The first cell opens with the chapter's title, and there is no second."""
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].text.startswith("# ")
    assert len(re.findall(r"^# ", _without_code(prose(notebook)), re.MULTILINE)) == 1


def test_opens_with_claim_reason_place_and_verdict(notebook):
    """The first cell says what is claimed, why that matters, where, and what came of it, in this order."""
    places = [notebook.cells[0].text.find(words) for words in OPENING]
    assert -1 not in places
    assert places == sorted(places)


def test_sections_stand_in_their_order(notebook, chapter):
    """A chapter has the sections of a chapter, but for those that it is known to do without, and asks what if."""
    found = [
        re.sub("^The paper and us$", "The papers and us", line)
        for line in re.findall(r"^## (.+)$", _without_code(prose(notebook)), re.MULTILINE)
    ]
    found = [name for name in found if name in SECTIONS]
    assert found == [name for name in SECTIONS if name in found]
    assert set(SECTIONS) - set(found) <= OTHERWISE.get(chapter.stem, set())
    assert re.search(r"^##+ What if\b", prose(notebook), re.MULTILINE)


def test_ends_in_a_table_of_verdicts(notebook, chapter):
    """A chapter that redraws a paper holds its numbers against the paper's, and shows and records the table."""
    code = "\n".join(cell.text for cell in code_cells(notebook))
    judges = chapter.stem not in UNJUDGED
    assert ("beside_papers(" in code) == judges
    assert ('"beside_papers": ' in code) == judges


def test_exercises_have_folded_solutions(notebook):
    """Two to four exercises, each with a solution that shows itself only when asked."""
    text = prose(notebook)
    exercises = re.findall(r"^`{3,}\{exercise(?:-start)?\}.*?:label: (\S+)", text, re.MULTILINE | re.DOTALL)
    solutions = re.findall(r"^`{3,}\{solution(?:-start)?\} (\S+)(.*?)^`{3,}", text, re.MULTILINE | re.DOTALL)
    assert 2 <= len(exercises) <= 4
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


def test_exercises_say_how_hard_they_are_and_have_a_hint(notebook):
    """The title of an exercise has its difficulty and its minutes; a folded hint stands before the solution."""
    found = re.findall(
        r"^`{3,}\{(exercise|hint|solution)\}([^\n]*)\n:(?:label|class): (\S+)", prose(notebook), re.MULTILINE
    )
    assert [kind for kind, _, _ in found] == ["exercise", "hint", "solution"] * (len(found) // 3)
    for kind, title, option in found:
        if kind == "exercise":
            assert re.fullmatch(r" (easy|medium|hard), \d+ minutes", title), option
        else:
            assert option == "dropdown"


def test_the_last_exercise_is_to_write_your_own(notebook):
    """A reader leaves each chapter having replaced the part it is about."""
    found = re.findall(
        r"^(`{3,})\{exercise(?:-start)?\}[^\n]*\n:label: (\S+)\n\n(.*?)^\1",
        prose(notebook),
        re.MULTILINE | re.DOTALL,
    )
    _, label, text = found[-1]
    assert label.endswith("-own")
    assert text.startswith("Write your own ")


def test_ends_with_takeaways(notebook):
    """The last headline gathers what to keep."""
    headlines = re.findall(r"^#{2,3} (.+)$", _without_code(prose(notebook)), re.MULTILINE)
    assert "takeaway" in headlines[-1].lower() or "takeaway" in notebook.cells[-1].text.lower()


def test_numbers_are_recorded(notebook, chapter):
    """A chapter puts its numbers on record, under its topic."""
    code = "\n".join(cell.text for cell in code_cells(notebook))
    assert re.search(rf"record\(\s*out_dir,\s*\"{topic_of(chapter)}\"", code)


def _python(cell: Cell) -> str:
    return "\n".join(line for line in cell.text.splitlines() if not line.lstrip().startswith(("%", "!")))


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _without_code(text: str) -> str:
    return re.sub(r"^(`{3,})(?!\{).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
