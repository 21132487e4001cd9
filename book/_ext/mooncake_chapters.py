# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""What the book says about its own chapters, all of it read from the executed copies when the book is built.

`{headline-table}` shows the eight headlines and how all claims ended. `{written-for-twins}` lists the statements
that were written for the twin of a trace that this build found; else it is empty. `{chapter-table}` lists the
chapters with reading time, run time and verdicts. Each chapter opens with the steps in the life of a request that
it is about, and with how long it takes. Under each figure there is a link to what it draws, and under each chapter
stand the numbers that it recorded, to be downloaded. A figure without a picture has no number.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from mooncake_lab.book.paper import headlines, scorecard
from mooncake_lab.book.paper.comparison import VERDICT_CLASSES
from mooncake_lab.book.paper.pages import counted
from mooncake_lab.book.paper.scorecard import chapter_number
from mooncake_lab.book.rendering.chapters import Chapter, chapter, figure_data, life_strip, tables, verdict_counts
from mooncake_lab.book.rendering.expressions import Records
from mooncake_lab.book.rendering.plan import topic_of
from mooncake_lab.book.rendering.provenance import read_provenance
from mooncake_lab.book.rendering.written_for import found_besides, written_for_twins
from mooncake_lab.workload import RELEASES

CHAPTERS = "chapters"
RECORDS = "_generated"
STATEMENTS = "statements"
DATA = "data"
BEFORE_THE_COLLECTORS = 300  # which number the figures and list the sections of a page


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives and the downloads."""
    app.add_directive("headline-table", HeadlineTable)
    app.add_directive("chapter-table", ChapterTable)
    app.add_directive("written-for-twins", WrittenForTwins)
    app.connect("doctree-read", open_chapter)
    app.connect("doctree-read", unnumber_empty_figures, priority=BEFORE_THE_COLLECTORS)
    app.connect("doctree-read", link_figures)
    app.connect("doctree-read", link_data, priority=BEFORE_THE_COLLECTORS)
    app.connect("build-finished", write_data)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class HeadlineTable(SphinxDirective):
    """The headlines of the scorecard, as its chapter shows them, and the number of claims by verdict."""

    def run(self) -> list[nodes.Node]:
        """Read them from what the chapters put on record."""
        card = scorecard(Path(self.env.srcdir) / RECORDS)
        top = headlines(card)
        self.env.note_reread()
        said = self.parse_text_to_nodes(f"{top.evidence()} {counted(card)}")
        return [nodes.raw("", top._repr_html_(), format="html"), *said]


class WrittenForTwins(SphinxDirective):
    """What was written for twins of traces that this build found: a sentence, and a folded list of statements."""

    def run(self) -> list[nodes.Node]:
        """Read them from the statements of all pages."""
        self.env.note_reread()
        text = twins_note(Path(self.env.srcdir))
        return self.parse_text_to_nodes(text) if text else []


def twins_note(folder: Path) -> str:
    """The directive's Markdown; empty where all traces are those that the pages were written for."""
    provenance = read_provenance(folder / RECORDS)
    traces = found_besides(provenance) if provenance else ()
    if not traces:
        return ""
    pages = written_for_twins(folder / STATEMENTS, Records(folder / RECORDS), traces)
    which = " and ".join(RELEASES[name].label for name in traces)
    several = len(traces) > 1
    intro = (
        f"This build found the released {which} trace{'s' * several}. The pages were written for generated twins"
        f" of {'these traces' if several else 'this trace'}. Their numbers are those of this build, but the words"
        " of these statements were chosen for the twins:\n"
    )
    count = sum(len(said) for said in pages.values())
    lines = [intro, f":::{{dropdown}} Statements that were written for twins ({count})"]
    for name, said in pages.items():
        chapter_page = folder / CHAPTERS / f"{name}.ipynb"
        address = f"{CHAPTERS}/{name}.ipynb" if chapter_page.is_file() else f"{name}.md"
        title = f"Chapter {chapter_number(name)}" if chapter_page.is_file() else name
        link = f"[{title}]({address})" if (folder / address).is_file() else title
        lines += [f"* {link}", *(f"  * {plain(text)}" for text in said)]
    return "\n".join([*lines, ":::\n"])


def plain(fragment: str) -> str:
    """A fragment of a page without its markup, which it may cut in two; dots stand for its numbers."""
    text = re.sub(r"\{\{?\w+\}?\}`([^`<]+?) *(?:<[^`]*)?`", r"\1", fragment)
    text = re.sub(r"\]\([^)]*\)?", "", re.sub(r"\{[^{}]*\}", "…", text))
    return re.sub(r"([\\<>$|#])", r"\\\1", re.sub(r"[*`\[\]{}]", "", text))


class ChapterTable(SphinxDirective):
    """Every chapter: what it is called, how long it takes to read and to run, and how its claims ended."""

    def run(self) -> list[nodes.Node]:
        """Build the table as Markdown, which knows how to link."""
        folder = Path(self.env.srcdir)
        names = sorted(name for name in self.env.found_docs if name.startswith(f"{CHAPTERS}/"))
        rows = [row(chapter(folder / f"{name}.ipynb"), folder) for name in names]
        head = ["| chapter | to read | to run | its claims |", "| --- | --- | --- | --- |"]
        self.env.note_reread()
        (table,) = self.parse_text_to_nodes("\n".join([*head, *rows]))
        table["classes"].append("chapters")
        return [table]


def row(told: Chapter, folder: Path) -> str:
    """A chapter's row."""
    link = f"{chapter_number(told.stem)} [{told.title}]({CHAPTERS}/{told.stem}.ipynb)"
    record = folder / RECORDS / f"{topic_of(Path(told.stem))}.json"
    counts = verdict_counts(record) if record.is_file() else {}
    marks = " ".join(
        f"[{counts[verdict.value]} {verdict.value}]{{.{css}}}"
        for verdict, css in VERDICT_CLASSES.items()
        if counts.get(verdict.value)
    )
    return f"| {link} | {told.reading_min} min | {run_time(told)} | {marks} |"


def run_time(told: Chapter) -> str:
    """How long a chapter ran; nothing where it was not executed."""
    if told.run_s is None:
        return ""
    return f"{told.run_s:.0f} s" if told.run_s < 90 else f"{told.run_s / 60:.0f} min"


def open_chapter(app: Sphinx, doctree: nodes.document) -> None:
    """Put the steps of the chapter, and how long it takes, under its title."""
    name = app.env.docname
    if not name.startswith(f"{CHAPTERS}/"):
        return
    told = chapter(Path(app.srcdir) / f"{name}.ipynb")
    times = f"{told.reading_min} minutes to read: {told.words:,} words, {told.lines} lines of code"
    times += f", {told.figures} figures." + (f" It ran for {run_time(told)}." if told.run_s is not None else "")
    title = next(doctree.findall(nodes.title))
    opening = [
        nodes.raw("", life_strip(topic_of(Path(name))), format="html"),
        nodes.paragraph("", times, classes=["chapter-times"]),
    ]
    for node in reversed(opening):
        title.parent.insert(title.parent.index(title) + 1, node)


def unnumber_empty_figures(_app: Sphinx, doctree: nodes.document) -> None:
    """Show what a figure without a picture holds, such as the reason, without number and caption."""
    for node in list(doctree.findall(nodes.figure)):
        if next(node.findall(nodes.image), None) is None:
            shown = [child for child in node.children if not isinstance(child, nodes.caption | nodes.legend)]
            node.replace_self(nodes.container("", *shown, ids=node["ids"], names=node["names"]))


def link_figures(app: Sphinx, doctree: nodes.document) -> None:
    """End the caption of each drawn figure with a link to its data."""
    name = app.env.docname
    if not name.startswith(f"{CHAPTERS}/"):
        return
    drawn = figure_data(Path(app.srcdir) / f"{name}.ipynb")
    for node in doctree.findall(nodes.figure):
        for called in set(node["names"]) & drawn.keys():
            for caption in node.findall(nodes.caption):
                address = f"../{DATA}/{Path(name).name}/{called}.csv"  # `write_figures` writes it
                link = nodes.reference("", "data", refuri=address, internal=False, classes=["figure-data"])
                caption.extend([nodes.Text(" ("), link, nodes.Text(")")])


def link_data(app: Sphinx, doctree: nodes.document) -> None:
    """Add a section with links to a chapter's numbers."""
    name = app.env.docname
    record = Path(app.srcdir) / RECORDS / f"{topic_of(Path(name))}.json"
    if not name.startswith(f"{CHAPTERS}/") or not record.is_file():
        return
    section = nodes.section("", nodes.title("", "Data of this chapter"), ids=["data-of-this-chapter"])
    section += nodes.paragraph("", "The numbers behind the figures and tables of this page, from this build:")
    links = nodes.bullet_list("", *data_links(record))
    section += links
    parent = next(doctree.findall(nodes.section), doctree)
    parent += section


def data_links(record: Path) -> Iterator[nodes.list_item]:
    """One item a file: the whole record, then each table with its columns."""
    yield item(record.stem, f"{record.stem}.json", "everything, with the sources")
    for name, table in tables(record).items():
        columns = ", ".join(map(str, table.columns[:6])) + (", …" if table.shape[1] > 6 else "")
        yield item(record.stem, f"{name}.csv", f"{len(table)} rows: {columns}")


def item(topic: str, name: str, said: str) -> nodes.list_item:
    """A link to a file of a topic and what is in it."""
    link = nodes.reference("", name, refuri=f"../{DATA}/{topic}/{name}", internal=False)
    return nodes.list_item("", nodes.paragraph("", "", link, nodes.Text(f" ({said})")))


def write_data(app: Sphinx, error: Exception | None) -> None:
    """Put the files beside the pages."""
    if error is not None or app.builder.format != "html":
        return
    for page in sorted(app.env.found_docs):
        if not page.startswith(f"{CHAPTERS}/"):
            continue
        write_figures(Path(app.srcdir) / f"{page}.ipynb", Path(app.outdir) / DATA / Path(page).name)
        record = Path(app.srcdir) / RECORDS / f"{topic_of(Path(page))}.json"
        if not record.is_file():
            continue
        folder = Path(app.outdir) / DATA / record.stem
        folder.mkdir(parents=True, exist_ok=True)
        (folder / record.name).write_bytes(record.read_bytes())
        for name, table in tables(record).items():
            table.to_csv(folder / f"{name}.csv", index=False)


def write_figures(chapter: Path, folder: Path) -> None:
    """Put what each figure of a chapter draws into a file of its name."""
    for name, content in figure_data(chapter).items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.csv").write_text(content, encoding="utf-8")
