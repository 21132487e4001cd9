"""The cluster in real time: the same face as `simulation.cluster`, over processes that really compute."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, Self, TypeVar, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.cluster import ClusterSpec, Event
from mooncake_lab.conductor import ClusterView, Decided, Estimator
from mooncake_lab.core import Record, Request, TracedRequest
from mooncake_lab.engine import check_model
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving.launch import Launcher
from mooncake_lab.serving.messages import DropConnections, SamplingParams
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.sessions import LiveClients
from mooncake_lab.serving.spec import LiveOptions
from mooncake_lab.serving.stream import RejectedError, RequestStream
from mooncake_lab.workload.sessions import ClientRules, ClientSession
from mooncake_lab.workload.transforms import prompt_of

_NO_RULES: Final = ClientRules()
_NOT_OPEN: Final = "this cluster is not open; use it in a `with` block"
_Result = TypeVar("_Result")


@final
class LiveCluster:
    """Prefill and decode workers, or coupled ones, under one Conductor, each a process that really computes.

    It lives in a `with` block and may run several traces, one after the other. Mutable: it owns processes. Beside
    what `simulation.Cluster` has too (`run`, `view`, `log`, `decisions`), faults can be injected, and tokens are
    real.

    Args:
        spec: workers and policies.
        options: what only a live cluster has, such as its model.
        model: how long everything takes, as the Conductor believes; None measures it at the start.
        estimate: what the Conductor believes instead.
        launcher: where workers come from; None makes one for this cluster alone.

    Raises:
        ValueError: when a live cluster cannot do what the spec asks.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        options: LiveOptions | None = None,
        *,
        model: LatencyModel | None = None,
        estimate: Estimator | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.spec = spec
        self.options = options or LiveOptions()
        self.log: list[Record] = []
        self.decisions: list[Decided] = []
        """What the Conductor decided in the latest run, and on what view."""
        self.events: list[tuple[Event, float]] = []
        """What the coordinator was told in the latest run, and when it learned of it."""
        self.outputs: dict[int, tuple[int, ...]] = {}
        """Tokens of each request of the latest run, by its id."""
        self.clients: LiveClients | None = None
        """The clients of the latest `play`."""
        self.on_record: Callable[[Record], None] = lambda _: None
        """Told each record as it is written, on the cluster's thread."""
        self._written: list[Record] = []
        self._runtime = ClusterRuntime(
            spec, self.options, model=model, estimate=estimate, launcher=launcher, write=self._write
        )
        # the lists are others in each run
        self._runtime.on_decision = lambda decided: self.decisions.append(decided)  # noqa: PLW0108
        self._runtime.on_event = lambda event, now_s: self.events.append((event, now_s))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)

    def __enter__(self) -> Self:
        """Start the workers.

        Raises:
            OSError, ValueError: when the directory of the model has no model of this engine, before workers start.
            WorkerError: when a worker does not start, with the reason.
        """
        if not self.options.model.startswith("random:"):
            check_model(self.options.model)
        self._thread.start()
        try:
            self._do(self._runtime.__aenter__())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._do(self._runtime.close())
        self._stop_loop()

    @property
    def model(self) -> LatencyModel:
        """How long everything takes, as given or as measured at the start.

        Raises:
            RuntimeError: before that.
        """
        return _known(self._runtime.model)

    @property
    def estimate(self) -> Estimator:
        """What the Conductor believes of it; for the error see `model`."""
        return _known(self._runtime.estimate)

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
        """Serve requests at their times of arrival until all are done, or until the horizon; the run's log.

        Raises:
            ValueError: when a request does not fit the cluster; none is served then.
            FailedError: when one could not be served; all others were, and `log` has what happened.
        """
        return self._do(self._run(list(requests), until_s))

    def play(
        self, sessions: Iterable[ClientSession], rules: ClientRules = _NO_RULES, *, concurrency: int | None = None
    ) -> list[Record]:
        """Serve clients that wait for their answers, until all sessions have ended; the run's log.

        `clients` then says what they sent and received.

        Args:
            sessions: what they send.
            rules: how they behave.
            concurrency: how many sessions are played at once; None begins each at its recorded time.

        Raises:
            ValueError: when a turn does not fit the cluster; none is served then.
        """
        return self._do(self._play(sessions, rules, concurrency))

    def generate(
        self, prompts: Sequence[Sequence[int] | npt.NDArray[np.int32]], *, max_new_tokens: int = 16
    ) -> list[tuple[int, ...]]:
        """Greedy tokens for several prompts at once, in their order.

        Raises:
            ValueError: when one can never be served.
            RejectedError: when one is refused.
        """
        return self._do(self._generate([np.asarray(p, dtype=np.int32) for p in prompts], max_new_tokens))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request now; looking changes nothing."""
        return self._do(_called(lambda: self._runtime.view(request)))

    def reset_prefix_cache(self) -> None:
        """Empty every cache, so that the next run starts cold."""
        self._do(self._runtime.reset_prefix_cache())

    def kill(self, name: str) -> None:
        """Kill a worker with SIGKILL: a fault, injected.

        Raises:
            KeyError: when no such worker is up.
        """
        self._do(_called(lambda: self._runtime.supervisor.kill(name)))

    def drop_connections(self, name: str) -> None:
        """Break all of a worker's connections to other workers: a fault, injected.

        Raises:
            KeyError: when no such worker is up.
        """
        self._do(_called(lambda: self._runtime.supervisor.connections[name].send(DropConnections())))

    @property
    def now_s(self) -> float:
        """Seconds since the latest run began."""
        return self._runtime.now_s()

    @property
    def in_flight(self) -> int:
        """Requests that arrived and have not ended."""
        return len(self._runtime.coordinator.requests)

    def pids(self) -> dict[str, int]:
        """The process of each worker that is up."""
        return {name: link.ready.pid for name, link in list(self._runtime.supervisor.connections.items())}

    def _write(self, record: Record) -> None:
        self._written.append(record)
        self.on_record(record)

    async def _run(self, requests: list[TracedRequest], until_s: float | None) -> list[Record]:
        runtime = self._runtime
        for traced in requests:  # before any is served
            tokens, most = traced.request.input_tokens + traced.output_tokens, runtime.max_model_len()
            if tokens > most:
                raise ValueError(f"request {traced.request.id} and its answer are {tokens} tokens; {most} fit")
        self._written, self.decisions, self.events, self.outputs = [], [], [], {}
        runtime.begin_run()
        running = [asyncio.create_task(self._serve(traced)) for traced in requests]
        done, late = await asyncio.wait(running, timeout=until_s) if running else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if late:
            runtime.drop_requests()
        await runtime.pending_calls.drain()
        # each worker reports its own in order, but the cluster hears them interleaved
        self.log = sorted(self._written, key=attrgetter("at_s"))
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        return self.log

    async def _play(
        self, sessions: Iterable[ClientSession], rules: ClientRules, concurrency: int | None
    ) -> list[Record]:
        runtime = self._runtime
        clients = self.clients = LiveClients(runtime, sessions, rules, concurrency=concurrency)
        self._written, self.decisions, self.events, self.outputs = [], [], [], clients.outputs
        runtime.begin_run()
        await clients.play()
        await runtime.pending_calls.drain()
        self.log = sorted(self._written, key=attrgetter("at_s"))
        return self.log

    async def _serve(self, traced: TracedRequest) -> None:
        runtime, request = self._runtime, traced.request
        await asyncio.sleep(max(0.0, request.arrival_s - runtime.now_s()))
        params = SamplingParams(max_new_tokens=traced.output_tokens, end_tokens=())
        stream: RequestStream | None = None
        try:
            prompt = prompt_of(request, runtime.supervisor.ready.shape.vocabulary)
            stream = runtime.submit(prompt, params, traced=request)
            self.outputs[request.id] = tuple([token async for token in stream])
        except RejectedError:
            pass  # the log says so
        except asyncio.CancelledError:
            if stream is not None:
                self.outputs[request.id] = tuple(stream.tokens)
            raise

    async def _generate(self, prompts: list[npt.NDArray[np.int32]], most: int) -> list[tuple[int, ...]]:
        params = SamplingParams(max_new_tokens=most, end_tokens=())
        streams = list[RequestStream]()
        try:
            streams += (self._runtime.submit(prompt, params) for prompt in prompts)
            return [tuple([token async for token in stream]) for stream in streams]
        except BaseException:
            for stream in streams:
                self._runtime.cancel(stream, "another request of the call failed")
            raise

    def _do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError(_NOT_OPEN)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _called(act: Callable[[], _Result]) -> _Result:
    return act()


def _known(value: _Result | None) -> _Result:
    if value is None:
        raise RuntimeError(_NOT_OPEN)
    return value
