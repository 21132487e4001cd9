"""What a GPU measured, in chapters: tables, else a reason, and never another device's numbers."""

import json

import pytest
from measured import dry_run

from mooncake_lab.book.chapters.gpu import measured as gpu

MACHINE = {"processor": "A GPU", "device": "cuda", "torch_version": "2", "date": "2030-01-02"}


@pytest.fixture
def sections(tmp_path_factory):
    """Two of a dry run, and one that failed."""
    found = dry_run(tmp_path_factory)["sections"]
    return {name: found[name] for name in ("decode", "tiles")} | {"chunks": {"failed": "RuntimeError: no memory"}}


def write(path, sections, **instead):
    """A file as `benchmarks/gpu.py` writes it."""
    whole = {"machine": MACHINE, "driver": "570.1", "commit": "abc1234", "shape": "llama3-8b", "dtype": "bfloat16"}
    path.write_text(json.dumps(whole | {"sections": sections} | instead))


def test_a_report_has_its_tables_and_says_who_measured(tmp_path, sections):
    """A table a section, one row a point that was measured; points without room are left out."""
    sections["decode"]["rows"].append({"batch": 9, "context": 9, "skipped": "no room"})
    write(tmp_path / "engine_h200.json", sections)
    report = gpu.committed(tmp_path)
    measured = [row for row in sections["decode"]["rows"] if "skipped" not in row]
    assert report.tables["decode"]["seconds"].tolist() == [row["seconds"] for row in measured]
    assert set(report.tables) == {"decode", "tiles"}
    for said in ("A GPU", "570.1", "2030-01-02", "abc1234", "llama3-8b", "bfloat16"):
        assert said in report.source
    drawn = report.show(lambda *given: given, "tiles", "decode")
    assert drawn[0] is report.tables["tiles"]
    assert drawn[1] is report.tables["decode"]
    assert drawn[2] == report.source


def test_what_was_not_measured_is_a_sentence(tmp_path, sections):
    """A section that failed says how; without any report the sentence says how to measure. Nothing is drawn."""

    def draw(*_given):
        raise AssertionError

    write(tmp_path / "engine_h200.json", sections)
    assert "no memory" in gpu.committed(tmp_path).show(draw, "tiles", "chunks")._repr_markdown_()
    (tmp_path / "engine_h200.json").unlink()
    shown = gpu.committed(tmp_path).show(draw, "tiles")
    assert "Not measured" in shown._repr_markdown_()
    assert "benchmarks/gpu.py" in shown._repr_markdown_()


def test_the_newest_report_counts(tmp_path, sections):
    """Of several, the one with the latest date."""
    for name, date in (("engine_h100", "2030-02-01"), ("engine_h200", "2030-01-01")):
        write(tmp_path / f"{name}.json", sections, machine=MACHINE | {"date": date})
    assert "2030-02-01" in gpu.committed(tmp_path).source


def test_a_dry_run_is_no_report_of_a_gpu(tmp_path, sections):
    """What a CPU measured is never shown as a GPU's, and another file is no report."""
    path = tmp_path / "engine_h200.json"
    write(path, sections, machine=MACHINE | {"device": "cpu"})
    with pytest.raises(ValueError, match="measured on a cpu"):
        gpu.committed(tmp_path)
    for other in ("[]", "{}", "not json", '{"machine": {}, "sections": {}}'):
        path.write_text(other)
        with pytest.raises(ValueError, match=r"not written by benchmarks/gpu\.py"):
            gpu.committed(tmp_path)
