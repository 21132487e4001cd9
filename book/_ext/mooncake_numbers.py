# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""Chapters have the numbers of their files, and their figures count from one: chapter 9, Figure 9.3.

Sphinx numbers the pages of a table of contents in order, and would call the second one chapter 2 whatever its file
is called. Here the number is that of the file, in the title, the side bar and the captions. Other pages have no
number, and neither have the figures on them, which all belong to a chapter.
"""

from pathlib import PurePosixPath
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.environment.collectors.toctree import TocTreeCollector

from mooncake_lab.book.paper.scorecard import chapter_number

CHAPTERS = "chapters"
AFTER_THE_COLLECTORS = 900


def setup(app: Sphinx) -> dict[str, Any]:
    """Number what Sphinx has read, before it writes."""
    app.connect("env-get-updated", number_chapters, priority=AFTER_THE_COLLECTORS)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def number_chapters(_app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Number the chapters and what is in them; the pages that are to be written again."""
    chapters = sorted(name for name in env.found_docs if is_chapter(name))
    for name in chapters:
        number = (chapter_number(PurePosixPath(name).name),)
        sections = list(env.tocs[name].findall(nodes.reference))
        env.toc_secnumbers[name] = {each["anchorname"]: () for each in sections} | {"": number}
        sections[0]["secnumber"] = number
    TocTreeCollector().assign_figure_numbers(env)
    for name in [name for name in env.toc_fignumbers if not is_chapter(name)]:
        del env.toc_fignumbers[name]
    return chapters


def is_chapter(page: str) -> bool:
    """Whether a page is a chapter, by its name."""
    return PurePosixPath(page).parent.name == CHAPTERS
