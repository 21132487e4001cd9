"""What the coordinator asks of a runtime. Commands are carried out first in, first out, before the next event."""

from typing import TypeAlias

import msgspec

from mooncake_lab.cluster.events import Attempt
from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Report `TimerFired` of a request after `delay_s` seconds."""

    request_id: int
    delay_s: float


class RunPrefill(msgspec.Struct, frozen=True, gc=False):
    """Fetch the prefix, compute the prompt, and send its KVCache to the decode worker, as the placement says.

    A coupled worker decodes the request itself.
    """

    attempt: Attempt
    request: Request
    placement: Placement


class PrepareDecode(msgspec.Struct, frozen=True, gc=False):
    """A request's KVCache will come to a decode worker."""

    attempt: Attempt
    worker: str
    request: Request


class StartDecode(msgspec.Struct, frozen=True, gc=False):
    """Load a request's KVCache into GPU memory and decode it."""

    attempt: Attempt
    worker: str
    shown_tokens: int
    """Tokens that its client has."""
    shows_computed: bool
    """Whether the token that its prefill computed is still to be shown."""


class CancelAttempt(msgspec.Struct, frozen=True, gc=False):
    """Stop an attempt at the next iteration boundary, and release what it reserved; twice is as once."""

    attempt: Attempt
    worker: str


class ConfirmWorkers(msgspec.Struct, frozen=True, gc=False):
    """Report `WorkerConfirmed` or `WorkerDown` of each of these workers."""

    workers: tuple[str, ...]


class Reject(msgspec.Struct, frozen=True, gc=False):
    """Tell a client that its request is not served, or no longer."""

    request_id: int
    stage: str
    reason: str


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Tell a client that it has all tokens of its answer."""

    request_id: int


Command: TypeAlias = (
    SetTimer | RunPrefill | PrepareDecode | StartDecode | CancelAttempt | ConfirmWorkers | Reject | Finish
)
"""Anything that the coordinator asks."""
