"""The traces the authors released, where they are kept upstream, and how to know them again."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

UPSTREAM: Final = "https://raw.githubusercontent.com/kvcache-ai/Mooncake"
"""The authors' public repository, as plain files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A released trace file, pinned to a commit of the authors' repository and to its content."""

    name: str
    label: str
    """What to call it in a sentence."""
    commit: str
    folder: str
    file_name: str
    sha256: str

    @property
    def url(self) -> str:
        """Where the file is published."""
        return f"{UPSTREAM}/{self.commit}/{self.folder}/{self.file_name}"

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
        "conversation": Release(
            name="conversation",
            label="conversation",
            commit="a2a4b18ac537fd798d50e6e9f57031ce86419a37",
            folder="FAST25-release/traces",
            file_name="conversation_trace.jsonl",
            sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        ),
        "synthetic": Release(
            name="synthetic",
            label="synthetic",
            commit="3cca71daccf2a7afb8fe3f0295358f70e3a69fdb",
            folder="FAST25-release/traces",
            file_name="synthetic_trace.jsonl",
            sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        ),
        # The next two digests were not computed here: they are those that several public projects pin.
        "toolagent": Release(
            name="toolagent",
            label="tool&agent",
            commit="3cca71daccf2a7afb8fe3f0295358f70e3a69fdb",
            folder="FAST25-release/traces",
            file_name="toolagent_trace.jsonl",
            sha256="48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
        ),
        "arxiv": Release(
            name="arxiv",
            label="arXiv",
            commit="dedfbde5daa3d5bc020adfd1d6e01c1d544f2098",
            folder="FAST25-release/arxiv-trace",
            file_name="mooncake_trace.jsonl",
            sha256="b434f1816a707f4bac697235588184ebc374c9907cb981bb65fb0643471fe711",
        ),
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
