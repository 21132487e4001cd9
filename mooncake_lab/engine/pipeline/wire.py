"""Tensors from one process to the next: sent without waiting, asked for ahead of time, counted."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from mooncake_lab.engine.pipeline.jobs import Activity


@dataclass(slots=True)
class Wire:
    """One process's side of a chain. Mutable: it remembers what is on its way and how much there was.

    Where the processes talk over gloo, tensors of a GPU pass through host memory; NCCL takes them as they are.
    """

    rank: int
    device: torch.device
    dtype: torch.dtype
    timeout_s: float
    sent_bytes: int = 0
    received_bytes: int = 0
    activities: list[Activity] = field(default_factory=list[Activity])
    _leaving: list[tuple[Any, torch.Tensor]] = field(default_factory=list[tuple[Any, torch.Tensor]])

    @property
    def _medium(self) -> torch.device:
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def expect(self, shape: tuple[int, ...]) -> "Coming":
        """Ask the process before for its next tensor, and go on."""
        room = torch.empty(shape, dtype=self.dtype, device=self._medium)
        return Coming(dist.irecv(room, self.rank - 1), room)

    def receive(self, coming: "Coming", piece: int) -> torch.Tensor:
        """The tensor that was asked for, on this process's device; waits for it."""
        start_s = time.perf_counter()
        coming.request.wait(timedelta(seconds=self.timeout_s))
        self.note("wait", piece, start_s)
        self.received_bytes += coming.room.nbytes
        return coming.room.to(self.device)

    def send(self, tensor: torch.Tensor) -> None:
        """Give a tensor to the next process, and go on; it must not change any more."""
        kept = tensor.to(self._medium).contiguous()
        self.sent_bytes += kept.nbytes
        self._leaving.append((dist.isend(kept, self.rank + 1), kept))

    def flush(self) -> None:
        """Wait until everything has left."""
        for request, _ in self._leaving:
            request.wait(timedelta(seconds=self.timeout_s))
        self._leaving.clear()

    def note(self, what: Literal["compute", "wait"], piece: int, start_s: float) -> None:
        """Remember what was done since `start_s`."""
        if self.device.type == "cuda" and what == "compute":
            torch.cuda.synchronize(self.device)
        self.activities.append(Activity(what, piece, start_s, time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Coming:
    """A tensor that was asked for."""

    request: Any
    room: torch.Tensor
