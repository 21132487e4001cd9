"""What the cluster believes about its workers, from what they said: the source of the Conductor's views.

Belief is not truth: an event takes a moment to arrive, a cache may have evicted what was announced.
"""

import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import final

from mooncake_lab.conductor import ClusterView, DecodeView, PrefillView, ServedView
from mooncake_lab.conductor.history import History
from mooncake_lab.core import Request
from mooncake_lab.serving.messages import Holds, Job
from mooncake_lab.serving.spec import Role
from mooncake_lab.store.index import Membership, PrefixIndex


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """What one worker has to do, as the cluster believes. Mutable: it is a running account."""

    name: str
    role: Role
    capacity_tokens: int
    membership: Membership | None
    assigned_requests: int = 0
    prompts: OrderedDict[Job, float] = field(default_factory=OrderedDict[Job, float])
    """Prompts sent there and not yet computed, with the seconds each is believed to take, first come first."""
    first_since_s: float = 0.0
    """Since when the first of them is believed to run."""
    contexts: dict[Job, int] = field(default_factory=dict[Job, int])
    """KVCache tokens of each request that decodes there or is on its way."""
    context_tokens: int = 0
    coming: dict[Job, ServedView] = field(default_factory=dict[Job, ServedView])
    decoding: dict[Job, ServedView] = field(default_factory=dict[Job, ServedView])
    sending: set[Job] = field(default_factory=set[Job])
    """Attempts for which it sends prefix blocks to another worker."""

    def backlog_s(self, now_s: float) -> float:
        """Seconds of computation queued or running there."""
        if not self.prompts:
            return 0.0
        first_s = next(iter(self.prompts.values()))
        return math.fsum(self.prompts.values()) - min(first_s, now_s - self.first_since_s)

    def add_prompt(self, job: Job, believed_s: float) -> None:
        """A prompt is sent there."""
        if not self.prompts:
            self.first_since_s = time.monotonic()
        self.prompts[job] = believed_s
        self.assigned_requests += 1

    def drop_prompt(self, job: Job) -> None:
        """A prompt is computed, or given up."""
        was_first = next(iter(self.prompts), None) == job
        self.prompts.pop(job, None)
        if was_first:
            self.first_since_s = time.monotonic()

    def expect(self, job: Job, tokens: int, served: ServedView) -> None:
        """A request will decode there."""
        self.coming[job] = served
        self.add_context(job, tokens)

    def arrive(self, job: Job, at_s: float) -> None:
        """A request's KVCache is there, and decodes from now on."""
        if job in self.coming:
            self.decoding[job] = self.coming.pop(job)._replace(starts_s=at_s)

    def add_context(self, job: Job, tokens: int) -> None:
        """A request has so many tokens more."""
        self.contexts[job] = self.contexts.get(job, 0) + tokens
        self.context_tokens += tokens

    def drop_context(self, job: Job) -> None:
        """A request decodes there no longer."""
        self.context_tokens -= self.contexts.pop(job, 0)
        self.coming.pop(job, None)
        self.decoding.pop(job, None)

    def decode_view(self, *, without: Job | None = None) -> DecodeView:
        """What the Conductor may know of it as a place to decode, one request left out if need be."""
        return DecodeView(
            self.name,
            len(self.contexts) - (without in self.contexts),
            self.context_tokens - (0 if without is None else self.contexts.get(without, 0)),
            self.capacity_tokens,
            tuple(self.decoding.values()),
            tuple(served for job, served in self.coming.items() if job != without),
        )


@final
class Books:
    """The accounts of all living workers, and the index of their blocks. Mutable: it is what is believed now."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self.accounts: dict[str, Account] = {}
        self.damaged_blocks: dict[str, int] = {}
        """Blocks that each worker has found damaged in its store, under one name those of all its processes."""

    def open(self, name: str, role: Role, capacity_tokens: int) -> None:
        """A worker was born."""
        membership = None if role == "decode" else self._index.join(name)
        self.accounts[name] = Account(name=name, role=role, capacity_tokens=capacity_tokens, membership=membership)

    def close(self, name: str) -> None:
        """A worker died, and its cache with it."""
        account = self.accounts.pop(name)
        if account.membership is not None:
            self._index.drop(name)

    def note(self, name: str, holds: Holds) -> None:
        """What came into a worker's cache and what left it."""
        self.damaged_blocks[name] = self.damaged_blocks.get(name, 0) + holds.damaged_blocks
        membership = self.accounts[name].membership
        if membership is not None:
            self._index.update(membership, holds.added, holds.removed)

    @property
    def can_serve(self) -> bool:
        """Whether some worker can prefill and some can decode."""
        roles = {account.role for account in self.accounts.values()}
        return "coupled" in roles or {"prefill", "decode"} <= roles

    def view(self, request: Request, now_s: float, zero_s: float, learned: History) -> ClusterView:
        """What the Conductor may know about a request now, in the order of the workers' names."""
        held = dict(zip(self._index.instances, self._index.matches(request.block_keys), strict=True))
        ordered = [self.accounts[name] for name in sorted(self.accounts, key=_rank)]
        prefill = tuple(
            PrefillView(
                name=account.name,
                backlog_s=account.backlog_s(now_s),
                queued_requests=len(account.prompts),
                assigned_requests=account.assigned_requests,
                matched_blocks=held[account.name],
                outgoing_flows=len(account.sending),
            )
            for account in ordered
            if account.role != "decode"
        )
        decode = tuple(account.decode_view() for account in ordered if account.role != "prefill")
        return ClusterView(now_s - zero_s, prefill, decode, learned.lengths, learned.recent(now_s - zero_s))


def _rank(name: str) -> tuple[str, int]:
    role, _, number = name.partition("-")
    return role, int(number)
