"""A short measurement of a worker's own engine and network, to which the Conductor's estimates are fitted."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from mooncake_lab.engine import CoupledEngine, DecodeEngine, GenerationRequest, KVSpan, LlamaModel, PrefillEngine
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.roles import Prompt
from mooncake_lab.engine.sequence import RunningRequest
from mooncake_lab.serving.kv_transfer import (
    Identity,
    borrow,
    dial,
    expect,
)
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.messages import (
    Ack,
    Measured,
    Probe,
)
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.spec import WorkerSpec
from mooncake_lab.store.backends import wire

_PROMPTS: Final = ((16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (512, 256), (1024, 768))
"""Tokens and how many of them are reused."""
_BATCHES: Final = ((1, 32), (1, 512), (4, 128), (8, 64), (16, 32), (16, 128))
"""Requests of a batch and the context of each."""
_STEPS: Final = 6
_REPEATS: Final = 3
_TRANSFERS: Final = 10
"""Of each size."""
_PROBES_BYTES: Final = (2**10, 2**16, 2**20, 2**22)


def measure_prefill(
    engine: PrefillEngine, model: LlamaModel, shape: KVLayout, spec: WorkerSpec
) -> tuple[tuple[int, int, float], ...]:
    """Rows of prompt tokens, reused tokens and the fastest of a few times (s)."""
    rows: list[tuple[int, int, float]] = []
    for tokens, reused in _PROMPTS:
        if tokens < spec.max_model_len:
            prefix = (_filled(shape, reused),) if reused else ()
            best_s = min(_prefill_s(engine, _prompt(model, tokens), prefix) for _ in range(_REPEATS))
            rows.append((tokens, reused, best_s))
    return tuple(rows)


def measure_decode(engine: DecodeEngine, model: LlamaModel, shape: KVLayout, spec: WorkerSpec) -> Measured:
    """Steps of batches (median), and what loading their KVCache added to the first step."""
    rows: list[tuple[int, int, float]] = []
    loads: list[tuple[int, float]] = []
    for batch, context in _BATCHES:
        fits = context + _STEPS + 1 < spec.max_model_len
        if not fits or batch > spec.max_requests or batch * (context + _STEPS + 16) > spec.decode_tokens:
            continue
        for _ in range(batch):
            request = GenerationRequest(prompt=_prompt(model, context), max_new_tokens=_STEPS + 2, end_tokens=())
            engine.submit(request, first_token=0, kv=(_filled(shape, context),))
        first_s = _seconds(engine.step)  # loads the KVCache
        times_s = [_seconds(engine.step) for _ in range(_STEPS)]
        engine.run()
        step_s = float(np.median(times_s))
        rows.append((batch, batch * (context + _STEPS // 2 + 2), step_s))
        loads.append((batch * context * shape.bytes_per_token, max(first_s - step_s, 0.0)))
    return Measured(decode=tuple(rows), load=tuple(loads))


def measure_coupled(engine: CoupledEngine, model: LlamaModel, spec: WorkerSpec) -> Measured:
    """Both stages of a coupled engine; nothing is reused, since every prompt differs."""
    prefill: list[tuple[int, int, float]] = []
    decode: list[tuple[int, int, float]] = []
    seed = 0
    for tokens, reused in _PROMPTS:
        if reused or tokens >= spec.max_model_len:
            continue
        times_s: list[float] = []
        for _ in range(_REPEATS):
            seed += 1
            engine.submit(GenerationRequest(prompt=_prompt(model, tokens, seed), max_new_tokens=1, end_tokens=()))
            times_s.append(_seconds(engine.run))
        prefill.append((tokens, 0, min(times_s)))
    for batch, context in _BATCHES:
        if batch > spec.max_requests or batch * (context + _STEPS + 16) > spec.decode_tokens:
            continue
        for _ in range(batch):
            seed += 1
            engine.submit(
                GenerationRequest(prompt=_prompt(model, context, seed), max_new_tokens=64, end_tokens=())
            )
        while any(request.generated < 1 for request in _all(engine)):
            engine.step()
        engine.step()
        context_tokens = sum(request.known for request in _all(engine))
        times_s = [_seconds(engine.step) for _ in range(_STEPS)]
        for request in _all(engine):
            engine.cancel(request.id)
        engine.step()
        decode.append((batch, context_tokens + batch * _STEPS // 2, float(np.median(times_s))))
    return Measured(prefill=tuple(prefill), decode=tuple(decode))


def measure_transfer(
    port: int, identity: Identity, link: PacedLink, channel: TransferEngineChannel | None = None
) -> tuple[tuple[int, float], ...]:
    """Rows of bytes and the fastest of a few times until they were acknowledged (s), by the way KVCache takes.

    Raises:
        OSError: when the other worker is gone.
        StorageError: when it refuses.
    """
    best_s = dict.fromkeys(_PROBES_BYTES, float("inf"))
    with dial(port, identity) as peer:
        window = None if channel is None else borrow(peer, identity, max(_PROBES_BYTES))
        for size in _PROBES_BYTES * _TRANSFERS:  # a moment in which the machine is busy disturbs no size alone
            payload = np.zeros(size, np.uint8)
            start_s = time.perf_counter()
            link.hold(size)
            pushed = None if channel is None or window is None else channel.write(window, [payload])
            probe, rest = (Probe(), (payload,)) if pushed is None else (Probe(pushed, size), ())
            wire.send_frame(peer, probe, rest, identity.timeout_s)
            expect(peer, Ack, identity.timeout_s)
            best_s[size] = min(best_s[size], time.perf_counter() - start_s)
    return tuple(best_s.items())


def _all(engine: CoupledEngine) -> list[RunningRequest]:
    return list(engine.engine.requests.values())


def _prompt(model: LlamaModel, tokens: int, seed: int = 0) -> Prompt:
    return np.random.default_rng(seed).integers(0, model.config.vocabulary, tokens).astype(np.int32)


def _filled(shape: KVLayout, tokens: int) -> KVSpan:
    return shape.span([layer.zero_() for layer in shape.empty(tokens)])


def _prefill_s(engine: PrefillEngine, prompt: Prompt, prefix: tuple[KVSpan, ...]) -> float:
    return _seconds(lambda: engine.prefill(prompt, prefix=prefix))


def _seconds(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s
