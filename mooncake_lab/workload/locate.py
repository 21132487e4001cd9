"""Where a released trace may lie on this machine."""

import os
from pathlib import Path
from typing import Final

import platformdirs

from mooncake_lab.workload.releases import release_of

DATA_VARIABLE: Final = "MOONCAKE_LAB_DATA"
"""Environment variable: a folder with released trace files, searched first."""


def cache_folder() -> Path:
    """Where fetched traces are kept for this user."""
    return platformdirs.user_cache_path("mooncake-lab") / "traces"


def search_folders() -> tuple[Path, ...]:
    """The folders searched for traces, in order: `MOONCAKE_LAB_DATA`, the checkout's data/traces, the cache."""
    folders: list[Path] = []
    if setting := os.environ.get(DATA_VARIABLE):
        folders.append(Path(setting))
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():  # an installed package has no checkout around it
        folders.append(checkout / "data" / "traces")
    return (*folders, cache_folder())


def find_trace(name: str) -> Path | None:
    """The released file of a workload on this machine, or None; its content is not looked at.

    Raises:
        ValueError: when there is no such workload.
    """
    file_name = release_of(name).file_name
    candidates = (folder / file_name for folder in search_folders())
    return next((path for path in candidates if path.is_file()), None)
