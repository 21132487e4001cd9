"""The README and the page of the benchmarks say of the engine's speed what was measured, and nothing else."""

import json
from pathlib import Path

import pytest

from mooncake_lab.bench.engine_suite import SMOKE, main, measure, settings
from mooncake_lab.bench.floors import Rates, floor_seconds, with_floors
from mooncake_lab.bench.speed_table import (
    measurements,
    refresh_readme,
    refreshed,
    speed_sentence,
    speed_table,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    """A run whose numbers mean nothing."""
    return measure(SMOKE, budget_s=1e9)


@pytest.mark.parametrize(("mark", "name"), [("speed", "cpu_engine.json"), ("peers", "cpu_engine_peers.json")])
def test_the_page_of_the_benchmarks_shows_the_kept_measurements(mark, name):
    """The table between the marks is the one that the kept JSON gives."""
    kept = json.loads((ROOT / "data" / "measured" / name).read_text())
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert refreshed(page, kept, mark=mark) == page
    assert kept["date"] in page


def test_the_readme_has_the_range_of_the_kept_ratios(tmp_path):
    """Its sentence names each peer with its least and largest ratio; refreshing changes nothing."""
    kept = measurements(ROOT)
    page = (ROOT / "README.md").read_text()
    assert speed_sentence(*kept) in page
    for found in kept:
        for peer in {row["peer"] for row in found["rows"]} - {"whole"}:
            ratios = [row["ratio"] for row in found["rows"] if row["peer"] == peer]
            one, several = f" {ratios[0]:.2f} (one case)", f" ({min(ratios):.2f} to {max(ratios):.2f})"
            assert (one if len(ratios) == 1 else several) in page
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "README.md").write_text(page)
    refresh_readme(tmp_path)
    assert (tmp_path / "README.md").read_text() == page


@pytest.mark.parametrize("name", ["cpu_engine.json", "cpu_engine_peers.json"])
def test_no_kept_row_lies_below_its_floor(name):
    """Every program's time is at least the floor, which is the larger of its two parts at the highest rates."""
    kept = json.loads((ROOT / "data" / "measured" / name).read_text())
    for row in kept["rows"]:
        floor_s, bound = floor_seconds(row["bytes_moved"], row["flops"], Rates(**row["peaks"]))
        assert (row["floor_seconds"], row["bound_by"]) == (pytest.approx(floor_s), bound)
        assert min(row["seconds"], row["peer_seconds"]) >= floor_s * (1 - 1e-9)
    assert with_floors(kept["rows"]) == kept["rows"]
    assert "from the rates that the rows reached" in speed_table(kept)


def test_every_row_is_in_the_table(found):
    """A line a case, with its ratio and how far it is from the floor; where and when above."""
    table = speed_table(found)
    assert found["machine"]["processor"] in table
    lines = [line for line in table.splitlines() if line.startswith("| lab-")]
    assert len(lines) == len(found["rows"]) == 3
    for line, row in zip(lines, found["rows"], strict=True):
        assert f"**{row['ratio']:.2f}**" in line
        assert f"{row['seconds'] / row['floor_seconds']:.1f}" in line
        assert row["seconds"] >= row["floor_seconds"] * (1 - 1e-9)


def test_a_page_without_marks_is_refused(found):
    """No mark, no table: an error that says so."""
    with pytest.raises(ValueError, match="0 pairs of marks"):
        refreshed("no marks here", found)


def test_what_comes_after_the_budget_is_named(tmp_path):
    """With no time at all every case is skipped, and the file says which."""
    main([str(tmp_path / "out.json"), "--smoke", "--minutes", "-1"])
    left = json.loads((tmp_path / "out.json").read_text())
    assert left["rows"] == []
    assert left["skipped"] == [f"lab-tiny float32: {case.name}" for case, _, _ in SMOKE[0].cases]


def test_the_processors_clock_is_for_one_thread():
    """It adds up all threads, so two are refused."""
    with pytest.raises(ValueError, match="allowed is 1 thread"):
        measure(settings(2), 0.0, "processor")
