"""A worker: one engine in a process of its own, its duty on one thread, its talk on others.

It lives as long as its control socket: when the cluster's end closes, for whatever reason, the worker is gone too.
"""

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Final, final

import msgspec
import torch

from mooncake_lab.engine import LlamaModel
from mooncake_lab.engine.kvcache import fingerprint
from mooncake_lab.perf import ModelShape
from mooncake_lab.serving import messages
from mooncake_lab.serving.coupled_duty import CoupledDuty
from mooncake_lab.serving.couriers import Couriers
from mooncake_lab.serving.decode_duty import DecodeDuty
from mooncake_lab.serving.desk import Desk, Duty
from mooncake_lab.serving.frames import pack, read_frame
from mooncake_lab.serving.kv import KVShape
from mooncake_lab.serving.lane import Lane
from mooncake_lab.serving.messages import ORDERS, VERSION, Event, Job, Pong, Ready, Stop, Trouble
from mooncake_lab.serving.messenger import Identity
from mooncake_lab.serving.prefill_duty import PrefillDuty
from mooncake_lab.serving.reception import Reception
from mooncake_lab.serving.spec import WorkerSpec

_PR_SET_PDEATHSIG: Final = 1
_SWITCH_S: Final = 0.0005
"""How long the engine's thread may keep a courier from the interpreter; Python's own 5 ms are a decode step."""


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (Linux), even if it is stopped or deaf."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@final
class Worker:
    """One worker until its end. Mutable: it is a process.

    Args:
        control: the connection to the cluster, which outlives the worker or ends it.
        spec: what it is to be.
        model: what it runs.
    """

    def __init__(self, control: socket.socket, spec: WorkerSpec, model: LlamaModel) -> None:
        self._control = control
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._step_began_s: float | None = None
        name = fingerprint(model.config, model.weights_digest, model.embedding.dtype)
        self._who = Identity(name=spec.name, token=spec.token, fingerprint=name, timeout_s=spec.peer_timeout_s)
        shape = KVShape.of(model, name)
        lane = Lane(spec.transfer_bytes) if spec.transfer == "mooncake" else None
        self._desk = Desk(
            spec=spec,
            model=model,
            shape=shape,
            who=self._who,
            couriers=Couriers(self._who, self._undelivered, lane),
            lane=lane,
            say=self._outbox.put,
            note=self._inbox.put,
        )
        duties = {"prefill": PrefillDuty, "decode": DecodeDuty, "coupled": CoupledDuty}
        self._duty: Duty = duties[spec.role](self._desk)
        self._reception = Reception(
            self._who,
            self._desk.shape,
            most_tokens=spec.max_request_tokens,
            delivered=self._inbox.put,
            give=self._duty.lookup if isinstance(self._duty, PrefillDuty) else lambda _: [],
            each_layer=spec.log_layers,
            lane=lane,
        )

    def live(self) -> None:
        """Work until told to stop, or until the cluster is gone."""
        self._outbox.put(self._ready())
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        threading.Thread(target=self._speak, name="speaker", daemon=True).start()
        while True:
            item = self._next()
            while item is not None:
                if isinstance(item, Stop):
                    self._reception.close()
                    if isinstance(self._duty, PrefillDuty):
                        self._duty.close()
                    return
                self._take(item)
                item = self._next_if_any()
            if self._duty.busy:
                self._step_began_s = time.monotonic()
                self._duty.step()
                self._step_began_s = None

    def _next(self) -> object | None:
        return self._next_if_any() if self._duty.busy else self._inbox.get()

    def _next_if_any(self) -> object | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _take(self, item: object) -> None:
        if isinstance(item, messages.Sever):
            self._desk.couriers.sever()
            self._reception.sever()
        else:
            self._duty.take(item)

    def _listen(self) -> None:
        """Orders from the cluster; when there is no cluster any more, there is no worker."""
        try:
            while (body := read_frame(self._control)) is not None:
                order = ORDERS.decode(body)
                if isinstance(order, messages.Ping):
                    began_s = self._step_began_s
                    busy_s = 0.0 if began_s is None else time.monotonic() - began_s
                    self._outbox.put(Pong(order.number, busy_s))
                else:
                    self._inbox.put(order)
        except (OSError, msgspec.MsgspecError) as error:
            logging.getLogger(__name__).warning("%s ends: %s", self._who.name, error)
        os._exit(0)

    def _speak(self) -> None:
        """Events to the cluster, as many in one breath as there are."""
        while True:
            events = [self._outbox.get()]
            while not self._outbox.empty():
                events.append(self._outbox.get())
            try:
                self._control.sendall(pack(events))
            except OSError:
                os._exit(0)

    def _undelivered(self, job: Job, reason: str) -> None:
        self._outbox.put(Trouble(job=job, reason=reason))

    def _ready(self) -> Ready:
        spec, model = self._desk.spec, self._desk.model
        return Ready(
            version=VERSION,
            name=spec.name,
            pid=os.getpid(),
            port=self._reception.port,
            fingerprint=self._who.fingerprint,
            window=min(spec.max_request_tokens, model.config.max_positions, len(model.rope.cosines)),
            capacity_tokens=self._duty.capacity_tokens,
            shape=_shape(spec, model),
            end_tokens=model.config.end_tokens,
            device=str(model.embedding.device),
        )


def _shape(spec: WorkerSpec, model: LlamaModel) -> ModelShape:
    """The dimensions of the model, as the rest of the package knows them."""
    config = model.config
    return ModelShape(
        name=spec.model,
        layers=config.layers,
        width=config.width,
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        ffn_width=config.ffn_width,
        vocabulary=config.vocabulary,
        tied_embeddings=config.tied_embeddings,
        bytes_per_element=model.embedding.dtype.itemsize,
    )


def live_and_die(control: socket.socket, spec: WorkerSpec, model: LlamaModel) -> None:
    """All a worker's process does; it never returns."""
    code = 1
    try:
        torch.set_num_threads(spec.threads)
        sys.setswitchinterval(_SWITCH_S)
        Worker(control, spec, model).live()
        code = 0
    except BaseException:
        logging.getLogger(__name__).exception("%s died", spec.name)
    finally:
        sys.stderr.flush()
        os._exit(code)
