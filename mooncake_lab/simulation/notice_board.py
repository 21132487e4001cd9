"""How old a view may be: loads are pinned to a board and read there until they are too old."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy

from mooncake_lab.conductor import ClusterView


@dataclass(slots=True, eq=False)
class NoticeBoard:
    """Loads of the cluster as of some moment in the last `max_age_s` seconds (DESIGN: staleness is a knob).

    The first decision after the notice became too old takes a new one; until then everybody reads the same, and
    nobody counts what was decided since. With requests far closer than `max_age_s` that is the bulletin board of
    Mitzenmacher, *How Useful Is Old Information?* (2000): everybody runs where there was least to do.
    Two things are never old. Prefix matches: the index of blocks is the Conductor's own. And deaths: a broken
    connection is noticed. Mutable: it remembers the last notice.
    """

    env: simpy.Environment
    max_age_s: float
    look: Callable[[Sequence[int]], ClusterView]
    """The cluster now, given a request's matched blocks at each prefill instance, dead ones included."""
    names: Sequence[str]
    """Of the prefill instances, in that order."""
    _notice: ClusterView | None = None

    def view(self, matched_blocks: Sequence[int]) -> ClusterView:
        """What the Conductor sees for a request with these matches."""
        if not self.max_age_s:
            return self.look(matched_blocks)
        notice = self._notice
        if notice is None or self.env.now - notice.taken_at_s > self.max_age_s:
            notice = self._notice = self.look(matched_blocks)
        matched = dict(zip(self.names, matched_blocks, strict=True))
        prefill = tuple(seen._replace(matched_blocks=matched[seen.name]) for seen in notice.prefill)
        return notice._replace(prefill=prefill)

    def clear(self) -> None:
        """Somebody died: what was written is not worth reading."""
        self._notice = None
