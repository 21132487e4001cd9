"""A build that finds more released traces than the pages were written for says which statements those are."""

import importlib
from pathlib import Path

import msgspec
import pytest

from mooncake_lab.book.rendering import write_provenance
from mooncake_lab.book.rendering.expressions import Records
from mooncake_lab.book.rendering.provenance import Provenance
from mooncake_lab.book.rendering.written_for import found_besides, written_for_twins

ROOT = Path(__file__).parents[3]
STATEMENTS = """
[let]
of = "rates.set_index('workload')"
agents = "of.loc['toolagent']"

[[statement]]
text = "Agents of the {{term}}`tool <tool>` reuse *{share:.0f} %*"
share = "agents.share"

[[statement]]
text = "Conversations reuse less"
holds = "of.loc['conversation'].share < 0.5"

[[statement]]
text = "Every trace reuses something"
holds = "(rates.share > 0).all()"

[[statement]]
text = "The crowd of the papers is served"
holds = "(arxiv_fig_8.share > 0).all()"

[[statement]]
text = "The paper's figure has a diamond"
holds = "len(curve('arxiv_fig08_ttft_box_scheduling')) > 0"

[[fixed]]
why = "a number"
text = ["toolagent has 8 nodes"]
"""
ELSEWHERE = """
[[statement]]
text = "As in the other chapter, the crowd is served"
holds = "(record('store').arxiv_fig_8.share > 0).all()"
"""


@pytest.fixture
def book(tmp_path):
    """A book with two pages and one record."""
    rows = [{"workload": name, "share": 0.4} for name in ("conversation", "toolagent")]
    numbers = {"rates": rows, "arxiv_fig_8": [{"workload": "arxiv", "share": 0.1}]}
    for folder in ("statements", "_generated", "chapters"):
        (tmp_path / folder).mkdir()
    (tmp_path / "statements" / "07_store.toml").write_text(STATEMENTS)
    (tmp_path / "statements" / "cluster.toml").write_text(ELSEWHERE)
    (tmp_path / "chapters" / "07_store.ipynb").write_text("{}")
    record = {"topic": "store", "twin": True, "sources": [], "numbers": numbers}
    (tmp_path / "_generated" / "store.json").write_bytes(msgspec.json.encode(record))
    return tmp_path


@pytest.mark.parametrize(
    ("traces", "expected"),
    [
        ((), {}),
        (("toolagent",), {"07_store": ["Agents of", "Every trace"]}),
        (("arxiv",), {"07_store": ["The crowd"], "cluster": ["As in the"]}),
        (
            ("toolagent", "arxiv"),
            {"07_store": ["Agents of", "Every trace", "The crowd"], "cluster": ["As in the"]},
        ),
    ],
)
def test_a_statement_rests_on_the_traces_that_it_computes_with(book, traces, expected):
    """It names the trace or reads rows of it, also in another chapter; parameters and papers do not count."""
    found = written_for_twins(book / "statements", Records(book / "_generated"), traces)
    assert found.keys() == expected.keys()
    for page, beginnings in expected.items():
        assert all(text.startswith(begin) for text, begin in zip(found[page], beginnings, strict=True))


@pytest.mark.parametrize(
    ("found", "besides"),
    [
        ((), ()),
        (("conversation", "synthetic"), ()),
        (("conversation", "synthetic", "toolagent", "arxiv"), ("toolagent", "arxiv")),
        (("arxiv",), ("arxiv",)),
    ],
)
def test_the_pages_were_written_for_two_released_traces(found, besides):
    """All others that a run found are those that it has to speak of."""
    traces = dict.fromkeys(("conversation", "synthetic", "toolagent", "arxiv")) | dict.fromkeys(found, "sha")
    assert found_besides(Provenance(scale="classroom", seed=0, traces=traces)) == besides


def test_the_front_page_lists_them(book, monkeypatch):
    """One sentence and a folded list by chapter, without markup that would be cut in two; else nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    extension = importlib.import_module("mooncake_chapters")
    assert extension.twins_note(book) == ""
    traces = {"conversation": "a", "synthetic": "b", "toolagent": None, "arxiv": None}
    write_provenance(book / "_generated", scale="classroom", seed=0, traces=traces)
    assert extension.twins_note(book) == ""
    write_provenance(book / "_generated", scale="classroom", seed=0, traces=traces | {"toolagent": "c"})
    note = extension.twins_note(book)
    assert note.startswith("This build found the released tool&agent trace. The pages were written for generated")
    assert "Statements that were written for twins (2)" in note
    assert (
        "* [Chapter 7](chapters/07_store.ipynb)\n  * Agents of the tool reuse … %\n  * Every trace reuses" in note
    )
    assert "{written-for-twins}" in (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
