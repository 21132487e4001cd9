"""Prefill over processes of this machine: equal to one process, what was sent, and how much of it overlapped."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab.engine import KVSpan, PrefillEngine, load_model
from mooncake_lab.engine.pipeline import Crew, CrewSpec, Together, cpp_prefill, overlap_share, runahead_prefill
from mooncake_lab.perf import model_shape
from mooncake_lab.perf.runahead import even_bounds, traffic_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """One prompt by one process, and over several by chunked pipelines and by KV-Runahead."""

    model: str = "lab-30m"
    processes: int = 2
    prompt_tokens: int = 768
    chunk_tokens: int = 96
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "dense"
    """Backend of the operators; the dense one compiles nothing, so the workers start quickly."""
    timeout_s: float = 600.0
    seed: int = 0


def measure(setting: Live) -> tuple[pd.DataFrame, Mapping[str, pd.DataFrame]]:
    """Prefill one prompt every way over 2 up to all processes.

    Returns:
        Rows of way, over, seconds, same_token, kv_difference, sent_bytes, predicted_bytes, overlap; and, of the
        prefills over all processes, the timeline of each way.

    Raises:
        ProcessDiedError: when a process dies or fails.
    """
    shape, name = model_shape(setting.model), f"random:{setting.model}"
    rng = np.random.default_rng(setting.seed)
    tokens = rng.integers(0, shape.vocabulary, setting.prompt_tokens).astype(np.int32)
    model = load_model(
        name, device=setting.device, dtype=setting.dtype, backend=setting.backend, seed=setting.seed
    )
    engine = PrefillEngine(model)
    engine.prefill(tokens[:8])  # the first one warms up
    alone = engine.prefill(tokens)
    rows: list[dict[str, Any]] = [{"way": "one process", "over": 1, "seconds": alone.seconds, "same_token": True}]
    charts: dict[str, pd.DataFrame] = {}
    with Crew(_spec(setting, name)) as crew:
        cpp_prefill(crew, tokens, chunk_tokens=setting.chunk_tokens)  # likewise
        for over in range(2, setting.processes + 1):
            bounds = even_bounds(len(tokens), over)
            hops = (over - 1) * len(tokens) * shape.width * shape.bytes_per_element
            sent = traffic_tokens(bounds) * shape.kv_bytes_per_token
            chunked = cpp_prefill(crew, tokens, chunk_tokens=setting.chunk_tokens, processes=over)
            chained = runahead_prefill(crew, tokens, bounds=bounds)
            for way, found, predicted in (("CPP", chunked, hops), ("KV-Runahead", chained, sent)):
                rows.append({"way": way, "over": over} | _row(found, alone.first_token, alone.kv, predicted))
                charts[way] = pd.DataFrame(timeline(found))
    return pd.DataFrame(rows).fillna(0.0), charts


def timeline(found: Together) -> list[dict[str, Any]]:
    """Rows of rank, what (compute or wait), piece, start_ms and end_ms, from the first activity on."""
    begin_s = min(each.start_s for share in found.shares for each in share.activities)
    return [
        {
            "rank": share.rank,
            "what": each.what,
            "piece": each.piece,
            "start_ms": 1000 * (each.start_s - begin_s),
            "end_ms": 1000 * (each.end_s - begin_s),
        }
        for share in found.shares
        for each in share.activities
    ]


def _spec(setting: Live, name: str) -> CrewSpec:
    return CrewSpec(
        model=name,
        processes=setting.processes,
        device=setting.device,
        dtype=setting.dtype,
        backend=setting.backend,
        seed=setting.seed,
        timeout_s=setting.timeout_s,
    )


def _row(found: Together, token: int, kv: KVSpan, predicted_bytes: int) -> dict[str, Any]:
    apart = [float((a - b.cpu()).abs().max()) for a, b in zip(found.kv, kv.layers, strict=True)]
    return {
        "seconds": found.seconds,
        "same_token": found.first_token == token,
        "kv_difference": max(apart),
        "sent_bytes": found.sent_bytes,
        "predicted_bytes": predicted_bytes,
        "overlap": overlap_share(found.shares),
    }
