"""Requests that a reader drags, under batching policies that the reader chooses.

Python writes the page with the first runs in it, as numbers for the chart and in letters for a page without
scripts. `static/drag_requests.js` draws them. What the reader changes is run by `batches` in the browser
(`book/_static/drag-worker.mjs`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import msgspec

from mooncake_lab.batching import CHUNKED_POLICIES, Limits, gantt
from mooncake_lab.book.figures.embed import embedded
from mooncake_lab.book.playground.batches import POLICY_NAMES, DraggedRequest, Scenario, iterations, policy_run
from mooncake_lab.perf import HybridLatency


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

    @property
    def scenario(self) -> Scenario:
        """The requests and the instance at the start."""
        return Scenario(
            requests=self.requests,
            limits=self.limits,
            latency=self.latency,
            chunk_tokens=self.chunk_tokens,
            max_new_tokens=self.max_new_tokens,
        )

    def _repr_html_(self) -> str:
        letters = gantt(iterations(self.scenario, self.policy))
        chart = "\n".join(f"{_letter(i)}  {line}" for i, line in letters.items())
        named = escape(POLICY_NAMES[self.policy])
        return (
            f'<div class="batching-widget" id="{escape(self.name)}" role="group"'
            ' aria-label="Requests to drag, under six batching policies">'
            f"<noscript><p>Dragging needs JavaScript. The start, under {named}, one letter an iteration:</p>"
            f"<pre>{escape(chart)}</pre></noscript>"
            f'<script type="application/json">{self._data()}</script></div>'
            + embedded("widgets.css", "drag_requests.js")
        )

    def _data(self) -> str:
        data = {
            "policies": dict(POLICY_NAMES),
            "chunked": [name for name in POLICY_NAMES if name in CHUNKED_POLICIES],
            "policy": self.policy,
            "machine": self.machine,
            "scenario": msgspec.to_builtins(self.scenario),
            "runs": {name: msgspec.to_builtins(policy_run(self.scenario, name)) for name in POLICY_NAMES},
        }
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _letter(number: int) -> str:
    return chr(ord("A") + number)
