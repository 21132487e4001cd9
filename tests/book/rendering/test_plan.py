"""What there is to do, and when it has been done already."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

import mooncake_lab
from mooncake_lab.book.experiments import cache
from mooncake_lab.book.rendering import Provenance, plan, write_provenance
from mooncake_lab.book.rendering.notebook import read_notebook
from mooncake_lab.book.rendering.plan import (
    MARK,
    NotebookJob,
    after_the_others,
    parameter_defaults,
    points,
    values,
)
from mooncake_lab.book.rendering.provenance import BOOK_TRACES, FILE, read_provenance, surroundings_digest

ALPHA = "notebooks/01_alpha.ipynb"
OF_RENDERING = ("book/__init__.py", "book/rendering/__init__.py", "book/rendering/run.py")


def planned(root: Path, *, topics=(), traces=None, **parameters) -> list[NotebookJob]:
    """A plan with the usual folders."""
    return plan(
        (root / "notebooks").glob("*.ipynb"),
        root=root,
        out=Path("chapters"),
        records=Path("numbers"),
        parameters={"scale": "smoke", "seed": 0, **parameters},
        surroundings=surroundings_digest(root, {"conversation": traces}),
        topics=topics,
    )


def digest_of_alpha(root: Path, **parameters) -> str:
    """The digest of the first notebook."""
    return planned(root, **parameters)[0].digest


def test_topics_are_stems_without_numbers(repository):
    """Jobs come in the order of their numbers, are called by their topics, and can be chosen by them."""
    assert [job.topic for job in planned(repository)] == ["alpha", "beta"]
    assert [job.topic for job in planned(repository, topics=["beta"])] == ["beta"]


def test_what_cannot_be_planned_is_refused(repository, write_notebook):
    """An unknown topic or parameter, and a file that is no notebook, are errors that say what there is."""
    with pytest.raises(ValueError, match=r"'gamma'; there are alpha, beta"):
        planned(repository, topics=["gamma"])
    with pytest.raises(ValueError, match=r"01_alpha.ipynb has no parameter 'sclae'; .* scale, seed, out_dir"):
        planned(repository, sclae="smoke")
    path = write_notebook(repository / "notebooks" / "03_gamma.ipynb", "1", parameters=None)
    with pytest.raises(ValueError, match="no cell is tagged"):
        planned(repository)
    path.write_text('{"cells": 3}')
    with pytest.raises(ValueError, match=r"03_gamma.ipynb is not a Jupyter notebook"):
        planned(repository)


def test_defaults_are_read_without_running(repository):
    """The parameters cell is read as a reader reads it."""
    defaults = parameter_defaults(read_notebook(repository / ALPHA))
    assert defaults == {"scale": "classroom", "seed": 0, "out_dir": "out"}


@pytest.mark.parametrize("changed", ["data/paper/facts.csv", "requirements.lock", "data/models/new.bin"])
def test_data_and_pins_count(repository, changed):
    """A changed file of the data or another pin is another result; fetched traces count by their hash instead."""
    before = digest_of_alpha(repository)
    (repository / "data" / "traces").mkdir()
    (repository / "data" / "traces" / "conversation_trace.jsonl").write_text("{}")
    assert digest_of_alpha(repository) == before
    path = repository / changed
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b"\n ")
    assert digest_of_alpha(repository) != before


def test_parameters_and_traces_count(repository, tmp_path):
    """Another seed, other traces, and another content of a file that a parameter names are other results."""
    path = tmp_path / "mine.jsonl"
    digests = {digest_of_alpha(repository, seed=seed, traces=found) for seed in (1, 2) for found in (None, "ab")}
    for text in ("one", "two"):
        path.write_text(text)
        digests.add(digest_of_alpha(repository, scale=str(path)))
    assert len(digests) == 6


def test_code_counts_and_prose_does_not(repository, write_notebook):
    """A changed line of the notebook executes it again; its prose, and other notebooks, do not."""
    before, path = digest_of_alpha(repository), repository / ALPHA
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["metadata"]["mystnb"] = {"figure": {"caption": "Other."}}
    notebook["cells"].insert(0, {"cell_type": "markdown", "id": "m", "metadata": {}, "source": "# A"})
    path.write_text(json.dumps(notebook))
    write_notebook(repository / "notebooks" / "02_beta.ipynb", "43")
    assert digest_of_alpha(repository) == before
    write_notebook(path, "43")
    assert digest_of_alpha(repository) != before


@pytest.mark.parametrize(
    ("changed", "others"),
    [("one.py", True), ("__init__.py", True), ("book/rendering/run.py", True), ("two.py", False)],
)
def test_the_modules_that_a_chapter_may_import_count(repository, write_notebook, monkeypatch, changed, others):
    """A changed line of a module, or of what executes notebooks, changes the chapters that may import it."""
    package = repository / "package"
    (package / "book" / "rendering").mkdir(parents=True)
    for name in ("__init__.py", "one.py", "two.py", *OF_RENDERING):
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(mooncake_lab, "__file__", str(package / "__init__.py"))
    write_notebook(repository / ALPHA, "from mooncake_lab import one")
    before = digest_of_alpha(repository)
    (package / changed).write_text("x = 2\n")
    assert (digest_of_alpha(repository) != before) == others


@pytest.mark.parametrize(
    ("changed", "some", "others"),
    [
        ("book/chapters/placement/figures.py", {"placement"}, {"start", "traces", "engine", "scorecard"}),
        ("serving/runtime.py", {"start", "overload", "live"}, {"traces", "stages", "placement", "scorecard"}),
        ("book/rendering/run.py", {"start", "traces", "engine", "overload", "scorecard", "compression"}, set()),
        ("cli/batch.py", set(), {"start", "traces", "engine", "overload", "scorecard", "compression"}),
    ],
)
def test_a_change_of_the_package_executes_the_chapters_that_may_import_it(monkeypatch, changed, some, others):
    """Of the real chapters those that reach the changed file, and no others: what run.md tells a reader."""
    root = Path(__file__).parents[3]

    def digests():
        jobs = plan(
            (root / "notebooks").glob("*.ipynb"), root=root, out=Path("chapters"), records=Path("numbers"),
            parameters={}, surroundings="",
        )  # fmt: skip
        return {job.topic: job.digest for job in jobs}

    before, real = digests(), cache.file_sha256
    path = Path(mooncake_lab.__file__).parent / changed
    monkeypatch.setattr(cache, "file_sha256", lambda file: "other" if file == path else real(file))
    executed = {topic for topic, digest in digests().items() if digest != before[topic]}
    assert executed >= some
    assert not executed & others
    page = (root / "book" / "run.md").read_text(encoding="utf-8")
    assert "the chapters that may import a changed file are executed" in page


def test_a_gathering_job_depends_on_what_it_gathers(repository):
    """Another record makes it run again; the note on who ran the book, written after each run, does not."""
    job = planned(repository)[0]
    (repository / "numbers").mkdir()
    digests = set[str]()
    for text in ("{}", '{"when": "later"}'):
        (repository / "numbers" / FILE).write_text(text)
        digests.add(after_the_others(job).digest)
    assert len(digests) == 1
    (repository / "numbers" / "gamma.json").write_text("{}")
    assert after_the_others(job).digest not in digests


def test_a_copy_is_kept_while_all_is_there(repository):
    """It is executed again under another digest, without its numbers, when it was cut off, and when it is gone."""
    job = planned(repository)[0]
    copy, record = repository / job.output, repository / job.record
    copy.parent.mkdir()
    record.parent.mkdir()
    copy.write_bytes(
        msgspec.json.encode({"cells": [], "metadata": {MARK: {"digest": job.digest, "recorded": True}}})
    )
    assert not job.is_done()
    record.write_text("{}")
    assert job.is_done()
    assert not dataclasses.replace(job, digest="other").is_done()
    copy.write_bytes(copy.read_bytes()[:-3])
    assert not job.is_done()
    copy.unlink()
    assert not job.is_done()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", (3,)),
        ("-1..1,5", (-1, 0, 1, 5)),
        ("0.5,1", (0.5, 1)),
        ("smoke,full", ("smoke", "full")),
        ("true", (True,)),
    ],
)
def test_values_are_numbers_ranges_truths_or_words(text, expected):
    """One option spells one value or several; a range includes both ends."""
    assert values(text) == expected


@pytest.mark.parametrize("text", ["", "1,,2", "0..2,1", "3..1"])
def test_no_value_or_the_same_twice_is_refused(text):
    """A list with a hole, a repetition, or nothing in it is a mistake."""
    with pytest.raises(ValueError, match="list of different values"):
        values(text)


def test_points_are_the_product_and_named_by_what_varies():
    """Every combination once; what stays the same is not part of the name, and no two share a folder."""
    found = points({"scale": ("smoke",), "seed": (0, 1), "rate": (0.5, 2)})
    names = ["seed=0,rate=0.5", "seed=0,rate=2", "seed=1,rate=0.5", "seed=1,rate=2"]
    assert [point.name for point in found] == names
    assert found[3].parameters == {"scale": "smoke", "seed": 1, "rate": 2}
    assert [point.name for point in points({"seed": (7,)})] == [""]
    with pytest.raises(ValueError, match="'path=a_b'"):
        points({"path": ("a/b", "a:b")})


def test_the_provenance_is_kept(tmp_path):
    """What is written is read back, writing the same again touches nothing, and before there is none."""
    assert read_provenance(tmp_path) is None
    written = write_provenance(tmp_path, scale="smoke", seed=3, traces={"conversation": "ab"})
    assert read_provenance(tmp_path) == written
    before = (tmp_path / FILE).stat().st_mtime_ns
    write_provenance(tmp_path, scale="smoke", seed=3, traces={"conversation": "ab"})
    assert (tmp_path / FILE).stat().st_mtime_ns == before


def test_the_banner_names_the_traces_that_were_missing():
    """The banner appears when a trace that the book rests on was not found, and says which."""
    found = dict.fromkeys(BOOK_TRACES, "ab")
    assert Provenance(scale="smoke", seed=0, traces=found).banner is None
    for name in BOOK_TRACES:
        banner = Provenance(scale="smoke", seed=0, traces={**found, name: None}).banner
        assert banner == f"Built with a generated {name} trace; `make traces` fetches the released one."
