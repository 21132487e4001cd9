"""A number or a direction on a page cannot contradict the record: the check fails and says both sides."""

import json
import shutil

import pytest

from mooncake_lab.book.rendering.expressions import Records, code, holds
from mooncake_lab.book.rendering.prose import masked, numerals
from mooncake_lab.book.rendering.provenance import write_provenance
from mooncake_lab.book.rendering.statement_files import read_statements
from mooncake_lab.book.rendering.statements import Book, main, put_prose
from mooncake_lab.core import MIB

PROSE = """# Alpha in 3 parts

At 100 Gbps the mean TTFT is 1.51 s,
where storing whole takes 1.70 s. Streaming is *faster*. See FAST'25 Figure 13 and chapter 02.
"""
SIDECAR = """
[let]
whole = "pick(runs, 'ttft_s', streams=False)"

[[statement]]
text = "At 100 Gbps the mean TTFT is {ours:.2f} s, where storing whole takes {whole:.2f} s"
ours = "pick(runs, 'ttft_s', streams=True, gbps=100)"
whole = "whole"

[[statement]]
text = "Streaming is *faster*"
holds = "pick(runs, 'ttft_s', streams=True) < whole"

[[statement]]
measured = true
text = "A copy took {copy:.1f} ms"
copy = "copy_ms"

[[fixed]]
why = "a parameter"
text = ["of 16 nodes"]
"""
RUNS = [{"streams": True, "gbps": 100.0, "ttft_s": 1.512}, {"streams": False, "gbps": 100.0, "ttft_s": 1.704}]
TRACES = {"conversation": "ab", "synthetic": "cd", "toolagent": None}


def write_record(folder, runs=RUNS, *, scale="classroom", seed=0, traces=TRACES):
    """What a run leaves: the record of its chapter, and what it was a run of."""
    write_provenance(folder, scale=scale, seed=seed, traces=traces)
    (folder / "alpha.json").write_text(json.dumps({"numbers": {"runs": runs, "copy_ms": 9.04}}))


def notebook(prose):
    """A chapter with prose, and a figure of 16 nodes."""
    figure = {"figure": {"caption": "Runs of 16 nodes.", "name": "f"}, "image": {"alt": "A copy took 7.0 ms."}}
    cells = [
        {"cell_type": "markdown", "id": "words", "metadata": {}, "source": prose.splitlines(keepends=True)},
        {"cell_type": "code", "id": "code", "metadata": {"tags": ["parameters"], "mystnb": figure}, "source": "1"},
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def book(tmp_path):
    """A book of one chapter, executed at the scale and seed of its text, with all its statements."""
    folder = tmp_path / "book"
    (folder / "statements").mkdir(parents=True)
    (folder / "statements" / "01_alpha.toml").write_text(SIDECAR)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_alpha.ipynb").write_text(json.dumps(notebook(PROSE), indent=1) + "\n")
    write_record(folder / "_generated")
    return folder


def say(book, old, new):
    """Change the chapter's words."""
    path = book.parent / "notebooks" / "01_alpha.ipynb"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def state(book, old, new):
    """Change the chapter's statements."""
    path = book / "statements" / "01_alpha.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def problems(book, capsys):
    """What the check says, and that its exit status agrees."""
    status = main([str(book)])
    said = capsys.readouterr().err
    assert status == (1 if said else 0)
    return said


class TestCheck:
    """Text and record of the same run have to agree."""

    def test_a_page_that_agrees(self, book, capsys):
        """Nothing is said of a page whose numbers and directions are those of the record."""
        assert problems(book, capsys) == ""

    def test_a_wrong_number(self, book, capsys):
        """A number that the record does not give fails, with the page's number, the record's, and the place."""
        say(book, "1.51", "1.58")
        said = problems(book, capsys)
        assert "01_alpha, words, line 3: the page says 1.58, the record gives 1.51" in said
        assert "1 to mend" in said

    def test_a_wrong_direction(self, book, capsys):
        """A direction that the record denies fails with the sentence and both numbers."""
        write_record(book / "_generated", [RUNS[0], RUNS[1] | {"ttft_s": 1.1}])
        said = problems(book, capsys)
        assert "'Streaming is *faster*' does not hold: 1.512 < 1.1, from pick(runs" in said

    @pytest.mark.parametrize("where", ["where", "Runs of 16 nodes"])
    def test_a_new_number_needs_a_statement(self, book, capsys, where):
        """A numeral in prose or in a caption that nobody accounts for fails, with its sentence."""
        say(book, where, f"{where} over 42 pages")
        assert "'42' has no statement, in " in problems(book, capsys)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ((say, "where storing", "which is two fifths less, where storing"), "'two fifths' has no statement"),
            ((state, ", gbps=100", ""), "'100' has no statement"),
            ((say, "Streaming is *faster*. ", ""), "no prose, caption or alternative text has 'Streaming is *fas"),
            ((say, "of 16 nodes", "of nodes"), "has 'of 16 nodes'"),
        ],
        ids=["number word", "numeral beside the braces", "sentence that is gone", "fixed text that is gone"],
    )
    def test_page_and_statements_have_each_other(self, book, capsys, change, said):
        """Each size has a statement, each numeral of a statement an expression, each statement a sentence."""
        change[0](book, *change[1:])
        assert said in problems(book, capsys)

    def test_every_occurrence_counts(self, book, capsys):
        """A sentence that stands twice has to be right twice."""
        sentence = "At 100 Gbps the mean TTFT is 1.99 s, where storing whole takes 1.70 s"
        say(book, "Runs of", f"{sentence}. Runs of")
        assert "01_alpha, code, caption: the page says 1.99, the record gives 1.51" in problems(book, capsys)

    def test_line_breaks_do_not_count(self, book, capsys):
        """A sentence may be broken into lines anywhere."""
        say(book, '"At 100 Gbps the mean TTFT', '"At 100\\n",\n    "Gbps the mean\\n",\n    "TTFT')
        assert problems(book, capsys) == ""

    def test_measured_numbers_are_not_compared(self, book, capsys):
        """What is timed at each execution may differ from the text, here 9.04 from 7.0; its column must exist."""
        assert problems(book, capsys) == ""
        state(book, '"copy_ms"', '"copy_seconds"')
        assert "'copy_seconds' cannot be computed: NameError" in problems(book, capsys)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("pick(runs, 'ttft')", "there is no column 'ttft'; there are streams, gbps, ttft_s"),
            ("pick(runs, 'ttft_s', gbps=100)", "2 rows have {'gbps': 100}; exactly one must"),
            ("runs.ttft_s[", "SyntaxError"),
            ("open('alpha.json')", "name 'open' is not defined"),
            ("record('beta').runs", "there is no record"),
            ("runs.ttft_s[:0].min()", "runs.ttft_s[:0] selects nothing"),
            ("(runs.ttft_s * float('nan')).mean()", "ours is nan; a page states finite numbers"),
            ("'fast'", "'fast' and cannot be printed as '.2f'"),
            ("pick(runs, 'ttft_s', gbps=None)", "0 rows have {'gbps': None}"),
        ],
    )
    def test_an_expression_that_fails(self, book, capsys, wrong, said):
        """An expression that cannot be computed, or a direction that is a number, is an error with its cause."""
        with pytest.raises(ValueError, match=r"is 2\.5; a direction is true or false"):
            holds("x", {"x": 2.5})
        state(book, "pick(runs, 'ttft_s', streams=True, gbps=100)", wrong)
        assert said in problems(book, capsys)

    def test_statements_of_no_page(self, book, capsys):
        """A file of statements whose page does not exist is an error."""
        (book / "statements" / "02_beta.toml").write_text("")
        assert "02_beta.toml belongs to no page" in problems(book, capsys)

    def test_pages_and_readme(self, book, capsys):
        """Pages that are no chapters are read, too; they name the chapter's record."""
        (book.parent / "README.md").write_text("It takes 1.60 s.\n")
        (book / "statements" / "README.toml").write_text(
            '[[statement]]\ntext = "It takes {a:.2f} s"\na = "record(\'alpha\').runs.ttft_s.min()"\n'
        )
        assert "README, README.md, line 1: the page says 1.60, the record gives 1.51" in problems(book, capsys)

    @pytest.mark.parametrize(
        "run", [{"seed": 1}, {"scale": "smoke"}, {"traces": TRACES | {"toolagent": "ef"}}, {"traces": {}}]
    )
    def test_another_run_is_not_compared(self, book, capsys, run):
        """Another seed, scale or trace says nothing against the text, which is told; cover is still checked."""
        write_record(book / "_generated", [RUNS[0] | {"ttft_s": 1.2}, RUNS[1]], **run)
        assert main([str(book)]) == 0
        assert "what follows from it is not compared with the pages" in capsys.readouterr().err
        assert main([str(book), "--require-record"]) == 2
        assert "nothing can be compared with it" in capsys.readouterr().err
        say(book, "faster*.", "faster*. It has 42 pages.")
        assert "'42' has no statement" in problems(book, capsys)


class TestSidecar:
    """A file of statements is read strictly."""

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('[[fixed]]\ntext = ["of 16 nodes"]', "needs `text`, a list, and `why`"),
            ('[[fixed]]\nwhy = ""\ntext = ["of 16 nodes"]', "needs `text`, a list, and `why`"),
            ('[[fixed]]\nwhy = "w"\ntext = ["16"]', "'16' would cover each such number"),
            ('[[statement]]\ntext = "{a} s"\nb = "1"', "has \\['a'\\] in braces and expressions for \\['b'\\]"),
            ('[[statement]]\ntext = "all good"', "states nothing"),
            ('[[statements]]\ntext = "{a} s"', "allowed are let, statement and fixed"),
            ("[[statement", "is not TOML"),
        ],
    )
    def test_refused(self, tmp_path, text, said):
        """Each mistake in the file is named with the file."""
        path = tmp_path / "01_alpha.toml"
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"01_alpha\.toml.*{said}"):
            read_statements(path)


class TestRuns:
    """The words of a run have the numbers of that run."""

    def executed(self, book, runs, **run):
        """The words of the executed copy of a run, and its alternative text."""
        copy = book / "chapters" / "01_alpha.ipynb"
        made = notebook("old words")
        made["cells"][1] |= {"outputs": ["kept"], "metadata": {"tags": ["parameters"]}}
        made["cells"].append({"cell_type": "code", "id": "x", "metadata": {"tags": ["injected-parameters"]}})
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(json.dumps(made))
        write_record(book / "_generated", runs, **run)
        source, sidecar = book.parent / "notebooks" / "01_alpha.ipynb", book / "statements" / "01_alpha.toml"
        before = source.read_text()
        for _ in range(2):  # the second time changes nothing
            put_prose(source, copy, sidecar, Records(book / "_generated"))
        assert source.read_text() == before
        words, code, injected = json.loads(copy.read_text())["cells"]
        assert (code["outputs"], injected["id"]) == (["kept"], "x")
        return "".join(words["source"]), code["metadata"]["mystnb"]["image"]["alt"]

    def test_another_seed(self, book):
        """The executed copy gets the numbers of its own record, also the measured ones."""
        words, alt = self.executed(book, [RUNS[0] | {"ttft_s": 1.2}, RUNS[1]], seed=1)
        assert "At 100 Gbps the mean TTFT is 1.20 s,\nwhere storing whole takes 1.70 s." in words
        assert alt == "A copy took 9.0 ms."
        assert "In this run" not in words

    def test_a_direction_that_is_not_so(self, book):
        """A direction that is false in a run stays, and the values that decide it stand behind its sentence."""
        words, _ = self.executed(book, [RUNS[0], RUNS[1] | {"ttft_s": 1.1}], scale="smoke")
        said = "Not on this build, which uses scale smoke: TTFT 1.51 s, not below 1.1 s."
        mark = f'<span class="not-here">{said}</span>'
        assert f"Streaming is *faster*. {mark} See FAST'25 Figure 13" in words

    def test_a_number_that_the_run_lacks(self, book):
        """A statement that the run's record cannot answer is marked, and keeps the numbers it was written with."""
        words, _ = self.executed(book, RUNS[1:], scale="smoke")
        said = "The statements of this section cannot be checked on this build, which uses scale smoke."
        assert f'# Alpha in 3 parts\n\n<span class="not-here">{said}</span>\n\nAt 100 Gbps' in words
        assert "At 100 Gbps the mean TTFT is 1.51 s,\nwhere storing whole takes 1.70 s. Streaming" in words


class TestUpdate:
    """`--update` writes the record's numbers into the sources."""

    def test_numbers_only(self, book, capsys):
        """The computed numbers change and nothing else; measured ones stay; the check is then content."""
        write_record(book / "_generated", [RUNS[0] | {"ttft_s": 1.2}, RUNS[1]])
        path = book.parent / "notebooks" / "01_alpha.ipynb"
        before = path.read_text()
        assert main([str(book), "--update"]) == 0
        assert path.read_text() == before.replace("1.51", "1.20")
        assert "01_alpha.ipynb was changed" in capsys.readouterr().err
        assert problems(book, capsys) == ""

    def test_not_from_another_run(self, book, capsys):
        """The sources are not overwritten with the numbers of another scale or seed."""
        write_record(book / "_generated", scale="smoke")
        assert main([str(book), "--update"]) == 2
        assert "is not of scale classroom" in capsys.readouterr().err

    def test_a_page_that_needs_no_record(self, book, capsys):
        """It is checked and updated without one, where all that it states follows from papers and package."""
        shutil.rmtree(book / "_generated")
        page = book / "units.md"
        page.write_text("A MiB has 1,000,000 bytes, in 2 parts.")
        statement = (
            "[let]\nmib = \"code('mooncake_lab.core.MIB')\"\n[[statement]]\n"
            'text = "A MiB has {n:,} bytes, in {parts} parts"\nn = "mib"\n'
            'parts = "sum([1 for half in range(2)])"\n'
        )
        (book / "statements" / "units.toml").write_text(statement)
        assert main([str(book), "units"]) == 1
        assert "the page says 1,000,000, the record gives 1,048,576" in capsys.readouterr().err
        assert main([str(book), "--update", "units"]) == 0
        assert page.read_text() == "A MiB has 1,048,576 bytes, in 2 parts."
        capsys.readouterr()
        assert main([str(book), "--update"]) == 2
        assert "the sources of 01_alpha state the numbers of such a run" in capsys.readouterr().err
        assert page.read_text() == "A MiB has 1,048,576 bytes, in 2 parts."


class TestProse:
    """Which numerals are statements."""

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (
                "4 to 24 %, 5-33, -31 to +107 %, 4,096 tokens, 8xA800",
                ["4", "24", "5", "33", "-31", "+107", "4,096", "8"],
            ),
            ("a third, two-fifths, twice, five times, four percent, halved", None),
            ("one idea, the third reading, ten minutes of two processes", []),
            (
                "FAST'25 Figure 12, arXiv v3 §5.4.1, Figures 12 to 14, Table 2, chapter 02 and chapters 03 and 04",
                [],
            ),
            ("A800, Yi-34B, 70B Llama, B46, F41, mlx5_1, `16 KB`, $x_2 = 3$, [four](page5.md), <img width=6>", []),
            ("Figure 13, 8 nodes", ["8"]),
            ("TTFT < 30 s and throughput > 5, <b>7</b>, <https://a.b/6>", ["30", "5", "7"]),
            (
                "# 3 heads\n\n1. first\n\n```python\nx = 4\n```\n\n```{exercise}\n:label: ex-5\n\nTake 6.\n```\n",
                ["6"],
            ),
            ("$$\nx = 2\n$$ (eq-2)\n\nthen 7", ["7"]),
            ("```{glossary}\nblock\n  Of 512 tokens.\n```\n", ["512"]),
            ("```{list-table}\n:widths: 8 52\n\n* - I1\n  - after 3 s\n```\n", ["3"]),
        ],
    )
    def test_found(self, text, found):
        """Results count; names, code, formulas and references do not."""
        there = [text[start:end] for start, end in numerals(text)]
        assert there == (text.split(", ") if found is None else found)
        assert len(masked(text)) == len(text)

    def test_code(self):
        """A constant of the package is found by its full name; another name is an error with the reason."""
        assert code("mooncake_lab.core.MIB") == MIB
        for path in ("mooncake_lab.core.NONE", "mooncake_lab.nothing.MIB", "os.environ", "mooncake_labels.x"):
            with pytest.raises(ValueError, match=path):
                code(path)


def test_every_numeral_of_this_book_has_a_statement(tmp_path):
    """On no page, chapter or README stands a number that no statement accounts for; no book need be built."""
    from mooncake_lab.book.paper import data_dir

    made = Book(data_dir().parents[1] / "book", Records(tmp_path))
    found = [problem for name in made.pages() for problem in made.page(name).problems(compare=False)]
    assert found == []


def test_the_ends_of_directives_hide_nothing():
    """A number between the ends of two directives is read; a lone end does not begin a stretch of code."""
    text = "```{hint}\nSee `f(1)`.\n```\n\n```{solution} a\nIt is 7.\n```\n\n:::{dropdown} Why\nIt was 8.\n:::\n"
    assert [text[slice(*span)] for span in numerals(text)] == ["7", "8"]
