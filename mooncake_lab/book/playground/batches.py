"""What the widget of dragged requests runs: batching policies over a reader's requests, with a clock.

The widget runs them for its first picture when its page is made. In the browser, Pyodide (CPython as WebAssembly)
imports this module and runs what the reader has changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec

from mooncake_lab.batching import CHUNKED_POLICIES, Iteration, Limits, Progress, named_policy, trace_plans
from mooncake_lab.perf import HybridLatency

POLICY_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "request_level": "FasterTransformer",
        "orca": "Orca",
        "vllm": "vLLM, prompts first",
        "sarathi": "SARATHI",
        "sarathi_serve": "Sarathi-Serve",
        "vllm_chunked": "vLLM, chunked prefill",
    }
)
"""The policies that the page runs, as it calls them."""

_Tokens = Annotated[int, msgspec.Meta(ge=1)]


class DraggedRequest(msgspec.Struct, frozen=True):
    """One request as the reader has set it."""

    arrives_s: Annotated[float, msgspec.Meta(ge=0)]
    prompt_tokens: _Tokens
    output_tokens: _Tokens


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests and the instance that they come to; JSON of it travels between the page and Python."""

    requests: Sequence[DraggedRequest]
    limits: Limits
    latency: HybridLatency
    chunk_tokens: _Tokens
    """Of the policies that cut prompts."""
    max_new_tokens: _Tokens
    """The output that each client allows."""


Kind = Literal["prefill", "decode", "stalled", "waiting"]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the chart, and the times that its client measures; None where there are no tokens for one."""

    bars: list[tuple[Kind, float, float]]
    """What happens to the request from when to when (s). Stalled requests hold blocks, and compute nothing."""
    preempted_s: list[float]
    ttft_s: float | None
    mean_tbt_s: float | None
    longest_tbt_s: float | None
    end_s: float | None
    """Its last token."""


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True):
    """All requests under one policy."""

    rows: list[RequestRow]
    mean_ttft_s: float | None
    longest_tbt_s: float | None
    end_s: float | None
    """The last token of all."""
    until_s: float
    """The end of the last iteration."""


def iterations(scenario: Scenario, policy: str) -> list[Iteration]:
    """The iterations of a policy, until every request is finished or refused.

    Of two requests that arrive together, the one with the lower number comes first.
    """
    arrives_s = [request.arrives_s for request in scenario.requests]
    requests = [
        Progress(
            request_id=i,
            arrival=rank,
            prompt_tokens=scenario.requests[i].prompt_tokens,
            max_new_tokens=scenario.max_new_tokens,
        )
        for rank, i in enumerate(sorted(range(len(arrives_s)), key=arrives_s.__getitem__))
    ]
    return trace_plans(
        named_policy(policy, chunk_tokens=scenario.chunk_tokens if policy in CHUNKED_POLICIES else None),
        requests,
        scenario.limits,
        {i: request.output_tokens for i, request in enumerate(scenario.requests)},
        arrives_s=dict(enumerate(arrives_s)),
        seconds=lambda plan: scenario.latency.batch_s(*plan.work),
    )


def policy_run(scenario: Scenario, policy: str) -> PolicyRun:
    """What the page shows of a policy."""
    log = iterations(scenario, policy)
    rows = [_row(log, i, request.arrives_s) for i, request in enumerate(scenario.requests)]
    ttfts_s = _numbers(row.ttft_s for row in rows)
    return PolicyRun(
        rows=rows,
        mean_ttft_s=fmean(ttfts_s) if ttfts_s else None,
        longest_tbt_s=max(_numbers(row.longest_tbt_s for row in rows), default=None),
        end_s=max(_numbers(row.end_s for row in rows), default=None),
        until_s=log[-1].end_s if log else 0.0,
    )


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _row(log: Sequence[Iteration], request_id: int, arrives_s: float) -> RequestRow:
    """One request, read from the iterations."""
    bars: list[tuple[Kind, float, float]] = []
    tokens_s = [
        step.end_s
        for step in log
        for segment in step.plan.segments
        if segment.request_id == request_id and segment.emits
    ]
    for step in log:
        kind = _kind(step, request_id, arrives_s)
        if kind is None:
            continue
        start_s = max(step.start_s, arrives_s)
        if bars and kind in {"stalled", "waiting"} and (bars[-1][0], bars[-1][2]) == (kind, start_s):
            bars[-1] = (kind, bars[-1][1], step.end_s)
        elif step.end_s > start_s:
            bars.append((kind, start_s, step.end_s))
    gaps_s = [later - earlier for earlier, later in pairwise(tokens_s)]
    return RequestRow(
        bars=bars,
        preempted_s=[step.start_s for step in log if request_id in step.plan.preempted],
        ttft_s=tokens_s[0] - arrives_s if tokens_s else None,
        mean_tbt_s=fmean(gaps_s) if gaps_s else None,
        longest_tbt_s=max(gaps_s, default=None),
        end_s=tokens_s[-1] if tokens_s else None,
    )


def _kind(step: Iteration, request_id: int, arrives_s: float) -> Kind | None:
    """What an iteration is for a request; None where the request is not there."""
    for segment in step.plan.segments:
        if segment.request_id == request_id:
            return segment.kind
    if request_id in step.plan.preempted:
        return "waiting"
    if any(request.request_id == request_id for request in step.running):
        return "stalled"
    waits = any(request.request_id == request_id for request in step.waiting)
    return "waiting" if waits or step.start_s < arrives_s < step.end_s else None


def runs(scenario: str) -> str:
    """All policies: JSON of a `PolicyRun` for each of `POLICY_NAMES`, for the page.

    Args:
        scenario: JSON of a `Scenario`.

    Raises:
        ValueError: when the scenario is not allowed, with what is.
    """
    decoded = msgspec.json.decode(scenario, type=Scenario)
    return msgspec.json.encode({name: policy_run(decoded, name) for name in POLICY_NAMES}).decode()
