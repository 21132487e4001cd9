"""What chapter 12 serves: slices of a scaled-down trace, and the clusters that serve them, live and simulated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from mooncake_lab.conductor import named_placement
from mooncake_lab.core import TracedRequest, check_scale
from mooncake_lab.serving import LiveSpec
from mooncake_lab.workload import Trace, load, with_poisson_arrivals
from mooncake_lab.workload.prompts import scaled_down

CLUSTERS: Final[Mapping[str, tuple[int, int, int]]] = MappingProxyType(
    {"1P+1D": (1, 1, 0), "2P+1D": (2, 1, 0), "1P+2D": (1, 2, 0), "2 coupled": (0, 0, 2), "1 coupled": (0, 0, 1)}
)
"""Prefill, decode and coupled workers by the name of the cluster."""
_TOKENS: Final = 65_536
"""KVCache of each worker: more than a slice of a trace has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Slices of a scaled-down trace, and the clusters that serve them, live and simulated."""

    workload: str = "toolagent"
    divide: int = 16
    """Divisor of the lengths and of the block size."""
    most_tokens: int = 1024
    """Longer requests are left out."""
    requests: int = 24
    """Requests per run; calibration uses its own, which come earlier in the trace."""
    model: str = "random:lab-tiny"
    device: str = "cpu"
    """On auto, workers take the machine's GPUs in turn."""
    backend: str = "dense"
    dtype: str | None = None
    chunk_tokens: int = 256
    light: float = 0.3
    """Work that arrives, as a share of what one prefill worker can do."""
    overloaded: float = 6.0
    clusters: tuple[str, ...] = ("1P+1D", "2P+1D", "1P+2D", "2 coupled")
    placements: tuple[str, ...] = ("load_balance", "random")
    """Tried on an overloaded 2P+1D besides the default."""
    beat: float = 3.0
    """Seconds that the metronome allots for each second that this machine needs to compute."""
    seed: int = 0

    def spec(self, cluster: str = "1P+1D", placement: str | None = None, **changes: Any) -> LiveSpec:
        """A live cluster of this study."""
        prefill, decode, coupled = CLUSTERS[cluster]
        asked: dict[str, Any] = {
            "model": self.model,
            "seed": self.seed,
            "device": self.device,
            "backend": self.backend,
            "dtype": self.dtype,
            "prefill_nodes": prefill,
            "decode_nodes": decode,
            "coupled_nodes": coupled,
            "cache_tokens": _TOKENS,
            "decode_tokens": _TOKENS,
            "block_size_tokens": self.trace().block_size_tokens,
            "chunk_tokens": self.chunk_tokens,
            "max_request_tokens": 2 * self.most_tokens,
            "spares": 0,  # nothing may compute beside what is measured
            "placement": None if placement is None else named_placement(placement, self.seed),
        }
        return LiveSpec(**(asked | changes))

    def trace(self) -> Trace:
        """The scaled-down trace, lengths divided and sharing kept."""
        return _scaled(self.workload, self.divide, self.most_tokens, self.seed)

    def slice(self, number: int, requests_per_s: float) -> list[TracedRequest]:
        """One slice of `requests` requests as a Poisson process from time 0; slice 0 is for calibration."""
        chosen = list(self.trace().head((number + 1) * self.requests).requests())[number * self.requests :]
        timed = with_poisson_arrivals(self.trace().head(len(chosen)), requests_per_s, seed=self.seed + number)
        return [
            TracedRequest(replace(one.request, arrival_s=float(at_s)), one.output_tokens)
            for one, at_s in zip(chosen, timed.arrival_s, strict=True)
        ]

    def runs(self) -> Iterator[tuple[str, str | None, str]]:
        """Cluster, placement and load of each run that is predicted."""
        for cluster in self.clusters:
            for load_name in ("light", "overloaded"):
                yield cluster, None, load_name
        for placement in self.placements:
            yield "2P+1D", placement, "overloaded"


STUDIES: Final[Mapping[str, Study]] = MappingProxyType(
    {
        "smoke": Study(requests=6, clusters=("1P+1D", "2 coupled"), placements=()),
        "classroom": Study(),
        "full": Study(requests=60),
        "gpu": Study(requests=60, model="random:llama3-8b", device="auto", backend="auto", dtype="bfloat16"),
    }
)
"""What each scale measures."""


def study(scale: str, *, seed: int = 0) -> Study:
    """The study of a scale.

    Raises:
        ValueError: for an unknown scale.
    """
    return replace(STUDIES[check_scale(scale)], seed=seed)


@cache
def _scaled(workload: str, divide: int, most_tokens: int, seed: int) -> Trace:
    return scaled_down(load(workload, seed=seed), divide, most_tokens=most_tokens)
