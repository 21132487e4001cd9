"""In a run that a page was not written for, each sentence is true, or a mark behind it says what is so instead."""

import ast
import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from mooncake_lab.book.rendering.expressions import HELPERS, Records, evaluate, holds, unknown_names
from mooncake_lab.book.rendering.fit import Filled, misfits
from mooncake_lab.book.rendering.provenance import Provenance, read_provenance, write_provenance
from mooncake_lab.book.rendering.reasons import reason
from mooncake_lab.book.rendering.stated_page import SHARED, Page
from mooncake_lab.book.rendering.statement_files import read_statements, squeezed
from mooncake_lab.book.rendering.statements import main, told_page

STATEMENTS = Path(__file__).parents[3] / "book" / "statements"
FILES = sorted(STATEMENTS.glob("*.toml"))
TABLE = pd.DataFrame(
    {
        "policy": ["cache_aware", "load_balance", "random"],
        "ttft_s": [1.0, 2.5, 2.0],
        "hit_rate": [0.31, 0.101, 0.108],
        "nothing": [float("nan")] * 3,
    }
)
NAMES = {"__builtins__": {}, **HELPERS, "table": TABLE, "by": TABLE.set_index("policy")}
NAMES |= {"released": lambda _workload: False, "verdict": lambda _claim: "trace not here"}
TWINS = {"conversation": None, "synthetic": None}


class TestNothing:
    """No condition holds of nothing."""

    @pytest.mark.parametrize(
        "expression",
        [
            "(table[table.ttft_s > 9].hit_rate > 0.5).all()",
            "all(row.hit_rate > 0.5 for row in table[table.ttft_s > 9].itertuples())",
            "all(row.hit_rate > 0.5 for row in table.itertuples() if row.ttft_s > 9)",
            "not any(rate > 0.5 for rate in table.hit_rate if rate > 1)",
            "not (table[table.ttft_s > 9].policy == 'random').any()",
            "set(table[table.ttft_s > 9].policy) <= {'random'}",
            "'random' not in set(table[table.ttft_s > 9].policy)",
            "{row.policy for row in table.itertuples() if row.ttft_s > 9} == set(table.policy[:0])",
            "sum(rate for rate in table.hit_rate if rate > 1) < 1",
            "max((rate for rate in table.hit_rate if rate > 1), default=0) < 1",
            "min([rate for rate in table.hit_rate if rate > 1], default=9) > 1",
            "len(table[table.ttft_s > 9]) < 2",
            "table[table.ttft_s > 9].ttft_s.is_monotonic_increasing",
            "table.ttft_s[:1].is_monotonic_decreasing",
            "table.query('ttft_s > 9').ttft_s.sum() == 0",
            "table[table.ttft_s > 9].groupby('policy').ttft_s.nunique().max() == 1",
            "not table.nothing.mean() > 1",
            "table.nothing.mean() != 1",
            "not (table.nothing > 1).any()",
            "median(rate for rate in table.hit_rate if rate > 1) < 1",
            "all(a < b for a, b in zip(table.hit_rate[:1], table.ttft_s))",
        ],
    )
    def test_refused(self, expression):
        """A condition over no rows, over NaN or over what was cut off is refused, and warns of nothing."""
        with pytest.raises(ValueError, match="cannot be computed"):
            holds(expression, NAMES)

    @pytest.mark.parametrize(
        "expression",
        [
            "[row.policy for row in table.itertuples() if row.ttft_s > 9] == []",
            "set(table.policy) - {'cache_aware', 'load_balance', 'random'} == set()",
            "not any(row.ttft_s > 9 for row in table.itertuples())",
            "max(1, 2) == 2 and sum(rate > 1 for rate in table.hit_rate) == 0",
        ],
    )
    def test_none_is_said_so(self, expression):
        """What says that there are none holds; so does a count of zero in rows that there are."""
        assert holds(expression, NAMES)[0] is True

    def test_no_warning_reaches_the_user(self):
        """What numpy warns of is an error with the expression, not a line on the screen."""
        names = NAMES | {"numbers": pd.Series([0.0, 0.0]).to_numpy()}
        with pytest.raises(
            ValueError, match=r"'\(numbers / numbers\)\.max\(\) < 1' cannot be computed: RuntimeWarning"
        ):
            evaluate("(numbers / numbers).max() < 1", names)

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_condition_of_this_book(self, path):
        """No condition that a page takes from a record holds when each table of the record has no rows."""
        let, statements = read_statements(path)
        let = read_statements(STATEMENTS / SHARED)[0] | let
        names = {"__builtins__": {}, **HELPERS}
        names |= dict.fromkeys(("ours", "verdict", "released"), rowless)
        names["record"] = lambda _topic: Rowless()
        needed = {name for text in let.values() for name in unknown_names(text)}
        needed |= {name for each in statements for text in each.holds for name in unknown_names(text)}
        names |= {name: Rowless() for name in needed - let.keys() - names.keys()}
        of_record = needed - let.keys() - {"__builtins__"}
        for name, text in let.items():
            try:
                names[name] = evaluate(text, names)
                of_record |= {name} if unknown_names(text) & of_record else set()
            except ValueError:
                of_record.add(name)
        vacuous = []
        for text in (text for each in statements for text in each.holds if unknown_names(text) & of_record):
            try:
                vacuous += [text] if holds(text, names)[0] else []
            except ValueError:
                continue
        assert vacuous == []


class Rowless(pd.DataFrame):
    """A table with all columns and no rows."""

    def __getattr__(self, name):
        return super().__getattr__(name) if hasattr(pd.DataFrame, name) else pd.Series(dtype=float, name=name)

    def __getitem__(self, key):
        return pd.Series(dtype=float, name=key) if isinstance(key, str) else self

    def set_index(self, *_columns):
        return self

    def pivot_table(self, *_columns, **_options):
        return self


def rowless(_name):
    """What a record without rows has on a claim."""
    raise ValueError("0 rows")


class TestReasons:
    """The values that decide a false condition, in words."""

    @pytest.mark.parametrize(
        ("expression", "said"),
        [
            ("by.hit_rate.is_monotonic_decreasing", "hit rate: load balancing 10.1 %, random 10.8 %"),
            (
                "by.hit_rate['random'] < by.hit_rate['load_balance']",
                "hit rate random 10.8 %, hit rate load balancing 10.1 %",
            ),
            ("by.ttft_s['random'] > 1 and by.ttft_s['random'] < 1.5", "TTFT random 2 s, not below 1.5 s"),
            ("1.5 > by.ttft_s['random']", "TTFT random 2 s, not below 1.5 s"),
            ("by.ttft_s.max() <= 2", "TTFT largest 2.5 s, above 2 s"),
            ("all(by.ttft_s[name] < 2.2 for name in by.index)", "TTFT load balancing 2.5 s, not below 2.2 s"),
            ("not any(by.ttft_s[name] > 2.2 for name in by.index)", "TTFT load balancing 2.5 s, 2.2"),
            ("(by.ttft_s < 2.2).all()", "TTFT load balancing 2.5 s, not below 2.2 s"),
            ("near(by.ttft_s['random'], 1, 0.1)", "TTFT random 2 s, not about 1 s"),
            ("by.ttft_s.idxmax() == 'random'", "TTFT largest load balancing instead of random"),
            (
                "set(table.policy) == {'random'}",
                "policy local cache-aware, load balancing, random instead of random",
            ),
            ("100 * by.hit_rate['random'] > 12", "hit rate random 10.8, not above 12"),
            ("released('synthetic')", "the synthetic trace is generated"),
            ("{verdict('F1')} == {'reproduced'}", "the verdict is trace not here instead of reproduced"),
            ("table.policy.str.startswith('x').any()", ""),
        ],
    )
    def test_said(self, expression, said):
        """Columns, rows, values and units are those that decide; where no words are known, nothing is said."""
        assert not holds(expression, NAMES)[0]
        assert reason(expression, NAMES) == said


class TestFit:
    """Numbers have to fit the words that they are put into."""

    @pytest.mark.parametrize(
        ("text", "numbers", "wrong"),
        [
            ("the hit rate is 37 % instead of 41 %", ["35", "35"], "set against"),
            ("it takes 38 s compared with 42 s under LRU", ["38", "38"], "set against"),
            ("2 to 33 % lower than the printed ones", ["-1", "33"], "below zero"),
            ("2 to 33 % lower than the printed ones", ["0", "0"], "set against"),
            ("between 2 and 33 %", ["33", "2"], "other way"),
            ("from 4 seconds at first to 2 at the end", ["2", "4"], "other way"),
            ("In all 36 other bins, our count is equal", ["1"], "plural"),
            ("In all 36 other bins, our count is equal", ["0"], "nothing"),
            ("one of 8 requests is rejected, of four nodes", ["one"], None),
            ("at least four nodes hold it", ["one"], "plural"),
            ("wastes only 38 s", ["0"], "nothing"),
            ("the mean is 5 % longer", ["0"], "nothing"),
            ("the mean is 5 % longer", ["-3"], "below zero"),
            ("the mean is 5 % longer", ["1"], None),
            ("a correlation of +0.40", ["-0.10"], None),
            ("35 % here, and 40 % in the paper", ["40", "40"], None),
            ("rejects 12 requests", ["0"], None),
            ("2 to 33 % lower", ["3", "30"], None),
            ("1.05 times as many requests", ["1.00"], None),
        ],
    )
    def test_misfits(self, text, numbers, wrong):
        """Equal sides of a contrast, ranges through zero or turned round, and counts of one and none do not."""
        spots, at = [], 0
        for word in text.split():
            start = text.index(word, at)
            at = start + len(word)
            if len(spots) < len(numbers) and (
                word.strip("%+.").replace(".", "").isdigit() or word in {"four", "one"}
            ):
                spots.append((start, at))
        filled = [
            Filled(start, end, new, text[start] == "+") for (start, end), new in zip(spots, numbers, strict=True)
        ]
        found = list(misfits(text, filled))
        assert bool(found) == bool(wrong)
        assert wrong is None or any(wrong in each for each in found)


def told(folder, prose, statements, values, *, traces=TWINS, name="alpha"):
    """A Markdown page as its reader gets it in a run with some values on record."""
    write_provenance(folder / "_generated", scale="classroom", seed=0, traces=traces)
    (folder / "_generated" / "alpha.json").write_text(json.dumps({"numbers": values}))
    page, sidecar = folder / f"{name}.md", folder / f"{name}.toml"
    page.write_text(prose)
    sidecar.write_text(statements)
    return told_page(page, sidecar, Records(folder / "_generated"))


def statement(text, holds, more=""):
    """A statement of the form that files have."""
    return f"[[statement]]\ntext = '{text}'\nholds = \"{holds}\"\n{more}\n"


HERE = "on this build, which uses generated traces"


def mark(said):
    """A mark as it stands in a page's source."""
    return f'<span class="not-here">{said}</span>'


class TestPlace:
    """A mark stands behind its sentence, also on pages that are no notebooks."""

    @pytest.mark.parametrize(
        ("prose", "marked"),
        [
            (
                "Before. Twice is faster. Behind.\\n\\n## Next\\n",
                "Before. Twice is faster. {} Behind.\\n\\n## Next\\n",
            ),
            ("* Twice is faster\\n* Other\\n", "* Twice is faster {}\\n* Other\\n"),
            (
                "Twice is faster, as\\nwe said: yes.\\n\\nOther.\\n",
                "Twice is faster, as\\nwe said: yes. {}\\n\\nOther.\\n",
            ),
            ("**Twice is faster.** Other.\\n", "**Twice is faster.** {} Other.\\n"),
            (
                "| a | b |\\n| --- | --- |\\n| Twice is faster | c |\\n",
                "| a | b |\\n| --- | --- |\\n| Twice is faster {} | c |\\n",
            ),
            (
                "Twice is faster (see $x.y$ or `a. b`). Other.\\n",
                "Twice is faster (see $x.y$ or `a. b`). {} Other.\\n",
            ),
            (
                "```{note}\\nTwice is faster\\n```\\n\\nOther.\\n",
                "```{note}\\nTwice is faster {}\\n```\\n\\nOther.\\n",
            ),
        ],
    )
    def test_behind_its_sentence(self, tmp_path, prose, marked):
        """In running text, lists, tables, bold words and boxes."""
        prose, marked = (text.replace("\\n", "\n") for text in (prose, marked))
        said = told(tmp_path, prose, statement("Twice is faster", "record('alpha').gain > 2"), {"gain": 1.5})
        assert said == marked.replace("{}", mark(f"Not {HERE}: gain 1.5, not above 2."), 1)

    def test_nothing_where_it_holds(self, tmp_path):
        """A page whose sentences hold has its numbers and no mark."""
        rule = statement("It gains {n:.1f} times", "record('alpha').gain > 2", "n = \"record('alpha').gain\"")
        assert told(tmp_path, "It gains 3.0 times.", rule, {"gain": 4.04}) == "It gains 4.0 times."

    def test_the_authors_words(self, tmp_path):
        """Where the author wrote what to say instead, the mark says it; the sentence keeps its own numbers."""
        more = "n = \"record('alpha').gain\"\ninstead = 'the gain is {n:.2f}_x*'"
        rule = statement("It gains {n:.1f} times", "record('alpha').gain > 2", more)
        said = told(tmp_path, "It gains 3.0 times.", rule, {"gain": 1.04})
        assert said == f"It gains 3.0 times. {mark(f'Not {HERE}: the gain is 1.04&#95;x&#42;.')}"

    def test_numbers_that_do_not_fit(self, tmp_path):
        """A sentence that its numbers would turn into nonsense keeps the old ones; the mark has the new ones."""
        values = "a = \"record('alpha').a\"\nb = \"record('alpha').b\"\n"
        values = f"[[statement]]\ntext = 'It is {{a:.0f}} % instead of {{b:.0f}} %'\n{values}"
        said = told(tmp_path, "It is 37 % instead of 41 %.", values, {"a": 35.1, "b": 34.9})
        assert said == f"It is 37 % instead of 41 %. {mark(f'Not {HERE}: 35 %, 35 %.')}"

    def test_two_of_one_sentence(self, tmp_path):
        """Statements about the same sentence have one mark, which says each reason once."""
        rules = statement("Twice is", "record('alpha').gain > 2") + statement(
            "is faster", "record('alpha').least > 3"
        )
        said = told(tmp_path, "Twice is faster.", rules, {"gain": 1.5, "least": 1})
        assert said == f"Twice is faster. {mark(f'Not {HERE}: gain 1.5, not above 2; least 1, not above 3.')}"

    def test_the_run_is_named(self):
        """A mark says by what the run differs from that of the sources: scale, seed, and each trace."""
        there = {"conversation": "a", "synthetic": "b", "toolagent": None}
        runs = [
            ("classroom", 0, there, ""),
            ("smoke", 0, there, "which uses scale smoke"),
            ("smoke", 3, TWINS, "which uses scale smoke, seed 3 and generated traces"),
            ("classroom", 0, there | {"synthetic": None}, "which uses a generated synthetic trace"),
            ("classroom", 0, there | {"toolagent": "c"}, "which uses the released toolagent trace"),
        ]
        for scale, seed, traces, said in runs:
            assert Provenance(scale=scale, seed=seed, traces=traces).special == said


class TestSection:
    """A section in which a third of the statements fail has one sentence for all."""

    PROSE = "# Page\n\nIntro holds.\n\n## Part\n\nA holds. B holds. C holds. D holds. E holds. F holds. G holds.\n"

    def page(self, folder, failing):
        """The page where some of seven statements fail."""
        rules = "".join(statement(f"{name} holds", f"record('alpha').{name} > 1") for name in "ABCDEFG")
        values = {name: 1 if name in failing else 2 for name in "ABCDEFG"}
        return told(folder, self.PROSE, rules, values)

    def test_below_a_third(self, tmp_path):
        """Two of seven have a mark each."""
        said = self.page(tmp_path, "BC")
        assert said.count("not-here") == 2
        assert f"B holds. {mark(f'Not {HERE}: B 1, not above 1.')} C holds." in said

    def test_a_third(self, tmp_path):
        """Three of seven have one sentence below the heading, and no mark."""
        one = mark(f"3 of the 7 statements of this section do not hold {HERE}.")
        assert self.page(tmp_path, "BCG") == self.PROSE.replace("## Part\n", f"## Part\n\n{one}\n")

    def test_all(self, tmp_path):
        """Where all fail, the sentence says so without numbers."""
        assert f"## Part\n\n{mark(f'The statements of this section do not hold {HERE}.')}\n" in self.page(
            tmp_path, "ABCDEFG"
        )

    def test_one_of_one(self, tmp_path):
        """A single statement has its own mark, which says what is so."""
        rule = statement("Intro holds", "record('alpha').gain > 2")
        said = told(tmp_path, self.PROSE, rule, {"gain": 1})
        assert f"Intro holds. {mark(f'Not {HERE}: gain 1, not above 2.')}\n" in said


class TestShared:
    """What two pages state has one condition."""

    def test_names_of_all_pages(self, tmp_path):
        """A name of the shared file is one of each page that uses it, and is computed only there."""
        (tmp_path / SHARED).write_text(
            "[let]\ngain = \"record('alpha').gain\"\nenough = 'gain > 2'\nbroken = 'no_such_name'\n"
        )
        rule = statement("Twice is faster", "enough")
        for name in ("alpha", "beta"):
            assert told(tmp_path, "Twice is faster.", rule, {"gain": 3}, name=name) == "Twice is faster."
            assert "not-here" in told(tmp_path, "Twice is faster.", rule, {"gain": 1}, name=name)

    def test_it_is_a_file_of_no_page(self, tmp_path, capsys):
        """The check does not ask for a page of its name."""
        (tmp_path / "book" / "statements").mkdir(parents=True)
        (tmp_path / "book" / "statements" / SHARED).write_text("[let]\none = '1'\n")
        assert main([str(tmp_path / "book")]) == 0
        assert "belongs to no page" not in capsys.readouterr().err

    def test_the_same_sentence_has_the_same_condition(self):
        """No two pages of this book check one sentence in two ways."""
        conditions: dict[str, set] = {}
        for path in FILES:
            for each in tomllib.loads(path.read_text()).get("statement", []):
                rule = each.get("holds", ())
                conditions.setdefault(squeezed(each["text"]), set()).add(
                    rule if isinstance(rule, str) else tuple(rule)
                )
        assert {text for text, rules in conditions.items() if len(rules) > 1} == set()

    @pytest.mark.parametrize("row", [None, {"kind": "times", "reproduced": 1, "conditional": 1, "missed": 10}])
    def test_a_kind_that_is_missing_is_not_compared(self, row, tmp_path):
        """Front page, README and scorecard say that ratios agree more often only where the others were judged."""
        kinds = [
            {"kind": "other ratios and shares, Mooncake", "reproduced": 3, "conditional": 6, "missed": 9},
            {"kind": "gains over vLLM, and what vLLM does", "reproduced": 2, "conditional": 7, "missed": 24},
        ]
        folder = tmp_path / "_generated"
        write_provenance(folder, scale="classroom", seed=0, traces=TWINS)
        content = {"numbers": {"kinds": kinds + [row] * bool(row)}}
        (folder / "scorecard.json").write_text(json.dumps(content))
        root = STATEMENTS.parents[1]
        for source in (root / "book" / "intro.md", root / "README.md", root / "notebooks" / "13_scorecard.ipynb"):
            page = Page(source, STATEMENTS / f"{source.stem}.toml", Records(folder))
            found = [each for each in page.checked if "ratios_agree_more_often" in each.statement.holds]
            assert found
            assert all(each.fails == (row is None) for each in found)
            assert row or all("9 of 18 other ratios and shares" in page._instead(each) for each in found)


def test_what_is_said_of_released_traces_asks_for_them():
    """A sentence on a released trace or file that a run computes is marked where a twin was read."""
    root = STATEMENTS.parents[1]
    unasked = []
    for source in [*sorted((root / "notebooks").glob("*.ipynb")), *sorted((root / "book").glob("*.md"))]:
        page = Page(source, STATEMENTS / f"{source.stem}.toml", Records(root / "no record"))
        for each in page.checked:
            own = [*dict(each.statement.values).values(), *each.statement.holds]
            asks = any(word in text for text in own for word in ("released(", "verdict", "decided", "origin"))
            speaks = any(
                word in each.statement.text for word in ("released file", "released traces", "released conv")
            )
            if speaks and not asks and not each.statement.fixed and any(map(unknown_names, own)):
                unasked.append(each.statement.text)
    assert unasked == []


def test_a_page_is_told_while_sphinx_reads_it(tmp_path, monkeypatch):
    """The extension marks a page that has statements, and leaves pages alone where nothing was executed."""
    monkeypatch.syspath_prepend(str(STATEMENTS.parent / "_ext"))
    extension = __import__("mooncake_statements")
    (tmp_path / "statements").mkdir()
    (tmp_path / "statements" / "front.toml").write_text(statement("Twice is faster", "record('alpha').gain > 2"))
    (tmp_path / "front.md").write_text("Twice is faster.")
    app, source = SimpleNamespace(srcdir=tmp_path), ["Twice is faster."]
    extension.tell(app, "front", source)
    assert source == ["Twice is faster."]
    write_provenance(tmp_path / "_generated", scale="classroom", seed=0, traces=TWINS)
    (tmp_path / "_generated" / "alpha.json").write_text(json.dumps({"numbers": {"gain": 1}}))
    extension.tell(app, "front", source)
    assert source == [f"Twice is faster. {mark(f'Not {HERE}: gain 1, not above 2.')}"]
    extension.tell(app, "other", other := ["Other."])
    assert other == ["Other."]
    assert (
        read_provenance(tmp_path / "_generated").banner
        == "Built with generated traces; `make traces` fetches the released ones."
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_condition_holds_by_its_form(path):
    """No condition compares constants, as in `128 == 128`; a numeral that names a setting is given instead."""
    for each in read_statements(path)[1]:
        for condition in each.holds:
            for part in ast.walk(ast.parse(condition)):
                if isinstance(part, ast.Compare):
                    assert not all(isinstance(side, ast.Constant) for side in (part.left, *part.comparators)), (
                        condition
                    )
        assert all(numeral in each.text for numeral in each.given), each.text
