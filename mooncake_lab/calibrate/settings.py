"""What has to be known about a server beside its times: read where it says so, else assumed and shown so."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mooncake_lab.calibrate.observations import CalibrationError
from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec
from mooncake_lab.cluster.spec import SMALL_TOKENS

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{([^{}]*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MOST: Final = 2**31
TEMPLATE_TOKENS: Final = 16
"""That a chat template may add to a prompt."""
DISAGGREGATED: Final = "disaggregated"
SCHEDULERS: Final = (*COUPLED_SYSTEMS, DISAGGREGATED)
"""How a server plans its iterations: the systems of the command line, or separate workers for the two stages."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a server tells Prometheus: name, labels and value of each sample."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of a name with these labels; None without any."""
        found = [v for n, has, v in self.samples if n == name and labels.items() <= has.items()]
        return math.fsum(found) if found else None

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first sample of a name; none without any."""
        return next((has for n, has, _ in self.samples if n == name), {})


def read_metrics(page: str) -> Metrics:
    """Metrics in Prometheus' text format; lines that are none are passed over."""
    samples = list[tuple[str, Mapping[str, str], float]]()
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if math.isfinite(value):
            samples.append((sample[1], dict(_LABEL.findall(sample[2] or "")), value))
    return Metrics(tuple(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """A server as the simulator needs it: one worker that does both stages, or one of each.

    Raises:
        CalibrationError: when a number is not positive, or there is no such scheduler.
    """

    scheduler: str = "vllm_today"
    """Of a worker that does both stages, a name in `COUPLED_SYSTEMS`; `disaggregated`: one worker of each."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    """Of an iteration; a prefill worker computes waiting prompts together up to that (1: one at a time)."""
    kv_tokens: int = SMALL_TOKENS
    """KVCache that fits into the memory of a worker."""
    block_size: int = 16
    prefix_caching: bool = True
    max_model_len: int = 8192
    assumed: tuple[str, ...] = ()
    """Fields that neither an option nor the server said."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_size", "max_model_len"):
            if not 1 <= getattr(self, name) < _MOST:
                raise CalibrationError(f"{name} is {getattr(self, name)}; allowed are 1 to {_MOST - 1}")
        if self.scheduler not in SCHEDULERS:
            raise CalibrationError(f"scheduler {self.scheduler!r}; allowed are {', '.join(SCHEDULERS)}")

    @property
    def is_disaggregated(self) -> bool:
        """Whether a worker of its own computes prompts."""
        return self.scheduler == DISAGGREGATED

    @property
    def longest_piece(self) -> int:
        """Tokens of a prompt that an iteration computes: prefill workers compute it whole."""
        return self.max_model_len if self.is_disaggregated else self.max_num_batched_tokens

    def spec(self, block_size_tokens: int) -> ClusterSpec:
        """The cluster that is simulated, for a trace with blocks of so many tokens."""
        own: dict[str, Any] = {"block_size_tokens": block_size_tokens, "prefix_caching": self.prefix_caching}
        if self.is_disaggregated:
            return ClusterSpec.small(
                device_tokens=self.kv_tokens,
                cache_tokens=self.kv_tokens,
                max_requests=self.max_num_seqs,
                pack_tokens=self.max_num_batched_tokens,
                **own,
            )
        policy = COUPLED_SYSTEMS[self.scheduler][0]
        if hasattr(policy, "chunk_tokens"):
            cut: Any = policy
            policy = replace(cut, chunk_tokens=self.max_num_batched_tokens)
        return ClusterSpec.small_coupled(
            batching=policy,
            device_tokens=self.kv_tokens,
            max_requests=self.max_num_seqs,
            max_batch_tokens=max(self.max_num_batched_tokens, self.max_model_len),
            max_request_tokens=self.max_model_len,
            memory_block_tokens=self.block_size,
            **own,
        )


def learn_settings(
    options: Mapping[str, Any], metrics: Metrics, described: Mapping[str, Any]
) -> tuple[ServerSettings, tuple[str, ...]]:
    """The settings of a server, and which of them it said itself.

    Args:
        options: what the user said, None where nothing.
        metrics: of the server.
        described: its entry in `/v1/models`.

    Raises:
        CalibrationError: when a setting is out of range, or several workers of a kind serve.
    """
    many = {role: metrics.total("mooncake_workers", role=role) or 0 for role in ("prefill", "decode", "coupled")}
    if max(many.values()) > 1:
        there = ", ".join(f"{count:.0f} {role}" for role, count in many.items() if count)
        raise CalibrationError(
            f"the server has {there} workers; calibrate one with a single coupled worker, or with one prefill and"
            " one decode worker"
        )
    told = {**_of_vllm(metrics.labels("vllm:cache_config_info")), **metrics.labels("mooncake_config_info")}
    if "max_model_len" in described:
        told["max_model_len"] = str(described["max_model_len"])
    said = {name: value for name, text in told.items() if (value := _value(name, text)) is not None}
    given = {name: value for name, value in options.items() if value is not None}
    fields = ("scheduler", "max_num_seqs", "max_num_batched_tokens", "kv_tokens", "block_size", "max_model_len")
    known: dict[str, Any] = said | given
    assumed = tuple(name for name in fields if name not in known)
    if known.get("scheduler") == DISAGGREGATED:
        known.setdefault("max_num_batched_tokens", 1)
    return ServerSettings(**known, assumed=assumed), tuple(sorted(said.keys() - given.keys()))


def _of_vllm(labels: Mapping[str, str]) -> dict[str, str]:
    """Settings by our names, from the labels of vLLM's description of its cache."""
    found = {"block_size": labels.get("block_size", ""), "prefix_caching": labels.get("enable_prefix_caching", "")}
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if blocks.isdecimal() and size.isdecimal():
        found["kv_tokens"] = str((int(blocks) - 1) * int(size))  # one block is vLLM's null block
    if labels:
        found["scheduler"] = "vllm_today"
    return found


def _value(name: str, text: str) -> Any:
    """A setting as the server has it in text; None where it is none."""
    if name == "prefix_caching":
        return {"true": True, "false": False}.get(text.lower())
    if name == "scheduler":
        return text if text in SCHEDULERS else None
    is_number = name in ServerSettings.__dataclass_fields__ and text.isdecimal() and 1 <= int(text) < _MOST
    return int(text) if is_number else None
