"""Who is on the way to a decode instance, and what users have seen: what a death must not lose."""

from dataclasses import dataclass, field, replace

from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request, TracedRequest, blocks_for


@dataclass(slots=True, eq=False)
class Journeys:
    """Requests that are placed and do not decode yet. Mutable: it is the state of a cluster."""

    under_way: dict[int, tuple[TracedRequest, Placement]] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    """Tokens that users saw before decoding, or before their instance died."""
    _in_prompt: dict[int, int] = field(default_factory=dict)  # those of them that a death made part of the prompt
    _resumed: set[int] = field(default_factory=set)  # whose next token prefill computes
    _copied: set[int] = field(default_factory=set)  # whose prefix has come from its holder

    def begin(self, traced: TracedRequest, placement: Placement) -> None:
        """A request was placed."""
        self.under_way[traced.request.id] = (traced, placement)
        self._copied.discard(traced.request.id)

    def copied(self, request_id: int, placement: Placement) -> None:
        """Its prefix has come from another instance, which may die now."""
        if self.is_current(request_id, placement):
            self._copied.add(request_id)

    def is_current(self, request_id: int, placement: Placement) -> bool:
        """Whether this is where the request is going; after a death it may be placed elsewhere, or refused."""
        current = self.under_way.get(request_id)
        return current is not None and current[1] is placement

    def is_resumed(self, request_id: int) -> bool:
        """Whether it decoded on an instance that died."""
        return request_id in self._resumed

    def end(self, request_id: int) -> tuple[int, bool]:
        """A request's KVCache is where it decodes: the tokens its user saw, and whether it decoded before."""
        del self.under_way[request_id]
        self._copied.discard(request_id)
        resumed = request_id in self._resumed
        self._resumed.discard(request_id)
        return self.shown.pop(request_id, 0), resumed

    def tokens_shown(self) -> dict[int, int]:
        """The tokens that users of requests under way have seen, by id."""
        return {request_id: self.shown[request_id] for request_id in self.under_way if self.shown.get(request_id)}

    def interrupt(self, instance: str) -> list[tuple[TracedRequest, Placement]]:
        """Take out whoever is on the way through an instance, in order of id."""
        found = [
            (traced, placement)
            for _, (traced, placement) in sorted(self.under_way.items())
            if instance in {placement.prefill, placement.decode}
            or (instance == placement.fetch_from and traced.request.id not in self._copied)
        ]
        for traced, _ in found:
            del self.under_way[traced.request.id]
        return found

    def longer(self, traced: TracedRequest, shown_tokens: int) -> TracedRequest:
        """The request whose decode instance died: the tokens it has shown are part of its prompt now."""
        if not shown_tokens:
            return traced
        request = traced.request
        tokens = request.input_tokens + shown_tokens - self._in_prompt.get(request.id, 0)
        self.shown[request.id] = self._in_prompt[request.id] = shown_tokens
        self._resumed.add(request.id)
        return replace(traced, request=extended(request, tokens))


def extended(request: Request, tokens: int) -> Request:
    """A request whose prompt has grown to so many tokens by its own answer; nobody else shares what it added."""
    blocks = blocks_for(tokens, request.block_size_tokens)
    own = tuple(f"{request.id}/{k}".encode() for k in range(len(request.block_keys), blocks))
    return replace(request, input_tokens=tokens, block_keys=(*request.block_keys, *own))
