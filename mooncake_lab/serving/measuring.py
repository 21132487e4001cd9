"""What a worker times of itself before the cluster opens: prompts, batches, and transfers to another worker."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from mooncake_lab.engine import Engine, GenerationRequest, KVSpan
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.roles import TokenIds
from mooncake_lab.net import wire
from mooncake_lab.serving.calibration import BATCHES, LEAST_BATCHES, LEAST_PROMPTS, PROMPTS, STEPS
from mooncake_lab.serving.kv_transfer import Identity, borrow, dial, expect
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.messages import Ack, Measured, Probe
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.spec import WorkerSpec

_SHORT_CONTEXT: Final = 4
"""Context of timed batches in a model whose context is too short for those above."""
_REPEATS: Final = 3
_ENOUGH_S: Final = 8.0
"""After so long no further round of prompts begins, so that a large model starts soon."""
_TRANSFERS: Final = 10
"""Timed transfers of each size."""
_PROBES_BYTES: Final = (2**10, 2**16, 2**20, 2**22)


def measure_prefill(
    prefill: Callable[[TokenIds, Sequence[KVSpan]], object], layout: KVLayout, spec: WorkerSpec, vocabulary: int
) -> tuple[tuple[int, int, float], ...]:
    """Rows of prompt tokens, reused tokens and the median of a few times (s); coupled engines reuse none.

    The median, not the fastest: few prompts are served in the fastest of three times.
    """
    is_coupled = spec.role == "coupled"
    longest = min(spec.max_context_tokens, spec.device_tokens) if is_coupled else spec.max_context_tokens
    fit = [part for part in PROMPTS if part[0] < longest and not (part[1] and is_coupled)]
    if len(fit) < LEAST_PROMPTS:  # a model with a very short context
        fit = [(tokens, 0) for tokens in (longest // 4, longest // 2, longest - 1) if tokens > 0]
    times_s: dict[tuple[int, int], list[float]] = {lengths: [] for lengths in fit}
    seeds, start_s = itertools.count(), time.perf_counter()
    for done in range(_REPEATS):  # a moment in which the machine is busy disturbs no length alone
        if done and time.perf_counter() - start_s > _ENOUGH_S:
            break
        for (tokens, reused), found_s in times_s.items():
            prompt = _prompt(tokens, next(seeds), vocabulary)
            found_s.append(_seconds(partial(prefill, prompt, (_filled(layout, reused),) if reused else ())))
    return tuple((*lengths, median(found_s)) for lengths, found_s in times_s.items())


def measure_decode(engine: Engine, layout: KVLayout, spec: WorkerSpec, vocabulary: int) -> Measured:
    """Steps of batches (median), and what loading their KVCache added to the first step."""
    rows, loads, seeds = list[tuple[int, int, float]](), list[tuple[int, float]](), itertools.count()
    for batch, context in (*BATCHES, *((batch, _SHORT_CONTEXT) for batch in (1, 2, 3, 4))):
        most = STEPS + 2 + batch  # a policy may let the requests in one by one
        fits = context + most < spec.max_context_tokens and batch <= (spec.max_requests or batch)
        if not fits or batch * (context + most + spec.block_size_tokens) > spec.device_tokens:
            continue
        if context == _SHORT_CONTEXT and len(rows) >= LEAST_BATCHES:
            break
        for _ in range(batch):
            prompt = _prompt(context, next(seeds), vocabulary)
            request = GenerationRequest(prompt=prompt, max_new_tokens=most, end_tokens=())
            engine.submit(request, kv=(_filled(layout, context),), generated=(0,))
        first_s = _seconds(engine.step)  # loads the KVCache
        while any(request.generated < 2 for request in engine.requests.values()):
            engine.step()
        context_tokens = sum(request.known for request in engine.requests.values())
        step_s = float(np.median([_seconds(engine.step) for _ in range(STEPS)]))
        for request_id in engine.requests:
            engine.cancel(request_id)
        engine.step()
        rows.append((batch, context_tokens + batch * STEPS // 2, step_s))
        loads.append((batch * context * layout.bytes_per_token, max(first_s - step_s, 0.0)))
    return Measured(decode=tuple(rows), load=() if spec.role == "coupled" else tuple(loads))


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
        buffer = None if channel is None else borrow(peer, identity, max(_PROBES_BYTES))
        for size in _PROBES_BYTES * _TRANSFERS:  # a moment in which the machine is busy disturbs no size alone
            payload = np.zeros(size, np.uint8)
            start_s = time.perf_counter()
            link.hold(size)
            pushed = None if channel is None or buffer is None else channel.write(buffer, [payload])
            probe, rest = (Probe(), (payload,)) if pushed is None else (Probe(pushed, size), ())
            wire.send_frame(peer, probe, rest, identity.timeout_s)
            expect(peer, Ack, identity.timeout_s)
            best_s[size] = min(best_s[size], time.perf_counter() - start_s)
    return tuple(best_s.items())


def _prompt(tokens: int, seed: int, vocabulary: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).astype(np.int32)


def _filled(layout: KVLayout, tokens: int) -> KVSpan:
    return layout.span([layer.zero_() for layer in layout.empty(tokens)])


def _seconds(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s
