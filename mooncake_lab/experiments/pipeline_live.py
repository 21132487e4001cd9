"""Prefill over processes of this machine: equal to one process, what was sent, and how much of it overlapped."""

from collections.abc import Iterable, Mapping
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
    """One prompt by one process, by chunked pipelines, and by KV-Runahead, over 2 up to `processes` processes."""

    model: str = "lab-30m"
    processes: int = 2
    prompt_tokens: int = 768
    chunk_tokens: int = 96
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a way and number of processes: equality, traffic beside the formula, seconds, overlap."""
        shape, name = model_shape(self.model), f"random:{self.model}"
        rng = np.random.default_rng(self.seed)
        tokens = rng.integers(0, shape.vocabulary, self.prompt_tokens).astype(np.int32)
        engine = PrefillEngine(load_model(name, device=self.device, dtype=self.dtype, seed=self.seed))
        engine.prefill(tokens[:8])  # whatever is compiled on first use is compiled
        alone = engine.prefill(tokens)
        yield {"way": "one process", "over": 1, "seconds": alone.seconds, "same_token": True, "kv_difference": 0.0,
               "sent_bytes": 0, "predicted_bytes": 0, "overlap": 0.0}  # fmt: skip  # one row of a table
        spec = CrewSpec(model=name, processes=self.processes, device=self.device, dtype=self.dtype, seed=self.seed)
        item = shape.bytes_per_element
        with Crew(spec) as crew:
            cpp_prefill(crew, tokens, chunk_tokens=self.chunk_tokens)  # the first one warms up
            for over in range(2, self.processes + 1):
                found = cpp_prefill(crew, tokens, chunk_tokens=self.chunk_tokens, processes=over)
                hops = (over - 1) * len(tokens) * shape.width * item
                yield {"way": "CPP", "over": over, **_row(found, alone.first_token, alone.kv, hops)}
                bounds = even_bounds(len(tokens), over)
                found = runahead_prefill(crew, tokens, bounds=bounds)
                sent = traffic_tokens(bounds) * shape.kv_bytes_per_token
                yield {"way": "KV-Runahead", "over": over, **_row(found, alone.first_token, alone.kv, sent)}


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


def activity(setting: Live, way: str = "CPP") -> pd.DataFrame:
    """Who computed and who waited when, in one prefill over all processes of a setting.

    Returns:
        Rows of rank, what (compute or wait), piece, start_ms, end_ms, from the first activity on.
    """
    rng = np.random.default_rng(setting.seed)
    tokens = rng.integers(0, model_shape(setting.model).vocabulary, setting.prompt_tokens).astype(np.int32)
    spec = CrewSpec(model=f"random:{setting.model}", processes=setting.processes, seed=setting.seed)

    def once(crew: Crew) -> Together:
        if way == "CPP":
            return cpp_prefill(crew, tokens, chunk_tokens=setting.chunk_tokens)
        return runahead_prefill(crew, tokens, bounds=even_bounds(len(tokens), setting.processes))

    with Crew(spec) as crew:
        once(crew)  # the first one warms up
        return pd.DataFrame(timeline(once(crew)))


def timeline(found: Together) -> list[dict[str, Any]]:
    """Rows of a timeline, in milliseconds from the first activity on."""
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
