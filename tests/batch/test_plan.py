"""What there is to do, and when it has been done already."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

import mooncake_lab
from mooncake_lab.batch import plan
from mooncake_lab.batch.notebook import read_notebook
from mooncake_lab.batch.plan import MARK, NotebookJob, parameter_defaults, topic_of
from mooncake_lab.batch.provenance import surroundings_digest

NO_TRACES = {"conversation": None}


def planned(root: Path, *, topics=(), traces=NO_TRACES, **parameters) -> list[NotebookJob]:
    """A plan with the usual folders."""
    return plan(
        (root / "notebooks").glob("*.ipynb"),
        root=root,
        out=Path("chapters"),
        records=Path("numbers"),
        parameters={"scale": "smoke", "seed": 0, **parameters},
        surroundings=surroundings_digest(root, traces),
        topics=topics,
    )


def digest_of_alpha(root: Path, **parameters) -> str:
    """The digest of the first notebook."""
    return planned(root, **parameters)[0].digest


class TestPlan:
    """The list of jobs."""

    def test_topics_are_stems_without_numbers(self, repository):
        """Jobs come in the order of their numbers and are called by their topics."""
        assert [job.topic for job in planned(repository)] == ["alpha", "beta"]
        assert topic_of(Path("notebooks/07_store.ipynb")) == "store"

    def test_a_parameter_that_names_a_file_counts_by_its_content(self, repository, tmp_path):
        """Another trace under the same name is another result."""
        path = tmp_path / "mine.jsonl"
        path.write_text("one")
        before = digest_of_alpha(repository, scale=str(path))
        path.write_text("two")
        assert digest_of_alpha(repository, scale=str(path)) != before

    def test_jobs_know_the_traces_they_were_planned_with(self, repository):
        """What the digest counts, a worker can look for."""
        (job,) = plan(
            [repository / "notebooks" / "01_alpha.ipynb"],
            root=repository,
            out=Path("chapters"),
            records=Path("numbers"),
            parameters={},
            surroundings="",
            traces={"conversation": "ab", "synthetic": None},
        )
        assert job.traces == {"conversation": "ab", "synthetic": None}

    def test_only_chosen_topics(self, repository):
        """A choice of topics leaves the others out."""
        assert [job.topic for job in planned(repository, topics=["beta"])] == ["beta"]

    def test_unknown_topic_is_refused(self, repository):
        """A topic without a notebook is an error that lists those with one."""
        with pytest.raises(ValueError, match=r"'gamma'; there are alpha, beta"):
            planned(repository, topics=["gamma"])

    def test_unknown_parameter_is_refused(self, repository):
        """A parameter that a notebook does not declare is an error that lists those it does."""
        with pytest.raises(ValueError, match=r"01_alpha.ipynb has no parameter 'sclae'; .* scale, seed, out_dir"):
            planned(repository, sclae="smoke")

    def test_notebook_without_parameters_is_refused(self, repository, write_notebook):
        """A notebook without a parameters cell cannot be told anything."""
        write_notebook(repository / "notebooks" / "03_gamma.ipynb", "1", parameters=None)
        with pytest.raises(ValueError, match="no cell is tagged"):
            planned(repository)

    def test_damaged_notebook_is_named(self, repository):
        """A file that is not a notebook is an error with its path."""
        (repository / "notebooks" / "03_gamma.ipynb").write_text('{"cells": 3}')
        with pytest.raises(ValueError, match=r"03_gamma.ipynb is not a Jupyter notebook"):
            planned(repository)

    def test_defaults_are_read_without_running(self, repository):
        """The parameters cell is read as a reader reads it."""
        defaults = parameter_defaults(read_notebook(repository / "notebooks" / "01_alpha.ipynb"))
        assert defaults == {"scale": "classroom", "seed": 0, "out_dir": "out"}


class TestDigest:
    """Any change of what a chapter depends on gives it another name."""

    def test_same_inputs_same_name(self, repository):
        """Planning twice gives the same digest."""
        assert digest_of_alpha(repository) == digest_of_alpha(repository)

    @pytest.mark.parametrize("changed", ["data/paper/facts.csv", "requirements.lock", "data/models/new.bin"])
    def test_a_changed_file_counts(self, repository, changed):
        """Data and pins."""
        before = digest_of_alpha(repository)
        path = repository / changed
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((path.read_bytes() if path.exists() else b"") + b"\n ")
        assert digest_of_alpha(repository) != before

    def test_code_of_the_notebook_counts(self, repository, write_notebook):
        """Another line of code is another result."""
        before = digest_of_alpha(repository)
        write_notebook(repository / "notebooks" / "01_alpha.ipynb", "43")
        assert digest_of_alpha(repository) != before

    def test_prose_of_the_notebook_does_not_count(self, repository):
        """A sentence or a caption that is corrected executes nothing: both are put into the copy afterwards."""
        before, path = digest_of_alpha(repository), repository / "notebooks" / "01_alpha.ipynb"
        notebook = json.loads(path.read_text())
        notebook["cells"][1]["metadata"]["mystnb"] = {"figure": {"caption": "Other."}}
        notebook["cells"].insert(0, {"cell_type": "markdown", "id": "m", "metadata": {}, "source": "# A"})
        path.write_text(json.dumps(notebook))
        assert digest_of_alpha(repository) == before

    @pytest.mark.parametrize(
        ("changed", "others"),
        [("one.py", True), ("__init__.py", True), ("batch/execute.py", True), ("two.py", False)],
    )
    def test_the_modules_that_a_chapter_may_import_count(
        self, repository, write_notebook, monkeypatch, changed, others
    ):
        """A changed line of a module, or of what executes notebooks, changes the chapters that may import it."""
        package = repository / "package"
        (package / "batch").mkdir(parents=True)
        for name in ("__init__.py", "one.py", "two.py", "batch/__init__.py", "batch/execute.py"):
            (package / name).write_text("x = 1\n")
        monkeypatch.setattr(mooncake_lab, "__file__", str(package / "__init__.py"))
        write_notebook(repository / "notebooks" / "01_alpha.ipynb", "from mooncake_lab import one")
        before = digest_of_alpha(repository)
        (package / changed).write_text("x = 2\n")
        assert (digest_of_alpha(repository) != before) == others

    def test_parameters_count(self, repository):
        """Another seed is another result."""
        assert digest_of_alpha(repository, seed=1) != digest_of_alpha(repository, seed=2)

    def test_the_traces_found_count(self, repository):
        """A trace that appears, or changes, changes every chapter."""
        seen = {digest_of_alpha(repository, traces={"conversation": found}) for found in (None, "ab", "cd")}
        assert len(seen) == 3

    def test_fetched_traces_are_no_data(self, repository):
        """Files under data/traces count by their own fingerprint, through the traces found, and not twice."""
        before = digest_of_alpha(repository)
        (repository / "data" / "traces").mkdir()
        (repository / "data" / "traces" / "conversation_trace.jsonl").write_text("{}")
        assert digest_of_alpha(repository) == before

    def test_other_notebooks_do_not_count(self, repository, write_notebook):
        """A chapter does not run again because another was edited."""
        before = digest_of_alpha(repository)
        write_notebook(repository / "notebooks" / "02_beta.ipynb", "43")
        assert digest_of_alpha(repository) == before


class TestIsDone:
    """Whether an executed copy may be kept."""

    @pytest.fixture
    def job(self, repository) -> NotebookJob:
        """A job with an executed copy and a record that fit it."""
        job = planned(repository)[0]
        (repository / "chapters").mkdir()
        mark = {MARK: {"digest": job.digest, "recorded": True}}
        (repository / job.output).write_bytes(msgspec.json.encode({"cells": [], "metadata": mark}))
        (repository / "numbers").mkdir()
        (repository / job.record).write_text("{}")
        return job

    def test_kept_when_all_is_there(self, job):
        """A copy made from the same, with its numbers, is kept."""
        assert job.is_done()

    def test_not_kept_under_another_digest(self, job):
        """A copy made from something else is not."""
        assert not dataclasses.replace(job, digest="other").is_done()

    def test_not_kept_without_its_numbers(self, job):
        """Nor one whose numbers were deleted."""
        (job.root / job.record).unlink()
        assert not job.is_done()

    def test_not_kept_when_cut_off(self, job):
        """Nor one that ends in the middle."""
        path = job.root / job.output
        path.write_bytes(path.read_bytes()[:-3])
        assert not job.is_done()

    def test_not_kept_when_missing(self, job):
        """Nor one that is not there."""
        (job.root / job.output).unlink()
        assert not job.is_done()
