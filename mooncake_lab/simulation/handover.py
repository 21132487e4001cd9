"""From prefill to decode in virtual time: KVCache streams layer by layer, and is loaded where it is decoded."""

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Literal

import simpy

from mooncake_lab.conductor import DecodeView, Rejection
from mooncake_lab.core import FirstToken, Moved, Record, Rejected, Request
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.decode import DecodeInstance
from mooncake_lab.simulation.journeys import Journeys
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.prefill import Job


class Handover:
    """The Messenger between the stages (arXiv §5.2, FAST'25 Fig. 14); it changes as streams come and go."""

    def __init__(
        self,
        env: simpy.Environment,
        model: LatencyModel,
        network: Network,
        journeys: Journeys,
        decode: Mapping[str, DecodeInstance],
        *,
        first_shown_by: Literal["decode", "prefill"],
        streams_layers: bool,
        double_check: Callable[[Request, DecodeView], Rejection | None],
        log: Callable[[Record], None],
    ) -> None:
        self._env = env
        self._model = model
        self._network = network
        self._journeys = journeys
        self._decode = decode
        self._first_shown_by = first_shown_by
        self._streams_layers = streams_layers
        self._double_check = double_check
        self._log = log
        self._token_bytes = model.shape.kv_bytes_per_token
        self._made = 1 - 1 / model.shape.layers  # of a prompt's KVCache, when its last layer is computed
        self._streams: dict[Job, simpy.Event] = {}

    def stream(self, job: Job, seconds: float) -> None:
        """Each layer's KVCache leaves for the decode instance while the next layer is computed (arXiv §5.2).

        It leaves no faster than layers are computed: when the prompt is, the last one is still to be sent.
        """
        if self._streams_layers:
            made_bytes = self._size(job) * self._made
            self._streams[job] = self._send(job, made_bytes / seconds if seconds else inf)

    def hand_over(self, job: Job) -> None:
        """A prompt is computed: the rest of its stream, and then decoding.

        The record of its move begins now, whatever has left before: it shows what computation did not hide.
        """
        stream, request_id = self._streams.pop(job, None), job.traced.request.id
        if not self._journeys.is_current(request_id, job.placement):
            return
        if self._first_shown_by == "prefill" and not self._journeys.shown.get(request_id):
            self._journeys.shown[request_id] = 1
            self._log(FirstToken(at_s=self._env.now, request_id=request_id))
        if stream is None:
            stream = self._send(job)
        else:
            self._network.release(stream)
        stream.callbacks.append(partial(self._arrived, job, self._env.now))

    # callbacks rather than a process: a process is two events more, and every request passes here

    def _after(self, seconds: float, act: Callable[[simpy.Event], None]) -> None:
        self._env.timeout(seconds).callbacks.append(act)

    def _send(self, job: Job, most_bytes_per_s: float = inf) -> simpy.Event:
        placed = job.placement
        return self._network.transfer(
            placed.prefill, placed.decode, self._size(job), most_bytes_per_s=most_bytes_per_s
        )

    def _size(self, job: Job) -> int:
        return job.traced.request.input_tokens * self._token_bytes

    def _arrived(self, job: Job, start_s: float, _event: simpy.Event) -> None:
        """All layers are in host memory; now into GPU memory."""
        request, placement = job.traced.request, job.placement
        if not self._journeys.is_current(request.id, placement):
            return
        self._log(
            Moved(
                at_s=self._env.now,
                request_id=request.id,
                source=placement.prefill,
                destination=placement.decode,
                start_s=start_s,
                bytes=self._size(job),
            )
        )
        if not self._refused(job):
            self._after(self._model.dram_load_s(request.input_tokens), partial(self._loaded, job))

    def _loaded(self, job: Job, _event: simpy.Event) -> None:
        request_id = job.traced.request.id
        if not self._journeys.is_current(request_id, job.placement):
            return
        shown, resumed = self._journeys.end(request_id)
        self._decode[job.placement.decode].join(job.traced, shown, resumed=resumed)

    def _refused(self, job: Job) -> bool:
        """Whether the decode instance turns the request away now that it is here (arXiv §3, step 4).

        Who has decoded before an instance died is not asked again.
        """
        request, decode = job.traced.request, self._decode[job.placement.decode]
        if self._journeys.is_resumed(request.id):
            return False
        rejection = self._double_check(request, decode.view())
        if rejection is None:
            return False
        self._journeys.end(request.id)
        decode.break_promise(job.traced)
        self._log(
            Rejected(at_s=self._env.now, request_id=request.id, stage=rejection.stage, reason=rejection.reason)
        )
        return True
