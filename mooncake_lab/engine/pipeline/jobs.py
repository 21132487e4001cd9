"""What the processes of a crew are told to do, and what each of them answers: plain data that can be pickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.engine.loading import DTYPES

Tokens: TypeAlias = npt.NDArray[np.int64]
"""Token ids of a prompt."""
PromptTokens: TypeAlias = Sequence[int] | npt.NDArray[np.int32] | Tokens
"""Token ids as a caller may give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewSpec:
    """A crew of processes on this machine, each with the whole model, and a GPU of its own where there are enough.

    Raises:
        ValueError: when there is no process or no thread.
    """

    model: str = "random:lab-tiny"
    """As `engine.load_model` takes it."""
    processes: int = 2
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    backend: str = "auto"
    """Backend of the operators: auto, dense, cpu or cuda."""
    seed: int = 0
    threads: int = 1
    """Threads of each process."""
    timeout_s: float = 120.0
    """After which a prefill is given up."""

    def __post_init__(self) -> None:
        for name in ("processes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"CrewSpec.{name} is {getattr(self, name)!r}; at least 1 is needed")
        if not self.timeout_s > 0:
            raise ValueError(f"CrewSpec.timeout_s is {self.timeout_s!r}; more than 0 is needed")
        if self.dtype not in DTYPES:
            raise ValueError(f"CrewSpec.dtype is {self.dtype!r}; allowed are {', '.join(DTYPES)}")

    @property
    def nccl(self) -> bool:
        """Whether every process has a GPU of its own: then they talk over NCCL, else over gloo."""
        return self.device == "cuda" and torch.cuda.device_count() >= self.processes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CppJob:
    """Prefill in chunks through layers on several processes (Mooncake's chunked pipeline parallelism).

    Raises:
        ValueError: when chunks do not add up to the prompt.
    """

    tokens: Tokens
    sizes: tuple[int, ...]
    """Tokens of each chunk."""
    processes: int
    """How many take part: the first ones of the crew."""

    def __post_init__(self) -> None:
        if sum(self.sizes) != len(self.tokens) or min(self.sizes, default=0) < 1:
            raise ValueError(
                f"chunks of {self.sizes} tokens; they must be positive and add up to {len(self.tokens)}"
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunaheadJob:
    """Prefill in runs of tokens, a process each, KVCache handed down the chain (KV-Runahead).

    Raises:
        ValueError: when a run is empty, or the last does not end with the prompt.
    """

    tokens: Tokens
    bounds: tuple[int, ...]
    """Where each run ends."""

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise((0, *self.bounds)))
        if not rising or not self.bounds or self.bounds[-1] != len(self.tokens):
            raise ValueError(f"runs that end at {self.bounds}; they must rise and end at {len(self.tokens)}")

    @property
    def processes(self) -> int:
        """How many take part: the first ones of the crew."""
        return len(self.bounds)


Job: TypeAlias = CppJob | RunaheadJob


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process did for a while, on the clock that all processes of a machine share."""

    what: Literal["compute", "wait"]
    """Computing a piece, or waiting for its input."""
    piece: int
    """A chunk, or a layer."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Share:
    """What one process did of a prefill."""

    rank: int
    first_token: int | None
    """On the last process; None elsewhere."""
    first_layer: int
    kv: tuple[npt.NDArray[Any], ...]
    """Layers of which it holds all tokens: (2, tokens, kv_heads, head_width, bytes) each, as raw bytes."""
    sent_bytes: int
    received_bytes: int
    activities: tuple[Activity, ...]
