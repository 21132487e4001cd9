"""All workers of a cluster as it knows them, and the view of them that the Conductor decides on."""

from typing import final

from mooncake_lab.cluster.events import Attempt, TierChanged, WorkerUp
from mooncake_lab.cluster.worker_state import WorkerState
from mooncake_lab.conductor import ClusterView, History, Placement
from mooncake_lab.core import BlockKey, CacheChanged, Request
from mooncake_lab.store import Membership, PrefixIndex


@final
class WorkerTable:
    """The workers by name, and the index of their caches. Mutable: it changes with every event.

    Args:
        view_age_s: how old the loads in a view may be. The first decision after they became too old takes new
            ones; until then all decisions read the same, as on the bulletin board of Mitzenmacher, *How Useful Is
            Old Information?* (2000). Prefix matches and failures are never old: the index is the Conductor's own,
            and a broken connection is noticed at once.
    """

    def __init__(self, view_age_s: float = 0.0) -> None:
        self.index = PrefixIndex()
        self._workers: dict[str, WorkerState] = {}
        self._view_age_s = view_age_s
        self._old_view: ClusterView | None = None
        self._members: dict[str, Membership] = {}
        self._on_ssd: dict[str, set[BlockKey]] = {}  # by cache: blocks that are not in DRAM
        self._on_gpu: dict[str, int] = {}  # caches in the GPU memory of coupled workers, with their place
        self._prefill: list[tuple[WorkerState, int]] = []  # with the place of its cache among matches
        self._decode: list[WorkerState] = []

    def __getitem__(self, name: str) -> WorkerState:
        return self._workers[name]

    def get(self, name: str) -> WorkerState | None:
        """A worker that is up, or that was when it was heard of last."""
        return self._workers.get(name)

    def cached(self, name: str) -> set[BlockKey]:
        """The blocks in the cache of a worker that is up."""
        cache = self._workers[name].cache
        return set() if cache is None else self.index.held_by(cache)

    def is_up(self, name: str) -> bool:
        """Whether requests can be placed there."""
        worker = self._workers.get(name)
        return worker is not None and worker.up

    @property
    def up(self) -> list[WorkerState]:
        """The workers that are up, in the order in which they came up."""
        return [worker for worker in self._workers.values() if worker.up]

    @property
    def can_serve(self) -> bool:
        """Whether some worker can prefill and some can decode."""
        return bool(self._prefill and self._decode)

    def add(self, event: WorkerUp) -> None:
        """A worker is up, with nothing to do; under the name of one that is down it replaces that one."""
        self._workers[event.worker] = WorkerState(
            event.worker,
            event.role,
            event.capacity_tokens,
            event.cache,
            up_s=event.at_s,
            stepped_until_s=event.at_s,
        )
        if event.cache is not None and event.cache not in self._members:
            self._members[event.cache] = self.index.join(event.cache)
        self._arrange()

    def remove(self, name: str) -> bool:
        """A worker is down; false where that is no news."""
        worker = self._workers.get(name)
        if worker is None or not worker.up:
            return False
        worker.up = False
        cache, up = worker.cache, self.up
        if cache is not None and all(each.cache != cache for each in up):
            del self._members[cache]
            self._on_ssd.pop(cache, None)
            self.index.drop(cache)
        for each in up:
            each.stop_sending_to(name)
        self._arrange()
        return True

    def _arrange(self) -> None:
        self._old_view = None
        places = {cache: place for place, cache in enumerate(self.index.instances)}
        up = self.up
        coupled = [worker.cache for worker in up if worker.role == "coupled" and worker.cache is not None]
        self._on_gpu = {cache: places[cache] for cache in coupled}
        self._prefill = [(each, places.get(each.cache or "", -1)) for each in up if each.role != "decode"]
        self._decode = [each for each in up if each.role != "prefill"]

    def begin_fetch(self, attempt: Attempt, request: Request, placement: Placement) -> None:
        """A prefill worker fetches a prefix: its holder reads what of it is on SSD, and sends it."""
        source, size = self._workers[str(placement.fetch_from)], request.block_size_tokens
        first = (placement.reused_tokens - placement.fetched_tokens) // size
        keys = request.block_keys[first : -(-placement.reused_tokens // size)]
        begun = source.reading if self._blocks_on_ssd(source, keys) else source.sending
        begun[attempt] = placement.prefill

    def cache_changed(self, event: CacheChanged) -> bool:
        """Blocks came to a cache and others left it; whether that is logged.

        It is not where no worker has that cache, or where the cache is in GPU memory: blocks stay there only
        while no request needs the room.
        """
        member = self._members.get(event.instance)
        if member is None:
            return False
        self.index.update(member, event.added, event.removed)
        on_ssd = self._on_ssd.get(event.instance)
        if on_ssd:
            on_ssd.difference_update(event.removed)
        return event.instance not in self._on_gpu

    def tier_changed(self, event: TierChanged) -> None:
        """Blocks of a cache moved between DRAM and SSD."""
        if event.cache in self._members:
            on_ssd = self._on_ssd.setdefault(event.cache, set())
            on_ssd.difference_update(event.promoted)
            on_ssd.update(event.demoted)

    def _blocks_on_ssd(self, worker: WorkerState, keys: tuple[BlockKey, ...]) -> int:
        on_ssd = self._on_ssd.get(worker.cache or "")
        return sum(key in on_ssd for key in keys) if on_ssd else 0

    def _matches(self, request: Request) -> list[int]:
        """Leading blocks of a prompt in each cache, and the 0 of workers that have none.

        A request reuses whole blocks of a cache in GPU memory, and computes at least its last token.
        """
        if not self._members:
            return [0]
        found = [*self.index.matches(request.block_keys), 0]
        if self._on_gpu:
            most = (request.input_tokens - 1) // request.block_size_tokens
            for place in self._on_gpu.values():
                found[place] = min(found[place], most)
        return found

    def view(self, request: Request, now_s: float, history: History) -> ClusterView:
        """What the Conductor may know about a request now, in the order in which workers came up."""
        matches = self._matches(request)
        view = self._old_view
        if view is None or now_s - view.taken_at_s > self._view_age_s:
            prefill = tuple([worker.prefill_view(matches[place], now_s) for worker, place in self._prefill])
            decode = tuple([worker.latest_view or worker.decode_view() for worker in self._decode])
            view = ClusterView(now_s, prefill, decode, history.lengths, history.recent(now_s))
            if self._view_age_s:
                self._old_view = view
        else:
            prefill = tuple(
                old.replace(matched_blocks=matches[place])
                for old, (_, place) in zip(view.prefill, self._prefill, strict=True)
            )
            view = view.replace(prefill=prefill)
        if self._on_ssd:
            view = view.replace(
                prefill=tuple(
                    each.replace(
                        matched_on_ssd=self._blocks_on_ssd(worker, request.block_keys[: each.matched_blocks])
                    )
                    for each, (worker, _) in zip(view.prefill, self._prefill, strict=True)
                )
            )
        return view
