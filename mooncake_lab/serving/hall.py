"""The live cluster for programs that run an event loop of their own, such as the HTTP front door."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Self, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.conductor import Estimator, LatencyEstimator
from mooncake_lab.core import Record
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving import messages
from mooncake_lab.serving.calibration import latency_model
from mooncake_lab.serving.dispatcher import Dispatcher
from mooncake_lab.serving.journal import Journal
from mooncake_lab.serving.messages import Event, Generation, Measure, Measured, Pong
from mooncake_lab.serving.placing import Decided
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.supervisor import Callbacks, Link, Pool, Supervisor, WorkerError
from mooncake_lab.serving.ticket import FailedError, Ticket

_LOG: Final = logging.getLogger(__name__)
_SHUT: Final = "the cluster is shut down"


@final
class Hall:
    """Workers, the Conductor and every request under way. Mutable; it belongs to one event loop.

    Args:
        spec: workers and policies.
        model: how long everything takes, as the Conductor believes; None measures it when the workers are ready.
        estimate: what the Conductor believes instead.
        pool: where workers come from; None makes one for this cluster alone.
        write: gets each record as the cluster hears of it.
        decided: told of each decision.
    """

    def __init__(
        self,
        spec: LiveSpec,
        model: LatencyModel | None = None,
        estimate: Estimator | None = None,
        *,
        pool: Pool | None = None,
        write: Callable[[Record], None],
        decided: Callable[[Decided], None],
    ) -> None:
        self.spec = spec
        self.model = model
        self._estimate = estimate
        self.journal = Journal(time.monotonic(), write)
        self.dispatcher = Dispatcher(spec, self.journal, decided)
        callbacks = Callbacks(worker_up=self._worker_up, event=self._event, worker_exit=self._worker_exit)
        self.supervisor = Supervisor(spec, callbacks, pool)
        self._is_dismissed = False
        self._measured: dict[str, asyncio.Future[Measured]] = {}
        self._pongs: dict[int, tuple[set[str], asyncio.Event]] = {}

    async def __aenter__(self) -> Self:
        try:
            await self.supervisor.start()
            if self.model is None:
                _LOG.info("timing the workers for the Conductor's latency model")
                self.model = await self.calibrate()
                if (metronome := self.spec.metronome) is not None:
                    pace = {name: getattr(metronome, name) for name in metronome.__struct_fields__}
                    self.model = replace(self.model, **pace)
        except BaseException:
            await self.close()
            raise
        self.dispatcher.placer.estimate = self._estimate or LatencyEstimator(self.model)
        self.supervisor.keep_spares()  # only now, so that they disturb neither the start nor the timing
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every request under way, and every worker."""
        self.dismiss()
        await self.supervisor.close()

    def dismiss(self) -> None:
        """End every request under way, and take no more; clients are told why."""
        self._is_dismissed = True
        for ticket in list(self.dispatcher.placer.tickets.values()):
            with self.dispatcher.placer.ending(ticket):
                self.dispatcher.cancel(ticket, _SHUT, FailedError(_SHUT))

    def submit(
        self, prompt: npt.NDArray[np.int32], asked: Generation, *, completion_id: str | None = None
    ) -> Ticket:
        """Accept a request and place it; for its errors see `Dispatcher.submit`.

        Raises:
            FailedError: when everybody has been dismissed.
        """
        if self._is_dismissed:
            raise FailedError(_SHUT)
        return self.dispatcher.submit(prompt, asked, completion_id=completion_id)

    def cancel(self, ticket: Ticket, reason: str = "the client went away") -> None:
        """End a request, unless it has ended."""
        self.dispatcher.cancel(ticket, reason)

    def finish(self, ticket: Ticket) -> None:
        """A request has all that its client wants, before its last token."""
        self.dispatcher.finish(ticket)

    def longest(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return self.dispatcher.longest()

    async def calibrate(self) -> LatencyModel:
        """Let one worker of each role time itself, one after the other while nothing else runs.

        Raises:
            ValueError: when what was timed fits no latency model.
        """
        links, found = self.supervisor.links, list[Measured]()
        names = {role: name for name, role in reversed(self.spec.roles.items())}
        for role, name in names.items():
            port = links[names["decode"]].ready.port if role == "prefill" else None
            self._measured[name] = asyncio.get_running_loop().create_future()
            links[name].send(Measure(port))
            found.append(await asyncio.wait_for(self._measured[name], 120))
        ready = next(iter(links.values())).ready
        return latency_model(ready.shape, found, f"{ready.shape.name} on {ready.device}, measured at start")

    async def settle(self, order: type[messages.Ping | messages.Forget] = messages.Ping) -> None:
        """Return when everything that living workers have said so far is heard, and the order is done."""
        waiting = set(self.supervisor.links)
        if waiting:
            everybody = asyncio.Event()
            number = self.supervisor.ask_everybody(order)
            self._pongs[number] = waiting, everybody
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(everybody.wait(), self.spec.silence_s)
            self._pongs.pop(number, None)

    async def forget(self) -> None:
        """Empty every cache."""
        await self.settle(messages.Forget)
        await self.settle()

    def _worker_up(self, name: str, link: Link) -> None:
        self.dispatcher.born(name, link)

    def _event(self, name: str, event: Event) -> None:
        if isinstance(event, Measured):
            self._measured.pop(name).set_result(event)
            return
        if isinstance(event, Pong) and event.number in self._pongs:
            waiting, everybody = self._pongs[event.number]
            waiting.discard(name)
            if not waiting:
                everybody.set()
        self.dispatcher.heard(name, event)

    def _worker_exit(self, name: str, reason: str) -> None:
        for waiting, everybody in self._pongs.values():
            waiting.discard(name)
            if not waiting:
                everybody.set()
        if name in self._measured:
            self._measured.pop(name).set_exception(WorkerError(f"{name} died while it was measured: {reason}"))
        self.dispatcher.died(name, reason)
