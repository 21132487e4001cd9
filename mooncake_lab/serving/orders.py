"""The coordinator's commands to workers as messages."""

from collections.abc import Callable, Mapping
from typing import final

from mooncake_lab.cluster import POOL, Attempt, CancelAttempt, PrepareDecode, RunPrefill
from mooncake_lab.core import Request
from mooncake_lab.serving.messages import CancelOrder, DecodeOrder, Fetch, Job, PrefillOrder
from mooncake_lab.serving.stream import RequestStream
from mooncake_lab.serving.supervisor import Supervisor


@final
class Orders:
    """Sends the orders of one run. Immutable.

    Args:
        run: its number, which workers repeat in their reports.
        supervisor: of the workers, and of the pool that they ask for what they lack.
        streams: of the requests in flight.
        block_size_tokens: of the prefix caches.
        matched: how many leading blocks of a prompt the cluster knows a worker to hold.
    """

    def __init__(
        self,
        run: int,
        supervisor: Supervisor,
        streams: Mapping[int, RequestStream],
        block_size_tokens: int,
        matched: Callable[[str, Request], int],
    ) -> None:
        self._matched = matched
        self._run = run
        self._links = supervisor.links
        self._streams = streams
        self._block_size_tokens = block_size_tokens
        self._pool = supervisor.pool

    def prepare_decode(self, command: PrepareDecode) -> None:
        """Tell a decode worker which request will arrive.

        Raises:
            KeyError: when the worker is down.
        """
        prompt, params = self._streams[command.request.id].remaining(command.request.input_tokens)
        self._links[command.worker].send(DecodeOrder(job=self._job(command.attempt), prompt=prompt, params=params))

    def run_prefill(self, command: RunPrefill) -> None:
        """Tell a worker to compute a prompt, where its prefix is, and where its KVCache goes.

        Raises:
            KeyError: when one of the workers is down.
        """
        request, placement = command.request, command.placement
        stream, fetch = self._streams[request.id], None
        blocks = -(-placement.reused_tokens // self._block_size_tokens)
        if placement.fetch_from is not None:
            holder = self._links.get(placement.fetch_from)  # None where it has just gone down
            fetch = Fetch(placement.fetch_from, None if holder is None else holder.ready.port, blocks)
        elif self._pool.address is not None and blocks:
            fetch = Fetch(POOL, None, blocks)
        prompt, params = stream.remaining(request.input_tokens)
        is_coupled = placement.prefill == placement.decode
        self._links[placement.prefill].send(
            PrefillOrder(
                job=self._job(command.attempt),
                prompt=prompt,
                params=params,
                shown_tokens=request.input_tokens - len(stream.prompt),
                reused_blocks=blocks if blocks < self._matched(placement.prefill, request) else None,
                deliver_to=None if is_coupled else self._links[placement.decode].ready.port,
                fetch=fetch,
            )
        )

    def cancel_attempt(self, command: CancelAttempt) -> None:
        """Tell a worker to stop an attempt; one that is down has stopped."""
        link = self._links.get(command.worker)
        if link is not None:
            link.send(CancelOrder(self._job(command.attempt)))

    def _job(self, attempt: Attempt) -> Job:
        return Job(self._run, attempt.request_id, attempt.n)
