"""From what probes found to a latency model, without terms that the data cannot tell apart."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.calibrate.observations import CalibrationError
from mooncake_lab.calibrate.probes import MixedRow, PromptRow, Rows, StepRow
from mooncake_lab.calibrate.settings import ServerSettings
from mooncake_lab.core import sum_in_order
from mooncake_lab.metrics import mean
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, ModelShape, PrefillLatency
from mooncake_lab.perf.calibration import nonnegative_fit

Array = npt.NDArray[np.float64]
_SIGNIFICANT: Final = 4.0
"""Least square of a term's t statistic: about two standard errors."""
_ROUNDING: Final = 1e-14
"""Mean squared relative miss that is rounding."""
_ROUNDS: Final = 30
_HIDDEN: Final = tuple(k / 20 for k in range(21))
"""Values of `Fitted.hidden` that are tried."""
_UNKNOWN: Final = ModelShape(
    name="served model", layers=1, width=1, query_heads=1, kv_heads=1, head_width=1, ffn_width=1, vocabulary=1
)
"""Nothing depends on the shape: no KVCache is moved at a finite rate."""
_SPLIT: Final = "what a prompt costs beside its tokens is not told apart from what a request waits elsewhere"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A latency model that was fitted, and how far it is from the points."""

    model: LatencyModel
    prompt_error: float
    """Mean relative miss of prompts alone."""
    step_error: float
    """The same of decode steps."""
    untold: tuple[str, ...]
    """Sentences about terms that the data do not tell apart; they are 0."""
    hidden: float | None = None
    """How much of the constant part of a decode step an iteration hides behind the computing of its tokens: with 0
    both times add up, with 1 the longer one counts. None for separate workers."""
    mixed_error: float | None = None
    """Mean relative miss of steps that computed a prompt beside decodes."""


def told_apart(columns: Mapping[str, Array], measured_s: Array) -> tuple[dict[str, float], list[str]]:
    """Non-negative coefficients of the terms that the points can tell from 0 and from the others; and the rest.

    The weakest term goes as long as its t statistic is below 2: without it, the points are missed no more.

    Raises:
        ValueError: as `nonnegative_fit`.
    """
    names, dropped = list(columns), list[str]()
    while True:
        found = _coefficients(columns, names, measured_s)
        if len(names) == 1:
            break
        miss = _miss(columns, found, measured_s)
        free = max(1, len(measured_s) - len(names))
        floor = max(miss / free, _ROUNDING)

        def strength(name: str, names: list[str] = names, miss: float = miss, floor: float = floor) -> float:
            others = [each for each in names if each != name]
            without = _miss(columns, _coefficients(columns, others, measured_s), measured_s)
            return (without - miss) / floor

        weakest = min(names, key=strength)
        if strength(weakest) >= _SIGNIFICANT:
            break
        names.remove(weakest)
        dropped.append(weakest)
    return {name: found.get(name, 0.0) for name in columns}, dropped


def _coefficients(columns: Mapping[str, Array], names: Sequence[str], measured_s: Array) -> dict[str, float]:
    found = nonnegative_fit(np.stack([columns[name] for name in names], axis=1), measured_s)
    return dict(zip(names, found.tolist(), strict=True))


def _miss(columns: Mapping[str, Array], found: Mapping[str, float], measured_s: Array) -> float:
    """The sum of squared relative misses."""
    predicted = np.sum([value * columns[name] for name, value in found.items()], axis=0)
    return float(((predicted / measured_s - 1) ** 2).sum())


def fitted(rows: Rows, settings: ServerSettings) -> Fitted:
    """The latency model of a server.

    Raises:
        CalibrationError: when too little was observed.
    """
    rows = typical(rows)
    try:
        decode, untold = _decode(rows.steps)
        if settings.is_disaggregated:
            return _separate(rows, decode, untold)
        tried = [
            _coupled(rows, settings, decode, untold, hidden) for hidden in (_HIDDEN if rows.mixed else (0.0,))
        ]
    except ValueError as error:
        raise CalibrationError(f"what was observed fits no latency model: {error}") from None
    return min(tried, key=lambda each: each.prompt_error + (each.mixed_error or 0.0))


def typical(rows: Rows) -> Rows:
    """The median of each probe over the rounds: a round that something else disturbed decides nothing.

    Errors are weighed relative to the measured time, so one time that is far too short would pull all of them.
    """
    prompts = defaultdict[tuple[int, int], list[float]](list)
    steps = defaultdict[tuple[int, int], list[StepRow]](list)
    mixed = defaultdict[tuple[int, int], list[MixedRow]](list)
    for row in rows.prompts:
        prompts[row.tokens, row.reused_tokens].append(row.ttft_s)
    for row in rows.steps:
        steps[row.batch, row.prompt_tokens].append(row)
    for row in rows.mixed:
        mixed[row.tokens, row.batch].append(row)
    return replace(
        rows,
        prompts=[PromptRow(*lengths, median(found_s)) for lengths, found_s in prompts.items()],
        steps=[
            StepRow(
                batch,
                median(row.context_tokens for row in found),
                median(row.step_s for row in found),
                prompt_tokens,
            )
            for (batch, prompt_tokens), found in steps.items()
        ],
        mixed=[
            MixedRow(*lengths, median(row.context_tokens for row in found), median(row.step_s for row in found))
            for lengths, found in mixed.items()
        ],
    )


def _decode(steps: Sequence[StepRow]) -> tuple[DecodeLatency, list[str]]:
    batch, context, measured_s = np.array([(row.batch, row.context_tokens, row.step_s) for row in steps]).T
    columns = {"constant_s": np.ones_like(batch), "per_request_s": batch, "per_context_token_s": context}
    found, dropped = told_apart(columns, measured_s)
    said = f"within the scatter of {len(steps)} times of decode steps (batches of 1 to {batch.max():.0f})"
    return DecodeLatency(**found), [f"decode {name} is not told apart from 0: it is {said}" for name in dropped]


def _separate(rows: Rows, decode: DecodeLatency, untold: Sequence[str]) -> Fitted:
    """A prefill and a decode worker."""
    tokens, reused, measured_s = np.array([(r.tokens, r.reused_tokens, r.ttft_s) for r in rows.prompts]).T
    columns = {
        "constant_s": np.ones_like(tokens),
        "per_token_s": tokens - reused,
        "per_token_squared_s": tokens**2 - reused**2,
    }
    if reused.any():
        columns["load_s_per_token"] = reused
    found, dropped = told_apart(columns, measured_s)
    whole = PrefillLatency(**found)
    busy_s = [row.each_s - float(whole.seconds(row.tokens)) + whole.constant_s for row in rows.queues]
    constant_s, elsewhere_s, more = _split(busy_s, whole.constant_s)
    prefill = PrefillLatency(**found | {"constant_s": constant_s})
    more.append("the wait before prefill is not told apart from the hand-over to decode: all of it is before")
    model = _model(prefill, decode, HybridLatency.of(prefill, decode), elsewhere_s)
    predicted_s = whole.seconds(tokens, reused)
    error = float(np.abs(predicted_s / measured_s - 1).mean())
    return Fitted(
        model,
        error,
        _step_error(rows.steps, lambda row: float(decode.step_s(row.batch, row.context_tokens))),
        (*untold, *_of_prompts(dropped, rows.prompts), *more),
    )


def _coupled(
    rows: Rows, settings: ServerSettings, decode: DecodeLatency, untold: Sequence[str], hidden: float
) -> Fitted:
    """A worker for both stages, whose iterations take prompts in pieces, for one value of `Fitted.hidden`."""
    alone = [row for row in rows.prompts if not row.reused_tokens]
    measured_s = np.array([row.ttft_s for row in alone])
    pieces = [_pieces(row.tokens, settings.longest_piece) for row in alone]
    floor_s, constant_s = hidden * decode.constant_s, (1 - hidden) * decode.constant_s
    per_token_s, squared_s, dropped = _of_tokens(pieces, measured_s, constant_s, floor_s)
    hybrid = HybridLatency(
        floor_s=floor_s,
        constant_s=constant_s,
        per_token_s=per_token_s,
        per_token_squared_s=squared_s,
        per_request_s=_of_a_request(rows.steps, decode, floor_s, per_token_s),
        per_context_token_s=decode.per_context_token_s,
    )
    computed_s = np.array([_computed_s(hybrid, each) for each in pieces])
    rest_s = max(0.0, mean((measured_s - computed_s).tolist()))
    busy_s = [row.each_s - _computed_s(hybrid, _pieces(row.tokens, settings.longest_piece)) for row in rows.queues]
    begin_s, elsewhere_s, more = _split(busy_s, rest_s)
    prefill = PrefillLatency(constant_s=begin_s, per_token_s=per_token_s, per_token_squared_s=squared_s)
    mixed_s = [begin_s + hybrid.step_s(r.tokens, 0, r.batch, round(r.context_tokens)) for r in rows.mixed]
    if not mixed_s:
        more.append("whether reading weights and computing tokens add up is assumed: no prompt came among decodes")
    return Fitted(
        _model(prefill, decode, hybrid, elsewhere_s),
        float(np.abs((computed_s + rest_s) / measured_s - 1).mean()),
        _step_error(rows.steps, lambda row: hybrid.step_s(0, 0, row.batch, round(row.context_tokens))),
        (*untold, *_of_prompts(dropped, alone), *more),
        hidden,
        mean([abs(s / row.step_s - 1) for s, row in zip(mixed_s, rows.mixed, strict=True)]) if mixed_s else None,
    )


def _of_tokens(
    pieces: Sequence[Sequence[tuple[int, int]]], measured_s: Array, constant_s: float, floor_s: float
) -> tuple[float, float, list[str]]:
    """What a token costs, and the square of a prompt, in iterations with a constant and a floor; what was dropped.

    Below the floor tokens cost nothing, so the floor in tokens is found in rounds.
    """
    tokens = np.array([float(sum(new for new, _ in each)) for each in pieces])
    further_s = np.array([(len(each) - 1) * constant_s for each in pieces])
    once_s = np.maximum(measured_s - further_s, measured_s * 1e-3)
    knee, found, dropped = 0.0, dict[str, float](), list[str]()
    for _ in range(_ROUNDS if floor_s else 1):
        linear = np.array([sum_in_order(max(knee, new) for new, _ in each) for each in pieces])
        columns = {"constant_s": np.ones_like(tokens), "per_token_s": linear, "per_token_squared_s": tokens**2}
        found, dropped = told_apart(columns, once_s)
        if not found["per_token_s"]:
            break
        knee = min(floor_s / found["per_token_s"], float(max(new for each in pieces for new, _ in each)))
    return found["per_token_s"], found["per_token_squared_s"], dropped


def _of_a_request(steps: Sequence[StepRow], decode: DecodeLatency, floor_s: float, per_token_s: float) -> float:
    """What a request costs a decode step beside its token, which is paid beyond the floor only."""
    beyond_s = [max(0.0, per_token_s * row.batch - floor_s) / row.batch for row in steps]
    return max(0.0, decode.per_request_s - mean(beyond_s))


def _pieces(tokens: int, most: int) -> list[tuple[int, int]]:
    """The iterations of a prompt alone: tokens of each, and those before."""
    return [(min(most, tokens - before), before) for before in range(0, tokens, most)]


def _computed_s(hybrid: HybridLatency, pieces: Sequence[tuple[int, int]]) -> float:
    return sum_in_order(hybrid.step_s(new, before) for new, before in pieces)


def _split(busy_s: Sequence[float], together_s: float) -> tuple[float, float, list[str]]:
    """What keeps the next prompt waiting, and what does not, of the constant part of TTFT."""
    if not busy_s:
        return together_s, 0.0, [f"{_SPLIT}: no queue of prompts was observed"]
    constant_s = min(max(0.0, median(busy_s)), together_s)
    return constant_s, together_s - constant_s, []


def _of_prompts(dropped: Sequence[str], rows: Sequence[PromptRow]) -> list[str]:
    longest = max(row.tokens for row in rows)
    said = f"within the scatter of {len(rows)} prompts of up to {longest} tokens"
    return [f"prefill {name} is not told apart from 0: it is {said}" for name in dropped]


def _step_error(steps: Sequence[StepRow], step_s: Callable[[StepRow], float]) -> float:
    return mean([abs(step_s(row) / row.step_s - 1) for row in steps])


def _model(
    prefill: PrefillLatency, decode: DecodeLatency, hybrid: HybridLatency, elsewhere_s: float
) -> LatencyModel:
    nothing = LinkLatency(float("inf"))
    return LatencyModel(
        name="fitted to a server's answers",
        shape=_UNKNOWN,
        prefill=prefill,
        decode=decode,
        hybrid=hybrid,
        transfer=nothing,
        dram=nothing,
        schedule_s=elsewhere_s,
    )
