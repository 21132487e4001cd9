"""Whatever a class hands in is graded or named: nothing is dropped in silence."""

import os
from pathlib import Path

import pytest
from submissions import SOURCES

from mooncake_lab.course.grading.collect import collect
from mooncake_lab.course.grading.whole_class import grades_csv


def put(folder: Path, *names: str) -> Path:
    """Files with these names below a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return folder


def named(folder: Path) -> dict[str, str]:
    """What is not graded below a folder, by its place in it, and why."""
    return {each.path.relative_to(folder).as_posix(): each.why for each in collect(folder, SOURCES).ungraded}


def graded(folder: Path) -> list[tuple[str, str]]:
    """Student and place of what is graded."""
    return [
        (each.student, each.path.relative_to(folder).as_posix()) for each in collect(folder, SOURCES).notebooks
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("keys.ipynb", "lies in no student's folder"),
        ("ada/keys.zip", "is not named after an assignment"),
        ("ada/KEYS.IPYNB", "is not named after an assignment"),
        ("ada/keys (1).ipynb", "is not named after an assignment"),
        ("ada/timestamp.txt", "is not named after an assignment"),
        ("ada/week1/keys/keys.ipynb", "lies neither at ada/keys.ipynb nor at ada/keys/keys.ipynb"),
        ("ada/keys/eviction.ipynb", "lies neither at ada/eviction.ipynb nor at ada/eviction/eviction.ipynb"),
    ],
)
def test_what_is_not_taken_is_named(tmp_path, name, why):
    """Every file that is not graded is named with a reason, wherever it lies, and the rest is graded."""
    put(tmp_path, "ada/eviction.ipynb", "bob/keys.ipynb", name)
    if name == "ada/keys/eviction.ipynb":
        (tmp_path / "ada" / "eviction.ipynb").unlink()
        put(tmp_path, "ada/keys.ipynb")
    assert list(named(tmp_path)) == [name]
    assert named(tmp_path)[name].startswith(why)
    assert [student for student, _ in graded(tmp_path)] == ["ada", "bob"]
    assert not collect(tmp_path, SOURCES).without


def test_both_places_of_a_notebook_are_known(tmp_path):
    """A notebook is taken from the student's folder or, as nbgrader collects it, from one of its topic."""
    put(tmp_path, "ada/keys.ipynb", "bob/keys/keys.ipynb", "bob/keys/timestamp.txt", "bob/eviction.ipynb")
    assert graded(tmp_path) == [
        ("ada", "ada/keys.ipynb"),
        ("bob", "bob/eviction.ipynb"),
        ("bob", "bob/keys/keys.ipynb"),
    ]
    assert named(tmp_path) == {}


def test_checkpoints_and_hidden_files_are_passed_over(tmp_path):
    """What editors and systems leave behind is no submission."""
    put(
        tmp_path,
        ".DS_Store",
        "ada/keys.ipynb",
        "ada/.ipynb_checkpoints/keys.ipynb",
        "ada/._keys.ipynb",
        "ada/keys/.ipynb_checkpoints/keys-checkpoint.ipynb",
        ".git/config",
    )
    assert graded(tmp_path) == [("ada", "ada/keys.ipynb")]
    assert named(tmp_path) == {}


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), "the folder is empty"),
        ((".ipynb_checkpoints/keys.ipynb",), "the folder is empty"),
        (("keys.zip",), "cleo/keys.zip is not named after an assignment"),
        (("a/keys.ipynb", "keys.zip", "x"), "cleo/a/keys.ipynb lies neither at cleo/keys.ipynb nor at"),
    ],
)
def test_a_student_without_anything_to_grade_is_named_and_in_the_table(tmp_path, names, why):
    """Their folder is named, and the table has a row of no points that says why."""
    put(tmp_path, "ada/keys.ipynb", *(f"cleo/{name}" for name in names))
    (tmp_path / "cleo").mkdir(exist_ok=True)
    found = collect(tmp_path, SOURCES)
    assert named(tmp_path)["cleo"] == "holds nothing that can be graded"
    assert list(found.without) == ["cleo"]
    assert found.without["cleo"].startswith(f"nothing could be graded: {why}")
    assert found.without["cleo"].endswith("and 2 more that could not") == (len(names) == 3)
    row = grades_csv([], found.without).splitlines()[1]
    assert row.replace('"', "").startswith(f"cleo,,,0,0,,nothing could be graded: {why}")


def test_links_lead_nowhere(tmp_path):
    """A link is named and not followed: to a notebook, to a folder of one, to another student, to itself."""
    put(tmp_path, "ada/keys.ipynb", "elsewhere/keys.ipynb")
    (tmp_path / "ada" / "eviction.ipynb").symlink_to(tmp_path / "ada" / "keys.ipynb")
    (tmp_path / "ada" / "chunked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "ada" / "round").symlink_to(tmp_path / "ada")
    (tmp_path / "eve").symlink_to(tmp_path / "ada")
    assert graded(tmp_path) == [("ada", "ada/keys.ipynb"), ("elsewhere", "elsewhere/keys.ipynb")]
    ungraded = collect(tmp_path, SOURCES).ungraded
    found = [(each.path.relative_to(tmp_path).as_posix(), each.why) for each in ungraded]
    assert found == [
        ("ada/chunked", "is a link"),
        ("ada/eviction.ipynb", "is a link"),
        ("ada/round", "is a link"),
        ("eve", "is a link"),
        ("eve", "holds nothing that can be graded"),
    ]


def test_what_is_no_notebook_file_is_not_opened(tmp_path):
    """A pipe with a notebook's name would be read for ever, and a huge file fills the memory: both are named."""
    put(tmp_path, "ada/keys.ipynb")
    os.mkfifo(tmp_path / "ada" / "eviction.ipynb")
    with (tmp_path / "ada" / "chunked.ipynb").open("wb") as file:
        file.truncate(50_000_001)
    assert named(tmp_path) == {
        "ada/chunked.ipynb": "is larger than 50,000,000 bytes",
        "ada/eviction.ipynb": "is not a file",
    }


def test_a_closed_file_is_named(tmp_path, monkeypatch):
    """A notebook that the grader may not read costs its student the grade, and nobody else."""
    put(tmp_path, "ada/keys.ipynb", "bob/keys.ipynb")
    real = Path.open

    def closed(path, *others, **named):
        if path.parent.name == "bob":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *others, **named)

    monkeypatch.setattr(Path, "open", closed)
    assert graded(tmp_path) == [("ada", "ada/keys.ipynb")]
    assert collect(tmp_path, SOURCES).without == {
        "bob": "nothing could be graded: bob/keys.ipynb cannot be read: Permission denied"
    }


def test_names_are_made_printable(tmp_path):
    """A name of any bytes can be printed and stored, and writes nothing but itself on a terminal."""
    put(tmp_path, "ada/keys.ipynb", "ada/\x1b[2Jhidden\n")
    (tmp_path / os.fsdecode(b"b\xff")).mkdir()
    found = collect(tmp_path, SOURCES)
    shown = [str(each) for each in found.ungraded]
    assert shown[0].startswith(f"{tmp_path}/ada/?[2Jhidden? is not named")
    assert shown[1] == f"{tmp_path}/b? holds nothing that can be graded"
    assert grades_csv([], found.without).encode().endswith(b"the folder is empty,\n")


def test_a_deep_folder_is_searched_to_its_end(tmp_path):
    """Folders nested beyond Python's own depth are walked as any other."""
    put(tmp_path, "ada/keys.ipynb")
    here = tmp_path / "ada"
    for _ in range(1500):
        here /= "d"
        here.mkdir()
    (here / "notes").touch()
    try:
        ((name, why),) = named(tmp_path).items()
        assert name.count("/d") == 1500
        assert why.startswith("is not named after an assignment")
    finally:
        (here / "notes").unlink()
        while here.name == "d":  # what cleans up after tests would recurse
            here.rmdir()
            here = here.parent
