"""Requests that a reader drags, under batching policies that the reader chooses.

The page steps the policies itself (`static/batching.js`) and draws them (`static/drag_requests.js`). What Python
writes is the start: the requests, the limits, the latency model, and the first run in letters, for a page without
scripts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from types import MappingProxyType
from typing import Final

from mooncake_lab.batching import (
    CHUNKED_POLICIES,
    Iteration,
    Limits,
    Progress,
    gantt,
    named_policy,
    trace_plans,
)
from mooncake_lab.book.figures.embed import embedded
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
"""The policies that the page can step, as it calls them."""


@dataclass(frozen=True, slots=True)
class DraggedRequest:
    """One request at the start."""

    arrives_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DragRequests:
    """The widget. Its requests are called A, B, C and so on; each client allows `max_new_tokens`."""

    name: str
    requests: Sequence[DraggedRequest]
    limits: Limits
    latency: HybridLatency
    machine: str
    """What the latency model describes."""
    policy: str = "vllm"
    chunk_tokens: int = 512
    max_new_tokens: int = 256

    def run(self, policy: str) -> list[Iteration]:
        """The requests under a policy, stepped by the package."""
        requests = [
            Progress(
                request_id=i,
                arrival=i,
                prompt_tokens=request.prompt_tokens,
                max_new_tokens=self.max_new_tokens,
            )
            for i, request in enumerate(self.requests)
        ]
        return trace_plans(
            named_policy(policy, chunk_tokens=self.chunk_tokens if policy in CHUNKED_POLICIES else None),
            requests,
            self.limits,
            {i: request.output_tokens for i, request in enumerate(self.requests)},
            arrives_s={i: request.arrives_s for i, request in enumerate(self.requests)},
            seconds=lambda plan: self.latency.batch_s(*plan.work),
        )

    def _repr_html_(self) -> str:
        letters = gantt(self.run(self.policy))
        chart = "\n".join(f"{_letter(i)}  {line}" for i, line in letters.items())
        named = escape(POLICY_NAMES[self.policy])
        return (
            f'<div class="batching-widget" id="{escape(self.name)}" role="group"'
            ' aria-label="Requests to drag, under six batching policies">'
            f"<noscript><p>Dragging needs JavaScript. The start, under {named}, one letter an iteration:</p>"
            f"<pre>{escape(chart)}</pre></noscript>"
            f'<script type="application/json">{self._data()}</script></div>'
            + embedded("widgets.css", "batching.js", "drag_requests.js")
        )

    def _data(self) -> str:
        limits = self.limits
        data = {
            "policies": dict(POLICY_NAMES),
            "chunked": [name for name in POLICY_NAMES if name in CHUNKED_POLICIES],
            "policy": self.policy,
            "chunk": self.chunk_tokens,
            "maxNewTokens": self.max_new_tokens,
            "machine": self.machine,
            "requests": [
                {
                    "arrivalS": each.arrives_s,
                    "promptTokens": each.prompt_tokens,
                    "outputTokens": each.output_tokens,
                }
                for each in self.requests
            ],
            "limits": {
                "maxBatchTokens": limits.max_batch_tokens,
                "maxRequests": limits.max_requests,
                "blockTokens": limits.block_size_tokens,
                "capacityBlocks": limits.capacity_blocks,
            },
            "latency": asdict(self.latency),
        }
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _letter(number: int) -> str:
    return chr(ord("A") + number)
