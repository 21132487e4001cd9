"""Running experiments: sweeps, executors, kept results."""

import dataclasses
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from mooncake_lab.book.experiments import cache, record, run, vary
from mooncake_lab.book.experiments.cache import CACHE_VARIABLE, digest_of
from mooncake_lab.book.paper import data_dir


@dataclass(frozen=True)
class Square:
    """Squares `x`, and leaves a mark in a file of this folder each time it really computes."""

    marks: str
    x: int = 1
    copies: int = 1

    def rows(self) -> Iterator[dict[str, int]]:
        with Path(self.marks, "marks").open("a") as file:
            file.write("x")
        for copy in range(self.copies):
            yield {"copy": copy, "square": self.x**2}


Square.__module__ = "mooncake_lab.book.experiments.square"  # results are kept for the package's own classes only


@pytest.fixture
def marks(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "marks"
    path.touch()
    return path


class TestVary:
    def test_is_the_product_in_order(self, marks):
        """Every combination appears once, the last axis fastest."""
        points = vary(Square(str(marks.parent)), x=[1, 2], copies=[3, 4])
        assert [(p.x, p.copies) for p in points] == [(1, 3), (1, 4), (2, 3), (2, 4)]

    def test_unknown_axis_lists_the_fields(self, marks):
        """An axis that is no field is refused with the names that are."""
        with pytest.raises(ValueError, match="no field 'y'; its fields are marks, x, copies"):
            vary(Square(str(marks.parent)), y=[1])


class TestRun:
    def test_table_has_fields_and_rows_side_by_side(self, marks):
        """One line a row of each point, fields first, in the order of the points."""
        table = run(vary(Square(str(marks.parent), copies=2), x=[3, 1]))
        assert list(table.columns) == ["marks", "x", "copies", "copy", "square"]
        assert table["square"].tolist() == [9, 9, 1, 1]

    def test_an_executor_changes_nothing_but_where_it_runs(self, marks):
        """The same table comes back from any executor."""
        points = vary(Square(str(marks.parent)), x=list(range(7)))
        with ThreadPoolExecutor(3) as pool:
            parallel = run(points, pool, cache=False)
        pd.testing.assert_frame_equal(parallel, run(points, cache=False))

    def test_an_executor_that_ends_keeps_what_was_computed(self, marks):
        """Points that it cancelled are counted in one sentence; the others are kept, also those behind them."""

        class Ending(Executor):
            def submit(self, compute, point):
                future = Future()
                if point.x == 1:
                    future.cancel()
                    future.set_running_or_notify_cancel()
                else:
                    future.set_result(compute(point))
                return future

        points = vary(Square(str(marks.parent)), x=[0, 1, 2])
        with pytest.raises(ConnectionError, match="the executor ended before 1 of 3 points were computed"):
            run(points, Ending())
        assert marks.read_text() == "xx"
        assert run(points)["square"].tolist() == [0, 1, 4]
        assert marks.read_text() == "xxx"

    def test_kept_results_are_not_computed_again(self, marks):
        """A second run of the same point reads what the first one kept, and gives the same table."""
        first, second = (run(Square(str(marks.parent), x=5)) for _ in range(2))
        pd.testing.assert_frame_equal(first, second)
        assert marks.read_text() == "x"

    def test_measurements_are_never_kept(self, marks):
        """With cache=False each run computes."""
        for _ in range(2):
            run(Square(str(marks.parent)), cache=False)
        assert marks.read_text() == "xx"

    def test_a_damaged_result_is_computed_again(self, marks):
        """Half a file in the cache is a miss, not a wrong answer."""
        point = Square(str(marks.parent), x=5)
        run(point)
        (kept,) = (marks.parent / "cache").iterdir()
        kept.write_bytes(kept.read_bytes()[:-3])
        assert run(point)["square"].tolist() == [25]
        assert marks.read_text() == "xx"

    def test_what_the_package_does_not_hold_is_never_kept(self, marks, monkeypatch):
        """An experiment written in a notebook computes each time: its code is not in the digest."""
        monkeypatch.setattr(Square, "__module__", "__main__")
        for _ in range(2):
            run(Square(str(marks.parent)))
        assert marks.read_text() == "xx"

    def test_digest_depends_on_the_papers_numbers(self, marks, monkeypatch):
        """A corrected number of a paper changes every digest, for experiments read them."""
        before = digest_of(Square(str(marks.parent)))
        for folder in ("paper", "measured"):
            shutil.copytree(data_dir().with_name(folder), marks.parent / "data" / folder)
        changed = marks.parent / "data" / "paper"
        monkeypatch.setattr(cache, "data_dir", lambda: changed)
        cache.data_digest.cache_clear()
        assert digest_of(Square(str(marks.parent))) == before
        with (changed / "assumptions.csv").open("a") as file:
            file.write("\n")
        cache.data_digest.cache_clear()
        assert digest_of(Square(str(marks.parent))) != before
        cache.data_digest.cache_clear()

    def test_digest_depends_on_class_and_fields(self, marks):
        """Different fields, or another class with the same fields, never share a result."""
        other = dataclasses.make_dataclass("Cube", [("marks", str), ("x", int), ("copies", int)], frozen=True)
        digests = {
            digest_of(Square(str(marks.parent))),
            digest_of(Square(str(marks.parent), x=2)),
            digest_of(other(str(marks), 1, 1)),
        }
        assert len(digests) == 3


class TestProgress:
    """A terminal shows how many points are computed, and nothing else does."""

    def test_a_terminal_has_a_bar(self, tmp_path, monkeypatch, capsys):
        """It counts the points of a sweep on stderr; a single point has none."""
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        run(vary(Square(str(tmp_path)), x=(1, 2, 3)), cache=False)
        shown = capsys.readouterr()
        assert "points" in shown.err
        assert not shown.out
        run(Square(str(tmp_path)), cache=False)
        assert not capsys.readouterr().err

    def test_a_log_has_none(self, tmp_path, capsys):
        """Notebooks and files get only the table."""
        run(vary(Square(str(tmp_path)), x=(1, 2, 3)), cache=False)
        assert capsys.readouterr() == ("", "")


class TestRecord:
    def test_writes_plain_numbers_and_where_they_came_from(self, tmp_path):
        """Tables and numbers become plain JSON, with their sources."""
        table = pd.DataFrame({"a": [1, 2]})
        path = record(
            tmp_path / "new", "traces", {"table": table, "n": 3}, sources=["released conversation trace"]
        )
        content = msgspec.json.decode(path.read_bytes())
        assert content["numbers"] == {"table": [{"a": 1}, {"a": 2}], "n": 3}
        assert content["sources"] == ["released conversation trace"]
        assert content["twin"] is False

    def test_says_when_a_twin_was_used(self, tmp_path):
        """One generated source marks the whole record."""
        path = record(tmp_path, "t", {}, sources=["released x", "twin of y, seed 0"])
        assert msgspec.json.decode(path.read_bytes())["twin"] is True
