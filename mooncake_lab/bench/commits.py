"""The commit of this code, and those that the records in `data/measured` name: which are not part of the history.

    python -m mooncake_lab.bench.commits

A record names the commit of the code that made it. Where commits were moved onto others afterwards, the named one
is not an ancestor of the present one any more, although its changes are part of it.
"""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mooncake_lab.core import carried_folder


def commit() -> str | None:
    """The commit of the source that runs, with a + where files differ from it; None where it cannot be told."""
    done = _git("describe", "--always", "--dirty=+", "--exclude=*")
    return (done and done.stdout.strip()) or None


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
    for name, commits in named_commits(carried_folder("measured")).items():
        for named in commits:
            told = "an ancestor" if is_ancestor(named) else "not an ancestor of the present commit"
            sys.stdout.write(f"{name}: {named} is {told}\n")


if __name__ == "__main__":
    main()
