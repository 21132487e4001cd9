"""Calibration: fit a latency model to measured points, and say by how much it misses each of them.

Errors are weighed relative to the measured time, so that a 1 s point counts as much as a 30 s one.
Coefficients that physics forbids to be negative are not allowed to be. All are rounded to what a measurement can
tell: linear algebra differs in its last digits from processor to processor, and an overloaded cluster makes
another history of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Placed, Prefilled, Record
from mooncake_lab.perf.latency import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency

Array = npt.NDArray[np.float64]
_DIGITS: Final = 9
Model = TypeVar("Model")
Latency = TypeVar("Latency", PrefillLatency, DecodeLatency)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Calibration(Generic[Model]):
    """A fitted model and its misses: `measured_s` and `predicted_s` have one entry a point, in input order."""

    model: Model
    measured_s: Array
    predicted_s: Array

    @property
    def relative_errors(self) -> Array:
        """`(predicted - measured) / measured` of each point."""
        return (self.predicted_s - self.measured_s) / self.measured_s

    @property
    def max_relative_error(self) -> float:
        """The largest miss, as a fraction."""
        return float(np.abs(self.relative_errors).max())

    @property
    def mean_relative_error(self) -> float:
        """The mean miss, as a fraction."""
        return float(np.abs(self.relative_errors).mean())


def as_told(coefficients: Array) -> Array:
    """Fitted coefficients to nine digits: the same on all processors, but for those on the edge of rounding."""
    return np.array([float(f"{coefficient:.{_DIGITS}g}") for coefficient in coefficients.tolist()])


def column_sizes(columns: Array) -> Array:
    """The largest magnitude of each column, or 1 of an empty one: divided by it, columns can be compared."""
    sizes = np.abs(columns).max(axis=0)
    return np.where(sizes == 0, 1.0, sizes)


def nonnegative_fit(columns: Array, measured_s: Array) -> Array:
    """The non-negative coefficients with the least sum of squared relative errors, `as_told`.

    The best non-negative solution is an ordinary least-squares solution on the columns it uses, so the
    few possible subsets are all tried: exact, and shorter than an active-set method.

    Args:
        columns: shape (points, coefficients).
        measured_s: shape (points,), all positive.

    Raises:
        ValueError: when shapes differ, there are fewer points than coefficients, or a time is not positive.
    """
    points, coefficients = columns.shape
    if measured_s.shape != (points,) or points < coefficients:
        raise ValueError(
            f"cannot fit {coefficients} coefficients to {points} points with {measured_s.size} times;"
            " one time a point and at least as many points as coefficients are needed"
        )
    if not (np.isfinite(measured_s).all() and (measured_s > 0).all()):
        raise ValueError(f"measured times go down to {measured_s.min()!r} s; all must be positive and finite")
    relative = columns / measured_s[:, None]
    scale = column_sizes(relative)
    best, best_miss = np.zeros(coefficients), float(points)  # nothing fitted: each point missed by 100 %
    for size in range(1, coefficients + 1):
        for used in map(list, combinations(range(coefficients), size)):
            solution, *_ = np.linalg.lstsq(relative[:, used] / scale[used], np.ones(points), rcond=None)
            solution[np.abs(solution) < 1e-12 * np.abs(solution).max()] = 0  # its sign is rounding
            miss = float(((relative[:, used] / scale[used] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and miss < best_miss:
                best = np.zeros(coefficients)
                best[used], best_miss = solution / scale[used], miss
    return as_told(best)


def fit_prefill(tokens: Array, reused_tokens: Array, measured_s: Array) -> Calibration[PrefillLatency]:
    """Fit a prefill model; the load term is fitted only when some point reuses tokens.

    Args:
        tokens: shape (points,), prompt lengths.
        reused_tokens: shape (points,), how many of them were reused.
        measured_s: shape (points,).

    Raises:
        ValueError: as `nonnegative_fit`.
    """
    columns = [np.ones_like(tokens), tokens - reused_tokens, tokens**2 - reused_tokens**2]
    if reused_tokens.any():
        columns.append(reused_tokens)
    found = nonnegative_fit(np.stack(columns, axis=1), measured_s).tolist()
    model = PrefillLatency(
        constant_s=found[0],
        per_token_s=found[1],
        per_token_squared_s=found[2],
        load_s_per_token=found[3] if len(found) > 3 else 0.0,
    )
    return Calibration(model=model, measured_s=measured_s, predicted_s=model.seconds(tokens, reused_tokens))


def fit_decode(batch: Array, context_tokens: Array, measured_s: Array) -> Calibration[DecodeLatency]:
    """Fit a decode model; where all points have one batch size, the cost per request is inside the constant.

    Args:
        batch: shape (points,), requests in the batch.
        context_tokens: shape (points,), cached tokens of the batch together.
        measured_s: shape (points,), seconds of one step.

    Raises:
        ValueError: as `nonnegative_fit`.
    """
    alone = bool((batch == batch[0]).all())
    columns = [np.ones_like(batch), context_tokens] if alone else [np.ones_like(batch), context_tokens, batch]
    found = nonnegative_fit(np.stack(columns, axis=1), measured_s).tolist()
    model = DecodeLatency(found[0], 0.0 if alone else found[2], found[1])
    return Calibration(model=model, measured_s=measured_s, predicted_s=model.step_s(batch, context_tokens))


def fit_link(size_bytes: Array, measured_s: Array) -> Calibration[LinkLatency]:
    """Fit a link or tier: latency and bandwidth.

    Raises:
        ValueError: as `nonnegative_fit`, or when the times do not grow with the bytes.
    """
    latency_s, per_byte_s = nonnegative_fit(np.stack([np.ones_like(size_bytes), size_bytes], axis=1), measured_s)
    if per_byte_s <= 0:
        raise ValueError(f"times of {size_bytes.size} transfers do not grow with their bytes; no bandwidth fits")
    model = LinkLatency(float(1 / per_byte_s), float(latency_s))
    return Calibration(model=model, measured_s=measured_s, predicted_s=model.seconds(size_bytes))


def per_request_cost_s(
    batch: Array, relative_latency: Array, context_tokens_each: float, alone: DecodeLatency
) -> Calibration[DecodeLatency]:
    """Give a batch-1 decode model its cost per request, from latencies whose unit is unknown (arXiv Fig. 2).

    The unit follows from batch 1, where `alone` knows the seconds; its slope with context is kept.

    Raises:
        ValueError: when no point has batch 1, or as `nonnegative_fit`.
    """
    if not (batch == 1).any():
        raise ValueError(f"batches are {batch.tolist()}; one of them must be 1 to find the unit")
    unit_s = alone.step_s(1.0, context_tokens_each) / float(relative_latency[batch == 1][0])
    measured_s = relative_latency * unit_s
    context_s = alone.per_context_token_s * context_tokens_each * batch
    constant_s, per_request_s = nonnegative_fit(
        np.stack([np.ones_like(batch), batch], axis=1), measured_s - context_s
    )
    model = DecodeLatency(float(constant_s), float(per_request_s), alone.per_context_token_s)
    predicted_s = model.step_s(batch, context_tokens_each * batch)
    return Calibration(model=model, measured_s=measured_s, predicted_s=predicted_s)


def times_as_long(latency: Latency, factor: float) -> Latency:
    """The same latency with each of its seconds multiplied."""
    seconds = {
        field.name: factor * getattr(latency, field.name) for field in fields(latency) if "_s" in field.name
    }
    return replace(latency, **seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogCalibration:
    """A latency model fitted to a run, and how well it fits."""

    model: LatencyModel
    prefill: Calibration[PrefillLatency]
    decode: Calibration[DecodeLatency]
    start_s: tuple[float, ...]
    """From placement to the start of prefill, of requests that found their prefill worker idle."""
    between_s: tuple[float, ...]
    """From the end of a prompt to the start of one that waited for it: storing blocks, announcing them."""
    handover_s: tuple[float, ...]
    """From the end of prefill to the first token, of requests that found their decode worker idle."""


@dataclass(slots=True)
class _LogReading:
    """What a log says, read front to back. Mutable for that reason."""

    inputs: dict[int, int] = field(default_factory=dict[int, int])
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    placed: dict[int, Placed] = field(default_factory=dict[int, Placed])
    prefilling: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    decoding: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    found_idle: set[int] = field(default_factory=set[int])
    ended_s: dict[int, float] = field(default_factory=dict[int, float])
    prefills: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    steps: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    start_s: list[float] = field(default_factory=list[float])
    between_s: list[float] = field(default_factory=list[float])
    latest_s: dict[str, float] = field(default_factory=dict[str, float])
    handover_s: list[float] = field(default_factory=list[float])

    def read(self, record: Record) -> None:
        match record:
            case Arrived():
                self.inputs[record.request_id] = record.input_tokens
            case Placed():
                queue = self.prefilling.setdefault(record.prefill_instance, set())
                if not queue and not record.fetched_tokens:
                    self.found_idle.add(record.request_id)
                queue.add(record.request_id)
                self.placed[record.request_id] = record
            case Prefilled():
                self._prefilled(record)
            case FirstToken():
                self._first(record)
            case DecodeStretch():
                self._stretch(record)
            case Finished():
                self.decoding[self.placed[record.request_id].decode_instance].discard(record.request_id)
            case _:
                pass

    def _prefilled(self, record: Prefilled) -> None:
        tokens = record.computed_tokens + record.reused_tokens
        self.prefills.append((float(tokens), float(record.reused_tokens), record.at_s - record.start_s))
        placed, latest_s = self.placed[record.request_id], self.latest_s.get(record.instance)
        if latest_s is not None and placed.at_s < latest_s and not placed.fetched_tokens:
            self.between_s.append(max(0.0, record.start_s - latest_s))
        self.latest_s[record.instance] = record.at_s
        if record.request_id in self.found_idle:
            self.start_s.append(record.start_s - placed.at_s)
        self.prefilling[record.instance].discard(record.request_id)
        self.ended_s[record.request_id] = record.at_s

    def _first(self, record: FirstToken) -> None:
        batch = self.decoding.setdefault(self.placed[record.request_id].decode_instance, set())
        if not batch:
            self.handover_s.append(record.at_s - self.ended_s[record.request_id])
        batch.add(record.request_id)
        self.tokens[record.request_id] = 1

    def _stretch(self, record: DecodeStretch) -> None:
        batch = len(record.request_ids)
        context = sum(self.inputs[one] + self.tokens[one] - 1 for one in record.request_ids)
        for k in {0, record.steps - 1}:
            seconds = record.first_step_s + k * record.step_growth_s
            if seconds > 0:
                self.steps.append((float(batch), float(context + k * batch), seconds))
        for one in record.request_ids:
            self.tokens[one] += record.steps


def model_from_log(records: Iterable[Record], base: LatencyModel) -> LogCalibration:
    """Fit a latency model to what the prefill and decode instances of a run did.

    Prefill and decode are fitted to their spans and steps, and then scaled so that the fitted seconds add up to
    the measured ones: the fit follows the typical request, but queues grow with the sum. What a request waits
    beside them is the median over those that met idle instances: until prefill starts (`schedule_s`), and until
    the first token is shown (the latency of a transfer; its bandwidth is the base's, since bytes that move while
    prefill runs show none). The mean gap between a prompt and the next one in the queue (`between_s`) is
    added to each prefill, because it delays the next request. It is subtracted from the hand-over, down to zero.
    The cost of coupled workers does not include it.

    Args:
        records: a run without faults on prefill and decode instances.
        base: gives the rest: the shape, bandwidths.

    Raises:
        ValueError: when the run is too short to fit, or never met an idle instance.
    """
    reading = _LogReading()
    for record in records:
        reading.read(record)
    prompts, steps = _columns(reading.prefills, "prefills"), _columns(reading.steps, "decode steps")
    prefill, decode = fit_prefill(*prompts), fit_decode(*steps)
    if not reading.start_s or not reading.handover_s:
        raise ValueError("no request of this run met idle instances; calibrate with a lighter one")
    between_s = float(np.mean(reading.between_s)) if reading.between_s else 0.0
    first = _adding_up(prefill.model, prefill.model.seconds(*prompts[:2]), prompts[2])
    second = _adding_up(decode.model, decode.model.step_s(*steps[:2]), steps[2])
    hybrid = HybridLatency.of(first, second)  # a coupled worker stores nothing between two prompts
    first = replace(first, constant_s=first.constant_s + between_s)
    model = replace(
        base,
        name=f"{base.shape.name}, fitted to the log of a run",
        prefill=first,
        decode=second,
        hybrid=hybrid,
        transfer=replace(base.transfer, latency_s=max(0.0, float(np.median(reading.handover_s)) - between_s)),
        dram=LinkLatency(float("inf")),  # loading is a part of the hand-over that was measured
        schedule_s=max(0.0, float(np.median(reading.start_s))),
    )
    return LogCalibration(
        model=model,
        prefill=prefill,
        decode=decode,
        start_s=tuple(reading.start_s),
        between_s=tuple(reading.between_s),
        handover_s=tuple(reading.handover_s),
    )


def _adding_up(model: Latency, fitted_s: np.ndarray, measured_s: np.ndarray) -> Latency:
    """The same model, all its seconds times one factor; without it a few slow spans would be forgotten."""
    return times_as_long(model, float(measured_s.sum() / fitted_s.sum()))


def _columns(rows: Sequence[tuple[float, float, float]], what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not rows:
        raise ValueError(f"this run has no {what} to fit to")
    first, second, third = np.array(rows).T
    return first, second, third
