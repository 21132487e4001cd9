"""The commits that records name."""

import json

from mooncake_lab.bench import commits


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
