"""The traces that the authors released: published, found on this machine, fetched, and loaded, or their twins."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mooncake_lab.core.extras import naming_extra
from mooncake_lab.workload.reader import TraceError, read_trace
from mooncake_lab.workload.trace import Trace

UPSTREAM: Final = "https://raw.githubusercontent.com/kvcache-ai/Mooncake"
"""The authors' public repository, as plain files."""

UPSTREAM_VARIABLE: Final = "MOONCAKE_LAB_UPSTREAM"
"""Environment variable: another address of these files, such as a mirror; fingerprints are checked as well."""


@dataclass(frozen=True, slots=True)
class Release:
    """A released trace file, pinned to a commit of the authors' repository and to its content."""

    name: str
    label: str
    """What to call it in a sentence."""
    path: str
    """The commit, and the file there."""
    sha256: str

    @property
    def url(self) -> str:
        """Where the file is published, or a mirror that `MOONCAKE_LAB_UPSTREAM` names."""
        return f"{os.environ.get(UPSTREAM_VARIABLE) or UPSTREAM}/{self.path}"

    @property
    def file_name(self) -> str:
        """What the file is called."""
        return self.path.rpartition("/")[2]

    def check(self, path: Path) -> None:
        """Check that a file is this release, byte for byte.

        Raises:
            ValueError: when its SHA-256 is another.
        """
        found = file_sha256(path)
        if found != self.sha256:
            raise ValueError(
                f"{path} has the SHA-256 {found}; the released {self.label} trace has {self.sha256}:"
                " remove the file and fetch it again, or read it as your own with read_trace"
            )


RELEASES: Final[Mapping[str, Release]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Release(
                "conversation",
                "conversation",
                "a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces/conversation_trace.jsonl",
                "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            ),
            Release(
                "synthetic",
                "synthetic",
                "3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces/synthetic_trace.jsonl",
                "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
            ),
            # The next two digests were not computed here: they are those that several public projects pin.
            Release(
                "toolagent",
                "tool&agent",
                "3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces/toolagent_trace.jsonl",
                "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
            ),
            Release(
                "arxiv",
                "arXiv",
                "dedfbde5daa3d5bc020adfd1d6e01c1d544f2098/FAST25-release/arxiv-trace/mooncake_trace.jsonl",
                "b434f1816a707f4bac697235588184ebc374c9907cb981bb65fb0643471fe711",
            ),
        )
    }
)
"""By workload name: conversation, synthetic and toolagent of FAST'25, and the one trace of arXiv v3."""

WORKLOADS: Final = tuple(RELEASES)
"""The names that `load`, `fetch_trace` and `make_twin` know."""


def release_of(name: str) -> Release:
    """The release with this name.

    Raises:
        ValueError: when the name is unknown.
    """
    if name not in RELEASES:
        raise ValueError(f"unknown workload {name!r}; allowed are {', '.join(RELEASES)}")
    return RELEASES[name]


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


DATA_VARIABLE: Final = "MOONCAKE_LAB_DATA"
"""Environment variable: a folder with released trace files, searched first."""


def cache_folder() -> Path:
    """Where fetched traces are kept for this user."""
    import platformdirs  # neither the page of the playground nor a rented GPU machine has it

    return platformdirs.user_cache_path("mooncake-lab") / "traces"


def search_folders() -> tuple[Path, ...]:
    """The folders searched for traces, in order: `MOONCAKE_LAB_DATA`, the checkout's data/traces, the cache.

    Raises:
        ValueError: when the variable names no folder: twins would be used without a word.
    """
    folders: list[Path] = []
    if setting := os.environ.get(DATA_VARIABLE):
        folders.append(Path(setting))
        if not folders[0].is_dir():
            raise ValueError(f"{DATA_VARIABLE} names {setting}, which is no folder; name one, or unset it")
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


def fetch_trace(name: str, *, folder: Path | None = None, url: str | None = None, force: bool = False) -> Path:
    """Fetch a released trace, check its SHA-256, and return its path; a file already there is only checked.

    Args:
        name: a workload name.
        folder: where to put it; the user's cache by default.
        url: another address of the same file, such as a mirror.
        force: replace a file of that name that is not the released one.

    Raises:
        ConnectionError: when the file cannot be fetched; nothing is left behind.
        ValueError: when the workload is unknown, the address is not http:// or https://, or the content is not the
            released one; such content is not kept.
        OSError: when the folder cannot be made.
    """
    release = release_of(name)
    folder = cache_folder() if folder is None else folder
    path = folder / release.file_name
    if path.exists() and not force:
        release.check(path)
        return path
    fetch_release(release, folder, url or release.url, progress=sys.stderr.isatty())
    return path


def fetch_release(release: Release, folder: Path, address: str, *, progress: bool = False) -> None:
    """Fetch a file into a folder; one of its name is replaced, and only by the released one.

    Args:
        release: what it has to be.
        folder: where to put it.
        address: where to fetch it from.
        progress: whether to draw a bar.

    Raises:
        ConnectionError: when the file cannot be fetched; nothing is left behind.
        ValueError: when the address is not http:// or https://, or the content is not the released one.
        OSError: when the folder cannot be made or the file not be written.
    """
    from mooncake_lab.core.download import WrongContentError, download  # the playground's page has no sockets

    path = folder / release.file_name
    if path.is_file() and file_sha256(path) == release.sha256:
        return
    try:
        download(address, path, release.sha256, progress=progress)
    except WrongContentError as error:
        raise ValueError(
            f"what {address} sent is not the released {release.label} trace and was not kept ({error});"
            " try again, or name another address of the same file"
        ) from error
    except ConnectionError as error:
        raise ConnectionError(
            f"could not fetch {address} ({error}); connect to the internet, or put the file"
            f" {release.file_name} in a folder named by MOONCAKE_LAB_DATA"
        ) from error


def load(name: str, *, seed: int = 0) -> Trace:
    """The released trace if the search order finds it, else the twin; `origin` and `source` say which.

    Raises:
        ValueError: when the workload is unknown, or a file of its name is not the released one.
        OSError: when the file cannot be read.
    """
    release = release_of(name)
    path = find_trace(name)
    if path is None:
        with naming_extra("stats"):
            from mooncake_lab.workload.twin import make_twin  # here, because twins are drawn with numpy

        return make_twin(name, seed=seed)
    release.check(path)
    return read_trace(path).replaced(name=name, origin="released", source=f"released {release.label} trace")


def load_or_read(name: str, *, seed: int = 0, block_size_tokens: int | None = None) -> Trace:
    """`load` for the name of a workload; for the path of any other trace, that file.

    Args:
        name: a workload or a path.
        seed: of a twin.
        block_size_tokens: tokens per block of a file that does not say so.

    Raises:
        ValueError: when it is neither, the file is not a trace, or it has no block ids.
        OSError: when the file cannot be read.
    """
    check_workload(name)
    if name in RELEASES:
        return load(name, seed=seed)
    trace = read_trace(Path(name), block_size_tokens=block_size_tokens)
    if trace.ids == "none":
        raise TraceError(f"{name} has no block ids, so nothing can be said of caches and placement by them")
    return trace


def check_workload(name: str) -> None:
    """Check that `load_or_read` has something to read.

    Raises:
        ValueError: when the name is neither that of a workload nor the path of a file.
    """
    if name not in RELEASES and not Path(name).is_file():
        raise ValueError(f"{name!r} is neither a file nor a workload: {', '.join(RELEASES)}")
