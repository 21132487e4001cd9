"""The commits that records name."""

import json
import shutil
import subprocess

import pytest

from mooncake_lab.bench import commits
from mooncake_lab.core import carried_folder


def test_commits_are_read_from_tables_and_objects(tmp_path):
    """Each commit of a file is named once, without the mark of changed files; a file without any is left out."""
    (tmp_path / "a.csv").write_text("# counted by hand, in an hour\nx,commit\n1,abc+\n2,abc\n3,def\n")
    (tmp_path / "b.json").write_text(json.dumps({"runs": [{"commit": "123"}, {"other": 1}], "commit": None}))
    (tmp_path / "c.csv").write_text("x\n1\n")
    assert commits.named_commits(tmp_path) == {"a.csv": ("abc", "def"), "b.json": ("123",)}


def test_each_commit_is_told_with_its_place(monkeypatch, capsys):
    """The command says of each recorded commit whether the present history has it."""
    monkeypatch.setattr(commits, "named_commits", lambda _: {"a.csv": ("abc", "def")})
    monkeypatch.setattr(commits, "is_ancestor", lambda commit: commit == "abc")
    commits.main()
    assert capsys.readouterr().out == (
        "a.csv: abc is an ancestor\na.csv: def is not an ancestor of the present commit\n"
    )


def test_a_commit_that_does_not_exist_is_no_ancestor():
    """No history has a commit of forty zeros."""
    assert not commits.is_ancestor("0" * 40)


def test_each_named_commit_is_in_the_history_or_said_to_be_moved():
    """A record names an ancestor, or a commit for which one of the history stands by its title."""
    if not commits.is_whole():
        pytest.skip("the history of the repository is not here")
    folder = carried_folder("measured")
    stands, named = commits.moved(folder), commits.named_commits(folder)
    lost = {(name, each) for name, found in named.items() for each in found if not commits.is_ancestor(each)}
    assert lost - set(stands) == set()
    assert set(stands) - {(name, each) for name, found in named.items() for each in found} == set()
    assert set(stands.values()) - commits.titles() == set()


def test_a_moved_commit_is_told_with_the_one_that_stands_for_it(monkeypatch, tmp_path, capsys):
    """The command names the title that the table gives, and says nothing more of other commits."""
    (tmp_path / "a.csv").write_text("x,commit\n1,abc\n2,def\n")
    (tmp_path / commits.MOVED).write_text("file,named,title,reason\na.csv,def,A change,moved\n")
    monkeypatch.setattr(commits, "carried_folder", lambda _: tmp_path)
    monkeypatch.setattr(commits, "is_ancestor", lambda commit: commit == "abc")
    commits.main()
    assert capsys.readouterr().out == (
        "a.csv: abc is an ancestor\n"
        "a.csv: def is not an ancestor of the present commit; 'A change' stands for it\n"
    )


def test_a_record_that_is_being_made_does_not_make_the_code_another_commit(monkeypatch, tmp_path):
    """Only a change of another file is marked; without that exception, every change is."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git")

    def run(*words):
        command = [git, "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    run("init")
    record, code = tmp_path / "record.csv", tmp_path / "code.py"
    for path in (record, code):
        path.write_text("1")
    run("add", ".")
    run("commit", "-m", "all")
    monkeypatch.setattr(commits, "_git", run)
    clean = commits.commit()
    assert clean
    assert commits.commit(record) == clean
    record.write_text("2")
    assert (commits.commit(), commits.commit(record)) == (f"{clean}+", clean)
    code.write_text("2")
    assert commits.commit(record) == f"{clean}+"
