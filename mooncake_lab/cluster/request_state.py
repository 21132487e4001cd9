"""Where a request is in its life, as the coordinator knows it."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from mooncake_lab.cluster.events import Attempt
from mooncake_lab.cluster.worker_state import WorkerState
from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request

Phase: TypeAlias = Literal[
    "deciding",
    "waiting",
    "unconfirmed",
    "queued",
    "prefilling",
    "moving",
    "loading",
    "joining",
    "decoding",
]
"""Where a request in flight is.

- deciding: it arrived, and the Conductor has not decided yet;
- waiting: no worker can serve it; it is placed when one comes up;
- unconfirmed: an attempt failed; it is placed again when it is known which workers are up;
- queued: it is placed, and its prompt waits at the prefill worker;
- prefilling: its prompt is being computed;
- moving: its KVCache is on the way to the decode worker;
- loading: its KVCache is in the host memory of the decode worker;
- joining: its KVCache is in GPU memory, and it waits for a place in the batch;
- decoding: it is in the batch.
"""

_UNPLACED: Final = Attempt(-1, 0)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight. Mutable: the coordinator follows it."""

    request: Request
    """Its prompt is extended by the tokens that a failed attempt has shown."""
    phase: Phase = "deciding"
    attempt: Attempt = _UNPLACED
    """The current one, or the last."""
    placement: Placement | None = None
    """The placement of the current attempt; None before it is placed."""
    prefill: WorkerState | None = None
    decode: WorkerState | None = None
    """The same worker as `prefill` where that is a coupled one."""
    shown_tokens: int = 0
    """Tokens that its client had when the current attempt began to decode, with the one that prefill computed."""
    prompt_shown_tokens: int = 0
    """Those of them that a failure made part of the prompt."""
    prefix_fetched: bool = False
    """Whether the prefix has come from another worker, which may go down now."""
    why: str = ""
    """What stands before the reason of its next placement in the log."""
    suspects: frozenset[str] = frozenset()
    """Workers that have to be confirmed before it is placed again."""

    @property
    def resumes(self) -> bool:
        """Whether it decoded in an earlier attempt, so that its prefill computes the token after those shown."""
        return self.prompt_shown_tokens > 0

    def needs(self, worker: str) -> bool:
        """Whether a request on its way to decode needs this worker: to fetch from, to prefill or to decode."""
        if self.placement is None or self.prefill is None or self.decode is None:
            return False
        if worker == self.placement.fetch_from and not self.prefix_fetched:
            return True
        return worker in (self.prefill.name, self.decode.name)
