"""What the cluster believes about its instances after the last event from each, and the view for the Conductor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from mooncake_lab.cluster import events
from mooncake_lab.cluster.events import Attempt, Role
from mooncake_lab.conductor import ClusterView, DecodeView, History, Placement, PrefillView, ServedView
from mooncake_lab.core import BlockKey, CacheChanged, Request
from mooncake_lab.store import PrefixIndex


@dataclass(slots=True, eq=False)
class PrefillLoad:
    """Prompts that an instance has to compute, and KVCache that it sends. Mutable: its events change it."""

    name: str
    """Name of the instance."""
    assigned_requests: int = 0
    """Requests ever sent there to prefill."""
    prompts: dict[Attempt, set[tuple[str, ...]]] = field(default_factory=dict[Attempt, set[tuple[str, ...]]])
    """Prompts that are neither computed nor dropped, with what was reported of each."""
    reading: dict[Attempt, str] = field(default_factory=dict[Attempt, str])
    """Attempts whose prefix it reads from SSD, to send it to another instance."""
    sending: dict[Attempt, str] = field(default_factory=dict[Attempt, str])
    """Attempts whose KVCache it sends as fast as the network allows, with the instance that receives it."""
    arriving: dict[Attempt, str] = field(default_factory=dict[Attempt, str])
    """Attempts whose last byte is sent, and has not arrived."""
    _waiting_s: dict[Attempt, float] = field(default_factory=dict[Attempt, float])
    """Estimated time of each prompt that has not started."""
    _queued_s: float | None = 0.0
    """Sum of these times; None after a change."""
    _latest: Attempt | None = None
    """The prompt that started last."""
    _latest_until_s: float = 0.0
    """When it is estimated to end."""
    _plain_view: PrefillView | None = None
    """Cached view of an instance that computes, sends and matches nothing; None after a change of its queue."""

    def view(self, matched_blocks: int, now_s: float) -> PrefillView:
        """The instance as a place to prefill.

        The backlog of a pipelined group is counted as if its prompts did not overlap.
        """
        running_s = self._latest_until_s - now_s
        plain = running_s <= 0 and not matched_blocks and not self.sending
        if plain and self._plain_view is not None:
            return self._plain_view
        if self._queued_s is None:
            self._queued_s = math.fsum(self._waiting_s.values())  # exact: a rest of 1e-16 s would break a tie
        view = PrefillView(
            self.name,
            self._queued_s + running_s if running_s > 0 else self._queued_s,
            len(self.prompts),
            self.assigned_requests,
            matched_blocks,
            len(self.sending),
        )
        if plain:
            self._plain_view = view
        return view

    def add(self, attempt: Attempt, estimated_s: float) -> None:
        """A prompt is sent there."""
        self.prompts[attempt] = set()
        self.assigned_requests += 1
        self._waiting_s[attempt] = estimated_s
        self._queued_s = self._plain_view = None

    def is_news(self, attempt: Attempt, *report: str) -> bool:
        """Record a report about a prompt; False if the prompt is not there, or the report came before."""
        reports = self.prompts.get(attempt)
        if reports is None or report in reports:
            return False
        reports.add(report)
        return True

    def start(self, attempt: Attempt, at_s: float) -> bool:
        """The instance began to compute a prompt; False if that is no news."""
        estimated_s = self._waiting_s.pop(attempt, None)
        if estimated_s is None:
            return False
        self._queued_s = self._plain_view = None
        # prompts that are packed into one iteration start at one moment, and their times add up
        self._latest, self._latest_until_s = attempt, max(at_s, self._latest_until_s) + estimated_s
        return True

    def free_slot(self, at_s: float) -> None:
        """The instance can begin the next prompt."""
        self._latest, self._latest_until_s = None, at_s

    def remove(self, attempt: Attempt, at_s: float) -> bool:
        """A prompt is computed or dropped; False if that is no news."""
        if self.prompts.pop(attempt, None) is None:
            return False
        if self._waiting_s.pop(attempt, None) is not None:
            self._queued_s = None
        elif self._latest == attempt:
            self._latest, self._latest_until_s = None, at_s
        self._plain_view = None
        return True

    def read_tier(self, attempt: Attempt) -> bool:
        """The instance read blocks from its SSD, for its own prompt or to send them; False if that is no news."""
        destination = self.reading.pop(attempt, None)
        if destination is None:
            return self.is_news(attempt, "read")
        self.sending[attempt] = destination
        return True

    def sent(self, attempt: Attempt) -> None:
        """The last byte of a transfer is on its way: the next transfer does not share the network card with it."""
        destination = self.sending.pop(attempt, None)
        if destination is not None:
            self.arriving[attempt] = destination

    def end_sending(self, attempt: Attempt) -> bool:
        """A transfer has arrived, or is given up; False if that is no news."""
        if self.sending.pop(attempt, None) is not None:
            return True
        late = self.arriving or self.reading  # often neither, and every request comes by here
        return bool(late) and (self.arriving.pop(attempt, None) or self.reading.pop(attempt, None)) is not None

    def stop_sending_to(self, instance: str) -> None:
        """An instance that receives KVCache from this one is down."""
        for under_way in (self.reading, self.sending, self.arriving):
            for attempt in [attempt for attempt, destination in under_way.items() if destination == instance]:
                del under_way[attempt]


@dataclass(slots=True, eq=False)
class DecodeLoad:
    """Requests that decode at an instance, or will. Mutable: events of the instance change it."""

    name: str
    """Name of the instance."""
    capacity_tokens: int
    """KVCache that fits into its GPU memory."""
    stepped_until_s: float
    """When its last decode step ended, or it came up."""
    contexts: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens of each request that decodes there or is on its way; see `tokens_of`."""
    batch_steps: int = 0
    """Steps that all requests in the batch took together; `contexts` leaves them out, so that a step costs the
    same for any batch."""
    missing: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens that are not in GPU memory, of requests that were preempted or resumed there."""
    context_tokens: int = 0
    """KVCache tokens of all requests."""
    coming: dict[int, ServedView] = field(default_factory=dict[int, ServedView])
    """Requests on their way there to decode, up to the second check."""
    present: dict[int, ServedView] = field(default_factory=dict[int, ServedView])
    """Requests that passed the second check; the KVCache of some is still being loaded into GPU memory."""
    started: set[int] = field(default_factory=set[int])
    """Requests in the batch, or taken out of it for want of memory."""
    latest_view: DecodeView | None = None
    """Cached view; None after a change."""

    def view(self) -> DecodeView:
        """The instance as a place to decode."""
        if self.latest_view is None:
            self.latest_view = DecodeView(
                self.name,
                len(self.contexts),
                self.context_tokens,
                self.capacity_tokens,
                tuple(self.present.values()),
                tuple(self.coming.values()),
            )
        return self.latest_view

    def expect(self, request: Request, starts_s: float) -> None:
        """A request will decode there."""
        self.coming[request.id] = ServedView(request.id, request.input_tokens, starts_s)
        self.contexts[request.id] = request.input_tokens
        self.context_tokens += request.input_tokens
        self.latest_view = None

    def join(self, request_id: int, at_s: float) -> None:
        """A request passed the second check, or its KVCache is in GPU memory: it counts as decoding from now."""
        served = self.coming.pop(request_id, None) or self.present[request_id]
        self.present[request_id] = ServedView(request_id, served.input_tokens, at_s)
        self.latest_view = None

    def start(self, request_id: int) -> None:
        """A request that joined is in the batch."""
        if request_id not in self.started:
            self.started.add(request_id)
            self.contexts[request_id] -= self.batch_steps

    def tokens_of(self, request_id: int) -> int:
        """Tokens of a request that decodes there or is on its way: its prompt and what was shown of its answer."""
        return self.contexts[request_id] + (self.batch_steps if request_id in self.started else 0)

    def step(self, request_ids: Sequence[int], steps: int, until_s: float) -> None:
        """Add tokens to each of these requests, all of them in the batch."""
        if len(request_ids) == len(self.started):
            self.batch_steps += steps
        else:
            for request_id in request_ids:
                self.contexts[request_id] += steps
        self.context_tokens += steps * len(request_ids)
        self.stepped_until_s = until_s
        self.latest_view = None

    def hold(self, request_id: int, tokens: int) -> None:
        """Set how many tokens of a request's prompt and answer are in GPU memory."""
        missing = self.tokens_of(request_id) - tokens
        if not missing and not self.missing:
            return
        self.context_tokens += self.missing.pop(request_id, 0) - missing
        if missing:
            self.missing[request_id] = missing
        self.latest_view = None

    def release(self, request_id: int) -> None:
        """A request does not decode there any more, or will not."""
        if request_id in self.contexts:
            self.context_tokens -= self.tokens_of(request_id) - self.missing.pop(request_id, 0)
            del self.contexts[request_id]
        self.coming.pop(request_id, None)
        self.present.pop(request_id, None)
        self.started.discard(request_id)
        self.latest_view = None


@dataclass(slots=True, eq=False)
class InstanceState:
    """One instance: what it does, its load, and whether it is up. Mutable: events of the instance change it."""

    name: str
    role: Role
    cache: str | None
    """The cache in which it finds prefixes; None if it keeps none."""
    up_s: float
    """When it came up."""
    prefill: PrefillLoad
    """Empty at an instance that only decodes."""
    decode: DecodeLoad
    """Empty at an instance that only prefills."""
    up: bool = True
    _iteration_s: float = 0.0
    _of_iteration: set[events.ChunkDone | events.Preempted] = field(
        default_factory=set[events.ChunkDone | events.Preempted]
    )

    def is_news(self, event: events.ChunkDone | events.Preempted) -> bool:
        """Whether an event was not reported before; those of later iterations are reported later."""
        if event.at_s > self._iteration_s:
            self._iteration_s = event.at_s
            self._of_iteration.clear()
        elif event.at_s < self._iteration_s or event in self._of_iteration:
            return False
        self._of_iteration.add(event)
        return True


@final
class InstanceTable:
    """The instances by name, and the index of their caches. Mutable: it changes with every event.

    Args:
        view_age_s: how old the loads in a view may be. The first decision after they became too old takes new
            ones; until then all decisions read the same, as on the bulletin board of Mitzenmacher, *How Useful Is
            Old Information?* (2000). Prefix matches and failures are never old: the index is the Conductor's own,
            and a broken connection is noticed at once.
    """

    def __init__(self, view_age_s: float) -> None:
        self.index = PrefixIndex()
        self.by_name: dict[str, InstanceState] = {}
        """Instances that are up, and those that are down and were not replaced."""
        self._view_age_s = view_age_s
        self._old_view: ClusterView | None = None
        self._on_ssd: dict[str, set[BlockKey]] = {}  # by cache: blocks that are not in DRAM
        self._on_gpu: dict[str, int] = {}  # caches in the GPU memory of coupled instances, with their place
        self._has_caches = False
        self._prefill: list[tuple[InstanceState, int]] = []  # with the place of its cache among matches
        self._decode: list[DecodeLoad] = []

    def cached(self, cache: str) -> set[BlockKey]:
        """The blocks in a cache."""
        return self.index.held_by(cache) if cache in self.index else set()

    def on_ssd(self, cache: str) -> set[BlockKey]:
        """The blocks in a cache that are not in DRAM."""
        return self._on_ssd.get(cache, set())

    @property
    def up(self) -> list[InstanceState]:
        """The instances that are up, in the order in which their names first came up."""
        return [instance for instance in self.by_name.values() if instance.up]

    @property
    def can_serve(self) -> bool:
        """Whether some instance can prefill and some can decode."""
        return bool(self._prefill and self._decode)

    def add(self, event: events.InstanceUp) -> None:
        """An instance is up, with nothing to do; under the name of one that is down it replaces that one."""
        name, same = (
            event.instance,
            [each.prefill.assigned_requests for each in self.up if each.role == event.role],
        )
        prefill = PrefillLoad(name, assigned_requests=min(same, default=0))  # round robin goes on
        decode = DecodeLoad(name, event.capacity_tokens, event.at_s)
        self.by_name[name] = InstanceState(name, event.role, event.cache, event.at_s, prefill, decode)
        if event.cache is not None and event.cache not in self.index:
            self.index.join(event.cache)
        self._arrange()

    def remove(self, name: str) -> InstanceState | None:
        """An instance is down; it as it was, or None where that is no news."""
        instance = self.by_name.get(name)
        if instance is None or not instance.up:
            return None
        instance.up = False
        cache, up = instance.cache, self.up
        if cache is not None and all(each.cache != cache for each in up):
            self._on_ssd.pop(cache, None)
            self.index.drop(cache)
        for each in up:
            each.prefill.stop_sending_to(name)
        self._arrange()
        return instance

    def _arrange(self) -> None:
        self._old_view = None
        places = {cache: place for place, cache in enumerate(self.index.instances)}
        self._has_caches = bool(places)
        up = self.up
        coupled = [instance.cache for instance in up if instance.role == "coupled" and instance.cache is not None]
        self._on_gpu = {cache: places[cache] for cache in coupled}
        self._prefill = [(each, places.get(each.cache or "", -1)) for each in up if each.role != "decode"]
        self._decode = [each.decode for each in up if each.role != "prefill"]

    def free_slot(self, event: events.PrefillSlotFree) -> None:
        """A pipelined group can begin the next prompt."""
        instance = self.by_name.get(event.instance)
        if instance is not None:
            instance.prefill.free_slot(event.at_s)

    def begin_fetch(self, attempt: Attempt, request: Request, placement: Placement) -> None:
        """A prefill instance fetches a prefix: its holder reads what of it is on SSD, and sends it."""
        source, size = self.by_name[str(placement.fetch_from)], request.block_size_tokens
        first = (placement.reused_tokens - placement.fetched_tokens) // size
        keys = request.block_keys[first : -(-placement.reused_tokens // size)]
        begun = source.prefill.reading if self._blocks_on_ssd(source, keys) else source.prefill.sending
        begun[attempt] = placement.prefill

    def cache_changed(self, event: CacheChanged) -> bool:
        """Blocks came to a cache, left it, or moved between its tiers; whether that is logged.

        Moves are not, and nothing is where no instance has that cache, or where it is in GPU memory: blocks stay
        there only while no request needs the room. What the pool holds counts as held by every instance.
        """
        if event.instance == events.SHARED_STORE and events.SHARED_STORE not in self.index:
            self.index.join(events.SHARED_STORE, shared=True)
            self._arrange()
        if event.instance not in self.index:
            return False
        self.index.update(event.instance, event.added, event.removed)
        if event.demoted or event.instance in self._on_ssd:
            on_ssd = self._on_ssd.setdefault(event.instance, set())
            on_ssd.difference_update(event.removed, event.promoted)
            on_ssd.update(event.demoted)
        return bool(event.added or event.removed) and event.instance not in self._on_gpu

    def _blocks_on_ssd(self, instance: InstanceState, keys: tuple[BlockKey, ...]) -> int:
        on_ssd = self._on_ssd.get(instance.cache or "")
        return sum(key in on_ssd for key in keys) if on_ssd else 0

    def _matches(self, request: Request) -> list[int]:
        """Leading blocks of a prompt in each cache, and the 0 of instances that have none.

        A request reuses whole blocks of a cache in GPU memory, and computes at least its last token.
        """
        if not self._has_caches:
            return [0]
        found = [*self.index.matches(request.block_keys), 0]
        if self._on_gpu:
            most = (request.input_tokens - 1) // request.block_size_tokens
            for place in self._on_gpu.values():
                found[place] = min(found[place], most)
        return found

    def matched_blocks(self, name: str, request: Request) -> int:
        """Leading blocks of a prompt that a prefill instance, or the pool, holds."""
        matches = self._matches(request)
        return next((matches[place] for instance, place in self._prefill if instance.name == name), 0)

    def view(self, request: Request, now_s: float, history: History) -> ClusterView:
        """What the Conductor may know about a request now; instances are in the order of `up`."""
        matches = self._matches(request)
        view = self._old_view
        if view is None or now_s - view.taken_at_s > self._view_age_s:
            prefill = tuple([instance.prefill.view(matches[place], now_s) for instance, place in self._prefill])
            decode = tuple([load.latest_view or load.view() for load in self._decode])
            lengths = history.lengths if history.learns_lengths else None
            view = ClusterView(now_s, prefill, decode, lengths, history.recent(now_s))
            if self._view_age_s:
                self._old_view = view
        else:
            pairs = zip(view.prefill, self._prefill, strict=True)
            view = view.replace(prefill=tuple([old.replace(matched_blocks=matches[at]) for old, (_, at) in pairs]))
        if self._on_ssd:
            pairs = zip(view.prefill, self._prefill, strict=True)
            view = view.replace(prefill=tuple([self._with_tiers(each, at, request) for each, (at, _) in pairs]))
        return view

    def _with_tiers(self, view: PrefillView, instance: InstanceState, request: Request) -> PrefillView:
        keys = request.block_keys[: view.matched_blocks]
        if not (below := self._blocks_on_ssd(instance, keys)):
            return view
        on_ssd = self._on_ssd[str(instance.cache)]
        in_dram = next(i for i, key in enumerate(keys) if key in on_ssd)
        return view.replace(matched_on_ssd=below, matched_in_dram=in_dram)
