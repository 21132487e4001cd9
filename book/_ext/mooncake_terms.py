# ruff: noqa: INP001 - Sphinx finds an extension by its file, not in a package
"""Definitions where a reader needs them: the first use of a term in a section leads to the glossary.

A page carries the definitions of the terms that it uses, and a script shows them beside the word (`terms.js`).
Without the script the word is a link. Terms that are everyday words, too, are marked only where the text does it.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

GLOSSARY = "glossary"
SCRIPT = "terms.js"
KEPT = "mooncake_definitions"
EVERYDAY = {
    *("admission", "batch", "block", "bubble", "calibration", "eviction", "instance", "placement", "rejection"),
    *("replica", "sweep", "tier", "trace", "twin", "twins", "verdict", "view"),
}
"""Terms that are marked only where the text marks them."""
PROSE = (nodes.paragraph,)
NOT_PROSE = (nodes.reference, nodes.literal, nodes.title, nodes.caption, nodes.table, nodes.raw, nodes.math)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what marks terms and what adds definitions."""
    app.connect("env-updated", forget)
    app.connect("doctree-resolved", mark_terms)
    app.connect("html-page-context", add_definitions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def forget(_app: Sphinx, env: BuildEnvironment) -> None:
    """Read the glossary again in the next build."""
    vars(env).pop(KEPT, None)


def definitions(env: BuildEnvironment) -> dict[str, tuple[str, str]]:
    """Each term with the id of its entry and its definition, as plain text."""
    kept: dict[str, Any] = vars(env)
    if KEPT not in kept:
        kept[KEPT] = dict(read_definitions(env)) if GLOSSARY in env.found_docs else {}
    return kept[KEPT]


def read_definitions(env: BuildEnvironment) -> Iterator[tuple[str, tuple[str, str]]]:
    """The entries of the glossary page."""
    for entry in env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
        (definition,) = entry.findall(nodes.definition)
        said = " ".join(definition.astext().split())
        for term in entry.findall(nodes.term):
            name = next(term.findall(nodes.Text), None)
            if name is not None and term["ids"]:
                yield str(name).strip(), (term["ids"][0], said)


@cache
def pattern(terms: frozenset[str]) -> re.Pattern[str]:
    """Any of the terms as a whole word, longest first; a plural counts."""
    each = "|".join(re.escape(term) for term in sorted(terms, key=len, reverse=True))
    return re.compile(rf"(?<![\w-])({each})(?:s|es)?(?![\w-])", re.IGNORECASE)


def mark_terms(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Make the first use of each term in a section a link, unless the text has made it one before."""
    if page == GLOSSARY or page.startswith("reference/"):
        return
    known = definitions(app.env)
    by_word = {term.lower(): term for term in known if term not in EVERYDAY}
    if not by_word:
        return
    find, up = pattern(frozenset(by_word.values())), app.builder.get_relative_uri(page, GLOSSARY)
    for section in sections(doctree):
        seen: set[str] = set()
        for text in prose(section):
            if mark := marked(text):
                seen.add(mark)
            elif not any(isinstance(above, NOT_PROSE) for above in ancestors(text)):
                replace(text, find, by_word, known, seen, up)


def sections(doctree: nodes.document) -> list[nodes.Element]:
    """The sections below the title, or what is above the first of them."""
    return [
        part
        for top in doctree.children
        if isinstance(top, nodes.section)
        for part in top.children
        if isinstance(part, nodes.Element)
    ]


def prose(section: nodes.Element) -> list[nodes.Text]:
    """The texts of a section that are in paragraphs."""
    return [
        text for text in section.findall(nodes.Text) if any(isinstance(above, PROSE) for above in ancestors(text))
    ]


def ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    """What a node is in, from the inside outwards."""
    while (node := node.parent) is not None:
        yield node


def marked(text: nodes.Text) -> str | None:
    """The id of the entry that a text leads to, where it is a marked term."""
    for above in ancestors(text):
        if isinstance(above, nodes.reference) and f"{GLOSSARY}.html#" in above.get("refuri", ""):
            return above["refuri"].partition("#")[2]
    return None


def replace(
    text: nodes.Text,
    find: re.Pattern[str],
    by_word: dict[str, str],
    known: dict[str, tuple[str, str]],
    seen: set[str],
    up: str,
) -> None:
    """Make links of the terms of a text that the section has not used before."""
    parts: list[nodes.Node] = []
    at, words = 0, str(text)
    for found in find.finditer(words):
        term = by_word[found[1].lower()]
        anchor = known[term][0]
        if anchor in seen or (sum(map(str.isupper, term)) > 1 and found[1] != term):
            continue
        seen.add(anchor)
        link = nodes.reference("", found[0], refuri=f"{up}#{anchor}", internal=True, classes=["glossary-term"])
        parts += [nodes.Text(words[at : found.start()]), link]
        at = found.end()
    if parts:
        text.parent.replace(text, [*parts, nodes.Text(words[at:])])


def add_definitions(
    app: Sphinx, _page: str, _template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Put the definitions of the page's terms at its end, and load the script that shows them."""
    if doctree is None:
        return
    used = {mark for text in doctree.findall(nodes.Text) if (mark := marked(text))}
    known = {anchor: said for anchor, said in definitions(app.env).values() if anchor in used}
    if known:
        content = json.dumps(known, sort_keys=True).replace("<", "\\u003c")
        context["body"] += f'<script type="application/json" id="glossary-definitions">{content}</script>'
        app.add_js_file(SCRIPT, loading_method="defer")
