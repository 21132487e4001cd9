"""One process of a crew: it joins the others, loads the model, and computes its share of each job.

In chunked pipeline parallelism (CPP) a share is a run of layers, one chunk after the other. In KV-Runahead it is a
run of tokens through all layers, on keys and values that come down the chain.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's own spelling

from mooncake_lab.core import blocks_for
from mooncake_lab.core.process import end_with_parent
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.loading import load_model
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.packing import PackedBatch, Piece, pack
from mooncake_lab.engine.pipeline.jobs import Activity, CppJob, CrewSpec, Job, RunaheadJob, Share

BLOCK_TOKENS = 16

_member: list[tuple[int, CrewSpec, LlamaModel]] = []
"""Rank, crew and model of this process, once it joined."""


def begin(parent: int) -> int:
    """The first thing that a process does; its id.

    Args:
        parent: process id of the crew's program, with which it ends.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the crew's to handle
    return os.getpid()


def join(rank: int, spec: CrewSpec, rendezvous: str) -> None:
    """Join the processes that meet at a file, and load the model."""
    torch.set_num_threads(spec.threads)
    if not spec.nccl:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    device = spec.device
    if device == "cuda":
        device = f"cuda:{rank if spec.nccl else 0}"
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        "nccl" if spec.nccl else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=spec.processes,
        timeout=timedelta(seconds=spec.timeout_s),
    )
    model = load_model(spec.model, device=device, dtype=spec.dtype, backend=spec.backend, seed=spec.seed)
    _member.append((rank, spec, model))


def share_of(job: Job) -> Share:
    """This process's part of a job, which is nothing for the last ones of a crew that is larger than the job."""
    ((rank, spec, model),) = _member
    wire = Wire(rank, model.embedding.device, model.embedding.dtype, spec.timeout_s)
    token, layers, kv = None, range(0), list[torch.Tensor]()
    if rank < job.processes:
        token, layers, kv = (
            run_cpp(model, job, wire) if isinstance(job, CppJob) else run_runahead(model, job, wire)
        )
    return Share(
        rank=rank,
        first_token=token,
        first_layer=layers.start,
        # raw bytes, since numpy knows no bfloat16: one more dimension at the end
        kv=tuple(layer.cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy() for layer in kv),
        sent_bytes=wire.sent_bytes,
        received_bytes=wire.received_bytes,
        activities=tuple(wire.activities),
    )


Coming: TypeAlias = tuple[Any, torch.Tensor]
"""A tensor that was asked for: the request, and the room for it."""


@dataclass(slots=True)
class Wire:
    """One process's side of a chain. Mutable: it remembers what is on its way and how much there was.

    Tensors are sent without waiting and asked for ahead of time. Where the processes talk over gloo, tensors of a
    GPU pass through host memory; NCCL takes them as they are.
    """

    rank: int
    device: torch.device
    dtype: torch.dtype
    timeout_s: float
    sent_bytes: int = 0
    received_bytes: int = 0
    activities: list[Activity] = field(default_factory=list[Activity])
    _leaving: list[Coming] = field(default_factory=list[Coming])

    @property
    def _medium(self) -> torch.device:
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def expect(self, shape: tuple[int, ...]) -> Coming:
        """Ask the process before for its next tensor, and go on."""
        room = torch.empty(shape, dtype=self.dtype, device=self._medium)
        return dist.irecv(room, self.rank - 1), room

    def receive(self, coming: Coming, piece: int) -> torch.Tensor:
        """The tensor that was asked for, on this process's device; waits for it."""
        start_s, (request, room) = time.perf_counter(), coming
        request.wait(timedelta(seconds=self.timeout_s))
        self.note("wait", piece, start_s)
        self.received_bytes += room.nbytes
        return room.to(self.device)

    def send(self, tensor: torch.Tensor) -> None:
        """Give a tensor to the next process, and go on; it must not change any more."""
        kept = tensor.to(self._medium).contiguous()
        self.sent_bytes += kept.nbytes
        self._leaving.append((dist.isend(kept, self.rank + 1), kept))

    def flush(self) -> None:
        """Wait until everything has left."""
        for request, _ in self._leaving:
            request.wait(timedelta(seconds=self.timeout_s))
        self._leaving.clear()

    def note(self, what: Literal["compute", "wait"], piece: int, start_s: float) -> None:
        """Remember what was done since `start_s`."""
        if self.device.type == "cuda" and what == "compute":
            torch.cuda.synchronize(self.device)
        self.activities.append(Activity(what, piece, start_s, time.perf_counter()))


def layers_of(config: LlamaConfig, rank: int, processes: int) -> range:
    """The layers of one process: as even as they divide, the first ones holding one more.

    Raises:
        ValueError: when there are more processes than layers.
    """
    if not 1 <= processes <= config.layers:
        raise ValueError(f"{processes} processes for {config.layers} layers; each needs one at least")
    each, more = divmod(config.layers, processes)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


@torch.inference_mode()
def run_cpp(model: LlamaModel, job: CppJob, wire: Wire) -> tuple[int | None, range, list[torch.Tensor]]:
    """This process's part: the first token (on the last process), its layers, and their KVCache."""
    layers, last = layers_of(model.config, wire.rank, job.processes), wire.rank + 1 == job.processes
    blocks = np.arange(blocks_for(len(job.tokens), BLOCK_TOKENS), dtype=np.int32)
    cache = _cache(model, len(layers), len(blocks))
    chunks = list(pairwise(accumulate(job.sizes, initial=0)))
    width, token = model.config.width, None
    coming = wire.expect((job.sizes[0], width)) if wire.rank else None
    for index, (start, stop) in enumerate(chunks):
        piece = Piece(job.tokens[start:stop], start, blocks, last and stop == len(job.tokens))
        batch = pack([piece], BLOCK_TOKENS, model.embedding.device)
        if coming is None:
            hidden = F.embedding(batch.tokens, model.embedding)
        else:
            hidden = wire.receive(coming, index)
            if index + 1 < len(chunks):  # the next one may come while this one is computed
                coming = wire.expect((job.sizes[index + 1], width))
        start_s = time.perf_counter()
        hidden = through_layers(model, layers, hidden, batch, cache)
        if piece.emits:
            token = int(_logits(model, hidden, batch)[0].argmax())
        wire.note("compute", index, start_s)
        if not last:
            wire.send(hidden)
    wire.flush()
    return token, layers, [cache.read(place, blocks.tolist(), 0, len(job.tokens)) for place in range(len(layers))]


def through_layers(
    model: LlamaModel, layers: range, hidden: torch.Tensor, batch: PackedBatch, cache: KVCache
) -> torch.Tensor:
    """Hidden states, (tokens, width), after some layers of the model, whose keys and values go into `cache`."""
    ops, epsilon, update = model.backend, model.config.norm_epsilon, None
    for index, stored in zip(layers, cache.layers, strict=True):
        layer = model.layers[index]
        normed = ops.add_norm(hidden, update, layer.attention_norm, epsilon)
        query = ops.rotate_and_store(layer.qkv(normed), model.rope, batch, stored, model.config)
        normed = ops.add_norm(hidden, layer.output(ops.attend(query, batch, stored)), layer.ffn_norm, epsilon)
        update = ops.feed_forward(normed, layer.gate_up, layer.down)
    return hidden if update is None else hidden.add_(update)


def _logits(model: LlamaModel, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    rows = hidden[batch.logit_rows]
    return model.head(model.backend.add_norm(rows, None, model.norm, model.config.norm_epsilon))


def _cache(model: LlamaModel, layers: int, blocks: int) -> KVCache:
    config = replace(model.config, layers=layers)
    place = model.embedding
    return KVCache(config, blocks=blocks, block_size_tokens=BLOCK_TOKENS, device=place.device, dtype=place.dtype)


def run_runahead(model: LlamaModel, job: RunaheadJob, wire: Wire) -> tuple[int | None, range, list[torch.Tensor]]:
    """This process's part: the first token and all KVCache on the last process, nothing elsewhere."""
    start = job.bounds[wire.rank - 1] if wire.rank else 0
    stop, last = job.bounds[wire.rank], wire.rank + 1 == job.processes
    blocks = np.arange(blocks_for(stop, BLOCK_TOKENS), dtype=np.int32)
    place = model.embedding
    cache = _cache(model, model.config.layers, len(blocks))
    chain = _Chain(wire, cache, blocks.tolist(), start, stop, last)
    batch = pack([Piece(job.tokens[start:stop], start, blocks, last)], BLOCK_TOKENS, place.device)
    logits = model.forward(batch, cache, chain.pass_on)
    token = int(logits[0].argmax()) if last else None
    wire.note("compute", model.config.layers, chain.since_s)
    wire.flush()
    layers = range(model.config.layers if last else 0)
    return token, layers, [cache.read(layer, chain.blocks, 0, stop) for layer in layers]


class _Chain:
    """The hook of a forward pass: called once the keys and values of a layer's own tokens are in the cache.

    It waits for those of all tokens before, puts them into the cache too, and sends all of them on, before the
    layer attends. Mutable: it asks for a layer ahead.
    """

    def __init__(self, wire: Wire, cache: KVCache, blocks: list[int], start: int, stop: int, last: bool) -> None:
        self.wire, self.cache, self.blocks = wire, cache, blocks
        self.start, self.stop, self.last = start, stop, last
        self.since_s = time.perf_counter()
        self.coming = self._ask()

    def pass_on(self, layer: int) -> None:
        self.wire.note("compute", layer, self.since_s)
        if self.coming is not None:
            prefix = self.wire.receive(self.coming, layer)
            self.cache.write(layer, self.blocks, 0, prefix)
            self.coming = self._ask() if layer + 1 < len(self.cache.layers) else None
        self.since_s = time.perf_counter()
        if not self.last:
            self.wire.send(self.cache.read(layer, self.blocks, 0, self.stop))

    def _ask(self) -> Coming | None:
        if not self.start:
            return None
        _, _, heads, _, width = self.cache.data.shape[1:]
        return self.wire.expect((2, self.start, heads, width))
