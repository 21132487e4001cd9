"""The commit of this code, and those that the records in `data/measured` name: which are not part of the history.

    python -m mooncake_lab.bench.commits

A record names the commit of the code that made it. Where commits were moved onto others afterwards, the named one
is not an ancestor of the present one any more, although its changes are part of it. `moved_commits.csv` lists
these: the file, the commit that it names, the title of the commit that stands for it, and why.
"""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mooncake_lab.core import carried_folder


def commit(apart_from: Path | None = None) -> str | None:
    """The commit of the source that runs, with a + where files differ from it; None where it cannot be told.

    Args:
        apart_from: a file that may differ, such as the record that an earlier run has begun.
    """
    done = _git("describe", "--always", "--dirty=+", "--exclude=*")
    told = (done and done.stdout.strip()) or None
    if told is None or apart_from is None:
        return told
    changed = _git("diff", "HEAD", "--name-only", "--", ":/", f":(exclude){apart_from.resolve()}")
    is_clean = changed is not None and changed.returncode == 0 and not changed.stdout
    return told.removesuffix("+") if is_clean else told


def named_commits(folder: Path) -> dict[str, tuple[str, ...]]:
    """By file of a folder, the commits that its rows or objects name under `commit`, each once, without a `+`."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.iterdir()):
        named: Iterator[Any] = iter(())
        if path.suffix == ".csv":
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = csv.DictReader(line for line in lines if not line.startswith("#"))
            named = (row.get("commit") for row in rows)
        elif path.suffix == ".json":
            named = _values(json.loads(path.read_text(encoding="utf-8")))
        commits = dict.fromkeys(str(each).removesuffix("+") for each in named if each)
        if commits:
            found[path.name] = tuple(commits)
    return found


def _values(part: Any) -> Iterator[Any]:
    """All values of the key `commit` in JSON."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from (value,) if name == "commit" else _values(value)
    elif isinstance(part, list):
        for value in part:
            yield from _values(value)


MOVED: Final = "moved_commits.csv"


def moved(folder: Path) -> dict[tuple[str, str], str]:
    """By file and named commit: the title of the commit of the history that stands for one that was moved."""
    path = folder / MOVED
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {(row["file"], row["named"]): row["title"] for row in csv.DictReader(lines)}


def titles() -> frozenset[str]:
    """The first lines of the commits of the history; none without git."""
    done = _git("log", "--format=%s")
    return frozenset(done.stdout.splitlines() if done else ())


def is_whole() -> bool:
    """Whether the history is here, and not only its newest commits."""
    done = _git("rev-parse", "--is-shallow-repository")
    return done is not None and done.stdout.strip() == "false"


def is_ancestor(named: str) -> bool:
    """Whether a commit is part of the history of the present one; without git nothing is."""
    done = _git("merge-base", "--is-ancestor", named, "HEAD")
    return done is not None and done.returncode == 0


def _git(*words: str) -> subprocess.CompletedProcess[str] | None:
    """What git says in the folder of this source; None where there is no git."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # plain words


def main() -> None:
    """One line a file and commit."""
    folder = carried_folder("measured")
    stands = moved(folder)
    for name, commits in named_commits(folder).items():
        for named in commits:
            told = "an ancestor" if is_ancestor(named) else "not an ancestor of the present commit"
            for_it = f"; {stands[name, named]!r} stands for it" if (name, named) in stands else ""
            sys.stdout.write(f"{name}: {named} is {told}{for_it}\n")


if __name__ == "__main__":
    main()
