"""From the log of a run to the latency model under which the simulator would give it: calibration by doing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Placed, Prefilled, Record
from mooncake_lab.perf import HybridLatency, LatencyModel, LinkLatency
from mooncake_lab.perf.calibration import Calibration, Latency, fit_decode, fit_prefill, times_as_long
from mooncake_lab.perf.latency import DecodeLatency, PrefillLatency


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
class _Reading:
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
    reading = _Reading()
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
