"""What a receiving worker knows of a connection: whose KVCache is arriving over it, and how far it has come."""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mooncake_lab.cluster import PrefillDone
from mooncake_lab.engine import KVSpan
from mooncake_lab.engine.kv_layout import Bytes
from mooncake_lab.serving.lane import Region
from mooncake_lab.serving.messages import Job
from mooncake_lab.serving.parcels import Pushed
from mooncake_lab.store.backends import ProtocolError


class Move(NamedTuple):
    """Bytes that arrived, from the first of them to the last."""

    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A request's KVCache, complete."""

    job: Job
    kv: KVSpan
    first_token: int
    moves: tuple[Move, ...]
    prefilled: PrefillDone


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A request whose KVCache is arriving. Mutable: it fills up."""

    tokens: int
    layers: tuple[torch.Tensor, ...]
    covered: list[int]
    """Tokens of each layer that are here, from the front."""
    moves: list[Move] = field(default_factory=list[Move])


@dataclass(slots=True, kw_only=True, eq=False)
class Talk:
    """One connection. Mutable: requests come in over it."""

    peer: socket.socket
    lent: contextlib.ExitStack
    """Gives memory back when the connection ends."""
    coming: dict[Job, Incoming] = field(default_factory=dict[Job, Incoming])
    window: Region | None = None
    """Where a Transfer Engine may write."""

    def take_pushed(self, parts: Sequence[Bytes], pushed: Pushed) -> float:
        """Copy what such an engine has written; when it began to (s)."""
        if self.window is None or not 0 <= pushed.start_s <= time.monotonic():
            raise ProtocolError("bytes are said to be pushed, but no window is lent, or before they were")
        self.window.copy_to(parts, pushed)
        return pushed.start_s
