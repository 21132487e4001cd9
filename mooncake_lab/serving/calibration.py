"""A short measurement of workers, and the latency model that fits it: what the Conductor believes about time."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from mooncake_lab.core import sum_in_order
from mooncake_lab.engine import Engine, GenerationRequest, KVSpan
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.roles import Prompt
from mooncake_lab.net import wire
from mooncake_lab.perf import HybridLatency, LatencyModel, LinkLatency, ModelShape
from mooncake_lab.perf.calibration import fit_decode, fit_link, fit_prefill
from mooncake_lab.serving.kv_transfer import Identity, borrow, dial, expect
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.messages import Ack, Measured, Probe
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.spec import WorkerSpec

_PROMPTS: Final = (
    *((tokens, 0) for tokens in (16, 64, 128, 256, 512, 1024, 2048)),
    *((512, 256), (1024, 768), (2048, 1792)),
)
"""Tokens and how many of them are reused. The longest ones decide the quadratic term."""
_BATCHES: Final = ((1, 32), (1, 512), (4, 128), (8, 64), (16, 32), (16, 128))
"""Requests of a batch and the context of each."""
_SHORT_CONTEXT: Final = 4
"""Of batches in a window in which those above have no room."""
_LEAST_PROMPTS: Final = 3
_LEAST_BATCHES: Final = 3
"""Of each so many are needed to fit a latency model, which has three coefficients for each."""
_STEPS: Final = 6
_REPEATS: Final = 3
_ENOUGH_S: Final = 8.0
"""After so long no further round of prompts begins, so that a large model starts soon."""
_LEAST_LIMIT_S: Final = 120.0
_MOST_LIMIT_S: Final = 3600.0
_SLOWEST_FLOPS: Final = 5e9
"""Far below one core: a thread that computes without vector instructions."""
_TRANSFERS: Final = 10
"""Of each size."""
_PROBES_BYTES: Final = (2**10, 2**16, 2**20, 2**22)


def measuring_limit_s(shape: ModelShape) -> float:
    """How long a worker may take to time itself; after one slow round of prompts there is no second."""
    tokens = sum(tokens - reused for tokens, reused in _PROMPTS)
    tokens += sum(batch * (_STEPS + 2 + batch) for batch, _ in _BATCHES)
    return min(_LEAST_LIMIT_S + 2 * shape.parameters * tokens / _SLOWEST_FLOPS, _MOST_LIMIT_S)


def measure_prefill(
    prefill: Callable[[Prompt, Sequence[KVSpan]], object], layout: KVLayout, spec: WorkerSpec, vocabulary: int
) -> tuple[tuple[int, int, float], ...]:
    """Rows of prompt tokens, reused tokens and the median of a few times (s); coupled engines reuse none.

    The median, not the fastest: few prompts are served in the fastest of three times.
    """
    is_coupled = spec.role == "coupled"
    longest = min(spec.window, spec.device_tokens) if is_coupled else spec.window
    fit = [part for part in _PROMPTS if part[0] < longest and not (part[1] and is_coupled)]
    if len(fit) < _LEAST_PROMPTS:  # a model with a very short window
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
    for batch, context in (*_BATCHES, *((batch, _SHORT_CONTEXT) for batch in (1, 2, 3, 4))):
        most = _STEPS + 2 + batch  # a policy may let the requests in one by one
        fits = context + most < spec.window and batch <= (spec.max_requests or batch)
        if not fits or batch * (context + most + spec.block_size_tokens) > spec.device_tokens:
            continue
        if context == _SHORT_CONTEXT and len(rows) >= _LEAST_BATCHES:
            break
        for _ in range(batch):
            prompt = _prompt(context, next(seeds), vocabulary)
            request = GenerationRequest(prompt=prompt, max_new_tokens=most, end_tokens=())
            engine.submit(request, kv=(_filled(layout, context),), generated=(0,))
        first_s = _seconds(engine.step)  # loads the KVCache
        while any(request.generated < 2 for request in engine.requests.values()):
            engine.step()
        context_tokens = sum(request.known for request in engine.requests.values())
        step_s = float(np.median([_seconds(engine.step) for _ in range(_STEPS)]))
        for request_id in engine.requests:
            engine.cancel(request_id)
        engine.step()
        rows.append((batch, context_tokens + batch * _STEPS // 2, step_s))
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


def latency_model(shape: ModelShape, measured: list[Measured], name: str) -> LatencyModel:
    """The latency model that fits what the workers of a cluster measured of themselves.

    Args:
        shape: of the model they run.
        measured: of one worker of each role, in any order.
        name: what it was fitted to.

    Raises:
        ValueError: when too little was measured to fit.
    """
    prefill = np.array([row for part in measured for row in part.prefill], dtype=np.float64)
    decode = np.array([row for part in measured for row in part.decode], dtype=np.float64)
    sent = np.array([row for part in measured for row in part.transfer], dtype=np.float64)
    loaded = [row for part in measured for row in part.load]
    if len(prefill) < _LEAST_PROMPTS or len(decode) < _LEAST_BATCHES:
        raise ValueError(
            f"{len(prefill)} prefills and {len(decode)} decode batches fit and were timed; at least"
            f" {_LEAST_PROMPTS} and {_LEAST_BATCHES} are needed: the longest context (that of the model, or"
            " max_model_len) or an engine's KVCache (max_total_tokens) is too small"
        )
    first = fit_prefill(prefill[:, 0], prefill[:, 1], prefill[:, 2]).model
    second = fit_decode(decode[:, 0], decode[:, 1], decode[:, 2]).model
    # coupled workers move nothing: their KVCache is where it is needed
    transfer = fit_link(sent[:, 0], sent[:, 1]).model if sent.size else LinkLatency(float("inf"))
    read = [row for part in measured for row in part.ssd]
    return LatencyModel(
        name=name,
        shape=shape,
        prefill=first,
        decode=second,
        hybrid=HybridLatency.of(first, second),
        transfer=transfer,
        dram=_link(loaded),
        ssd=_link(read) if read else None,
    )


def _link(moves: list[tuple[int, float]]) -> LinkLatency:
    """The bandwidth of loads that are too short for a latency to be told apart."""
    seconds = sum_in_order(row[1] for row in moves)
    return LinkLatency(sum(row[0] for row in moves) / seconds if seconds else float("inf"))


def _prompt(tokens: int, seed: int, vocabulary: int) -> Prompt:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).astype(np.int32)


def _filled(layout: KVLayout, tokens: int) -> KVSpan:
    return layout.span([layer.zero_() for layer in layout.empty(tokens)])


def _seconds(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s
