"""A worker: one engine on the main thread of a process, and connections on other threads.

When the cluster's end of its control socket closes before the worker was told to stop, its process ends.
"""

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Final, final

import msgspec
import torch

from mooncake_lab.cluster import events
from mooncake_lab.engine import LlamaModel
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import fingerprint
from mooncake_lab.perf import ModelShape
from mooncake_lab.serving import messages
from mooncake_lab.serving.kv_transfer import Identity
from mooncake_lab.serving.kv_transfer.receiver import KVReceiver
from mooncake_lab.serving.kv_transfer.sender import KVSenders
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.roles import WorkerContext
from mooncake_lab.serving.roles.decode import CoupledRole, DecodeRole
from mooncake_lab.serving.roles.prefill import PrefillRole
from mooncake_lab.serving.spec import WorkerSpec

_SWITCH_S: Final = 0.0005
"""How long the engine's thread may keep a sender from the interpreter; Python's own 5 ms are a decode step."""


@final
class Worker:
    """One worker until it is told to stop. Mutable: it owns an engine, threads and connections.

    Args:
        control: the connection to the cluster.
        spec: role, sizes and identity.
        model: what it runs.

    Raises:
        ValueError: when its KVCache does not fit into memory.
    """

    def __init__(self, control: socket.socket, spec: WorkerSpec, model: LlamaModel) -> None:
        # whatever follows from the context length follows from that of the model, too
        spec = replace(spec, max_model_len=min(spec.max_model_len, len(model.rope.cosines)))
        self._control = control
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[messages.WorkerMessage | None] = queue.SimpleQueue()
        self._step_began_s: float | None = None
        self._is_told_to_stop = False
        name = fingerprint(model.config, model.weights_digest, model.embedding.dtype)
        identity = Identity(name=spec.name, token=spec.token, fingerprint=name, timeout_s=spec.peer_timeout_s)
        layout = KVLayout.of(model, name, block_tokens=spec.block_size_tokens)
        _check_memory(spec, layout, model.embedding.device)
        link = PacedLink(spec.network_bytes_per_s)
        channel = TransferEngineChannel(spec.transfer_bytes) if spec.transfer == "mooncake" else None
        self._context = WorkerContext(
            spec=spec,
            model=model,
            layout=layout,
            identity=identity,
            senders=KVSenders(identity, self._undelivered, channel, link),
            channel=channel,
            link=link,
            send=self._outbox.put,
            enqueue=self._inbox.put,
        )
        roles = {"prefill": PrefillRole, "decode": DecodeRole, "coupled": CoupledRole}
        self._role: PrefillRole | DecodeRole | CoupledRole = roles[spec.role](self._context)
        self._reception = KVReceiver(
            identity,
            layout,
            most_tokens=spec.max_context_tokens,
            delivered=self._inbox.put,
            give=self._role.lookup if isinstance(self._role, PrefillRole) else lambda _job, _keys: iter(()),
            each_layer=spec.log_layers,
            channel=channel,
            link=link,
        )

    def run(self) -> None:
        """Work until told to stop; afterwards every thread and connection is closed."""
        torch.set_num_threads(self._context.spec.threads)
        sys.setswitchinterval(_SWITCH_S)
        self._outbox.put(self._ready())
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        speaker = threading.Thread(target=self._speak, name="speaker", daemon=True)
        speaker.start()
        self._serve()
        self._reception.close()
        self._context.senders.close()
        if isinstance(self._role, PrefillRole):
            self._role.close()
        self._outbox.put(None)
        speaker.join()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        """Orders first, then an iteration if there is work, until an order says stop."""
        while True:
            while not (self._role.busy and self._inbox.empty()):
                match item := self._inbox.get():
                    case messages.Shutdown():
                        return
                    case messages.DropConnections():
                        self._context.senders.sever()
                        self._reception.sever()
                    case _:
                        self._role.take(item)
            self._step_began_s = time.monotonic()
            self._role.step()
            self._step_began_s = None

    def _listen(self) -> None:
        """Queue orders from the cluster, and answer its pings, also while what was cached is saved at the end.

        When the cluster is gone before it said stop, the process ends.
        """
        try:
            orders = self._control.makefile("rb")
            while (body := messages.read_frame(orders)) is not None:
                order = messages.ORDERS.decode(body)
                if isinstance(order, messages.Ping):
                    began_s = self._step_began_s
                    busy_s = 0.0 if began_s is None else time.monotonic() - began_s
                    self._outbox.put(messages.Pong(order.number, busy_s))
                    continue
                self._is_told_to_stop |= isinstance(order, messages.Shutdown)
                self._inbox.put(order)
        except (OSError, msgspec.MsgspecError) as error:
            logging.getLogger(__name__).warning("%s ends: %s", self._context.identity.name, error)
        if not self._is_told_to_stop:
            os._exit(0)

    def _speak(self) -> None:
        """Send messages to the cluster, all that wait at once, until a None says that there are no more."""
        is_open = True
        while is_open:
            waiting = [self._outbox.get()]
            while not self._outbox.empty():
                waiting.append(self._outbox.get())
            is_open = None not in waiting
            try:
                self._control.sendall(messages.pack(message for message in waiting if message is not None))
            except OSError:
                os._exit(0)

    def _undelivered(self, job: messages.Job, reason: str) -> None:
        failed = events.AttemptFailed(at_s=time.monotonic(), attempt=job.attempt, reason=reason, retriable=True)
        self._outbox.put(messages.Report(job.run, (failed,)))

    def _ready(self) -> messages.Ready:
        spec, model = self._context.spec, self._context.model
        return messages.Ready(
            version=messages.VERSION,
            name=spec.name,
            pid=os.getpid(),
            port=self._reception.port,
            fingerprint=self._context.identity.fingerprint,
            max_context_tokens=spec.max_context_tokens,
            capacity_tokens=self._role.capacity_tokens,
            shape=_model_shape(spec, model),
            end_tokens=model.config.end_tokens,
            device=str(model.embedding.device),
        )


def _model_shape(spec: WorkerSpec, model: LlamaModel) -> ModelShape:
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


def _check_memory(spec: WorkerSpec, layout: KVLayout, device: torch.device) -> None:
    """Refuse a KVCache that can never fit; otherwise the kernel would kill the process once it uses the memory."""
    name = "cache_tokens" if spec.role == "prefill" else "device_tokens"
    have, where = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine has"
    if device.type == "cuda" and spec.role != "prefill":
        have, where = torch.cuda.mem_get_info(device)[0], f"free on {device} are"
    tokens: int = getattr(spec, name)
    need = tokens * layout.bytes_per_token
    if need > have:
        raise ValueError(f"{name} is {tokens}: its KVCache takes {need / 1e9:.1f} GB; {where} {have / 1e9:.1f} GB")
