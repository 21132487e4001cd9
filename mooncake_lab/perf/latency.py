"""Latency models: seconds of each stage from token counts, in closed form.

The simulator's clock and the Conductor's estimator are both a `LatencyModel`; nothing here draws a
random number or looks at a clock. Counts are numbers or numpy arrays, which broadcast. The simulator
calls these methods with plain numbers some hundred thousand times a run, hence no conversions.

A fitted model can be impossible and look reasonable: extrapolated beyond its data, or fitted to short prompts. At
least one published simulator predicts, by default, prefills three times faster than the peak FLOP/s of the GPUs it
names. So no stage may beat the peak of its own hardware: the models of testbeds and of the command line pass
`check_floor`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import isfinite
from typing import Any

from mooncake_lab.perf.roofline import Count, decode_work, kv_bytes, prefill_work
from mooncake_lab.perf.specs import Hardware, ModelShape


def _refuse_below_zero(latency: Any, *others: str) -> None:
    """Refuse a negative coefficient among all fields but some others."""
    for name in (each.name for each in fields(latency) if each.name not in others):
        value = getattr(latency, name)
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{type(latency).__name__}.{name} is {value!r}; it must be finite and at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLatency:
    """Prefill of `n` tokens of which `p` are reused: `constant + per_token (n-p) + quadratic (n^2-p^2) + load p`.

    Raises:
        ValueError: when a coefficient is negative or not finite.
    """

    constant_s: float
    """Paid once a prompt (or once a chunk)."""
    per_token_s: float
    per_token_squared_s: float
    """Attention: causal attention of `n` tokens is proportional to `n^2`, that of a suffix to `n^2 - p^2`."""
    load_s_per_token: float = 0.0
    """What a reused token still costs: reading its KVCache from host memory."""

    def __post_init__(self) -> None:
        _refuse_below_zero(self)

    def compute_s(self, tokens: Count, reused_tokens: Count | float = 0) -> Count:
        """Seconds to compute tokens `reused_tokens` to `tokens`, their prefix already in device memory.

        A chunk of a longer prompt is the same thing: its prefix was computed just before.
        """
        linear = self.per_token_s * (tokens - reused_tokens)
        return (
            self.constant_s + linear + self.per_token_squared_s * (tokens * tokens - reused_tokens * reused_tokens)
        )

    def seconds(self, tokens: Count, reused_tokens: Count | float = 0) -> Count:
        """Seconds of the whole prefill, loading the reused prefix included (FAST'25 §4.1: `T_prefill`)."""
        return self.compute_s(tokens, reused_tokens) + self.load_s_per_token * reused_tokens


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """One decode step of a batch: `constant + per_request batch + per_context_token context + host`.

    The host's share is `host max(0, batch - host_free)`: what scheduling, sampling and answering cost that the
    devices do not hide. An engine measured alone has none of it.

    The context is the sum over the batch of cached tokens. A request's context grows by one a step, so
    steps of an unchanged batch last longer by a constant each: a stretch of them has a closed form.

    Raises:
        ValueError: when a coefficient is negative or not finite.
    """

    constant_s: float
    """Reading the weights, launching kernels: what one request pays alone and a batch shares."""
    per_request_s: float
    per_context_token_s: float
    host_s: float = 0.0
    """What the host needs for each request of a step beyond those whose work the devices hide."""
    host_free: float = 0.0
    """How many requests' work the devices hide."""

    def __post_init__(self) -> None:
        _refuse_below_zero(self)

    def step_s(self, batch: Count, context_tokens: Count | float) -> Count:
        """Seconds of one step."""
        alone = self.constant_s + self.per_request_s * batch + self.per_context_token_s * context_tokens
        return alone + self.host_s * (batch - self.host_free) * (batch > self.host_free) if self.host_s else alone

    def step_growth_s(self, batch: Count) -> Count:
        """Seconds by which each step of an unchanged batch outlasts the one before."""
        return self.per_context_token_s * batch

    def stretch_s(self, batch: Count, context_tokens: Count | float, steps: Count | float) -> Count:
        """Seconds of `steps` steps of an unchanged batch that starts with this context; exactly their sum."""
        first = self.step_s(batch, context_tokens)
        return steps * first + self.step_growth_s(batch) * (steps * (steps - 1) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridLatency:
    """One iteration that computes a prefill chunk and decodes together (SARATHI: decode-maximal batch).

    Chunk tokens and decode tokens go through the same matrices, so below the *knee* a decode rides free:
    `constant + max(floor, per_token ceil_tile(chunk + decodes)) + per_request decodes
    + quadratic ((start + chunk)^2 - start^2) + per_context_token context`.

    Raises:
        ValueError: when a coefficient is negative or not finite, or a tile is below one token.
    """

    floor_s: float
    """Reading the weights: no iteration is shorter, however few its tokens."""
    per_token_s: float
    per_token_squared_s: float
    per_request_s: float = 0.0
    per_context_token_s: float
    constant_s: float = 0.0
    host_s: float = 0.0
    """As in `DecodeLatency`: it is paid for the decodes of an iteration."""
    host_free: float = 0.0
    tile_tokens: int = 1
    """Matrix kernels work in tiles: tokens are rounded up to a multiple of this (SARATHI §4.4)."""

    def __post_init__(self) -> None:
        _refuse_below_zero(self, "tile_tokens")
        if self.tile_tokens < 1:
            raise ValueError(f"HybridLatency.tile_tokens is {self.tile_tokens!r}; at least 1 is needed")

    @classmethod
    def of(cls, prefill: PrefillLatency, decode: DecodeLatency, *, tile_tokens: int = 1) -> "HybridLatency":
        """The hybrid step that two separate stages imply: decode gives the floor, prefill the slopes.

        Prefill's own constant is a cost of a prompt, not of an iteration, and is left to the caller.
        """
        return cls(
            floor_s=decode.constant_s,
            per_token_s=prefill.per_token_s,
            per_token_squared_s=prefill.per_token_squared_s,
            per_request_s=decode.per_request_s,
            per_context_token_s=decode.per_context_token_s,
            host_s=decode.host_s,
            host_free=decode.host_free,
            tile_tokens=tile_tokens,
        )

    def step_s(self, chunk_tokens: int, start_tokens: int, decodes: int = 0, context_tokens: int = 0) -> float:
        """Seconds of one iteration.

        Args:
            chunk_tokens: prompt tokens computed in it.
            start_tokens: tokens of the same prompt computed before.
            decodes: requests that decode one token each.
            context_tokens: cached tokens of those requests together.
        """
        tiles = -(-(chunk_tokens + decodes) // self.tile_tokens)
        linear = max(self.floor_s, self.per_token_s * tiles * self.tile_tokens)
        pairs = chunk_tokens * (2 * start_tokens + chunk_tokens)
        attention = self.per_token_squared_s * pairs + self.per_context_token_s * context_tokens
        host = self.host_s * max(0.0, decodes - self.host_free)
        return self.constant_s + linear + self.per_request_s * decodes + attention + host

    def batch_s(self, pieces: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        """Seconds of one iteration with pieces of any number of prompts.

        Args:
            pieces: new tokens of each, and how many of its prompt were computed before.
            decodes: requests that decode one token each.
            context_tokens: cached tokens of those requests together.
        """
        chunk = sum(new for new, _ in pieces)
        pairs = sum(new * (2 * before + new) for new, before in pieces)
        apart = self.per_token_squared_s * (pairs - chunk * chunk)  # a prompt does not attend to another
        return self.step_s(chunk, 0, decodes, context_tokens) + apart


@dataclass(frozen=True, slots=True)
class LinkLatency:
    """Moving bytes over a link, or loading them from a tier: `latency + bytes / bandwidth`.

    Raises:
        ValueError: when the bandwidth is not positive or the latency is negative.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ValueError(f"LinkLatency.bytes_per_s is {self.bytes_per_s!r}; it must be positive")
        _refuse_below_zero(self, "bytes_per_s")

    def seconds(self, size_bytes: Count) -> Count:
        """Seconds until the last byte has arrived."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """How long everything takes on one node: the simulator's clock, and the Conductor's belief about it."""

    name: str
    """What it was fitted to, for figure footers."""
    shape: ModelShape
    prefill: PrefillLatency
    decode: DecodeLatency
    hybrid: HybridLatency
    transfer: LinkLatency
    """Node to node, KVCache of a finished prefill (Messenger)."""
    dram: LinkLatency
    """Loading KVCache from host memory into device memory."""
    ssd: LinkLatency | None = None
    """Loading it from disk into host memory; None where a node has none."""
    schedule_s: float = 0.0
    """From arrival to placement."""

    def with_host(self, host_s: float, host_free: float = 0.0) -> "LatencyModel":
        """The same node with a host that needs `host_s` for each request of a step beyond `host_free` of them.

        Raises:
            ValueError: when either is negative or not finite.
        """
        if not host_s:
            return self
        return replace(
            self,
            name=f"{self.name}, host {host_s * 1e3:g} ms a request beyond {host_free:g}",
            decode=replace(self.decode, host_s=host_s, host_free=host_free),
            hybrid=replace(self.hybrid, host_s=host_s, host_free=host_free),
        )

    def transfer_s(self, tokens: Count) -> Count:
        """Seconds to move the KVCache of these tokens to another node, alone on the link."""
        return self.transfer.seconds(tokens * self.shape.kv_bytes_per_token)

    def dram_load_s(self, tokens: Count) -> Count:
        """Seconds to load the KVCache of these tokens from host memory."""
        return self.dram.seconds(tokens * self.shape.kv_bytes_per_token)

    def ssd_load_s(self, tokens: Count) -> Count:
        """Seconds to load the KVCache of these tokens from disk into host memory.

        Raises:
            ValueError: when the node has no disk.
        """
        if self.ssd is None:
            raise ValueError(f"latency model {self.name!r} has no ssd; give it a LinkLatency to load from one")
        return self.ssd.seconds(tokens * self.shape.kv_bytes_per_token)

    def beside_ssd_s(self, compute_s: float, ssd_tokens: int) -> float:
        """Seconds of a computation beside which KVCache of so many tokens is read from disk, layer by layer."""
        return self.beside_load_s(compute_s, self.ssd_load_s(ssd_tokens)) if ssd_tokens else compute_s

    def beside_load_s(self, compute_s: float, load_s: float) -> float:
        """Seconds of a computation beside which its prefix is loaded layer by layer, which takes `load_s` alone.

        Layer `l` can be computed when it was loaded, and is computed while the next ones are loaded: as in arXiv
        §5.2, where this overlap is described for DRAM. All layers are equal, so what is not hidden is one layer of
        the shorter of the two.
        """
        return max(compute_s, load_s) + min(compute_s, load_s) / self.shape.layers


PROBED_TOKENS: Sequence[int] = tuple(2**power for power in range(10, 18))
"""Prompt and context lengths that are probed: 1024 to 131072 tokens."""
PROBED_SHARES: Sequence[float] = (0.0, 0.5, 0.95)
"""Shares of the prompt that are reused."""
PROBED_BATCHES: Sequence[int] = (1, 8, 64, 256)
"""Decode batches and hybrid chunks, in requests and multiples of 8 tokens."""


@dataclass(frozen=True, slots=True)
class FloorProbe:
    """One probed point: what the model predicts, and the shortest time physics allows."""

    stage: str
    point: str
    predicted_s: float
    floor_s: float

    @property
    def ratio(self) -> float:
        """Predicted over floor: 1 is a machine without any loss, below 1 is impossible."""
        return self.predicted_s / self.floor_s


def _prefills(latency: LatencyModel, node: Hardware, dtype: str) -> Iterator[FloorProbe]:
    for tokens in PROBED_TOKENS:
        for share in PROBED_SHARES:
            reused = int(share * tokens)
            floor_s = prefill_work(latency.shape, tokens, reused).floor_s(node, dtype)
            if latency.prefill.load_s_per_token and node.host_to_device_bytes_per_s:
                floor_s = max(floor_s, kv_bytes(latency.shape, float(reused)) / node.host_to_device_bytes_per_s)
            point = f"{tokens} tokens, {reused} reused"
            yield FloorProbe("prefill", point, latency.prefill.seconds(float(tokens), reused), floor_s)


def _decodes(
    stage: str, step_s: Callable[[int, int], float], latency: LatencyModel, node: Hardware, dtype: str
) -> Iterator[FloorProbe]:
    for batch in PROBED_BATCHES:
        for each in PROBED_TOKENS:
            context = batch * each
            floor_s = decode_work(latency.shape, batch, context).floor_s(node, dtype)
            point = f"{batch} requests, {context} tokens of context"
            yield FloorProbe(stage, point, step_s(batch, context), floor_s)


def _hybrids(latency: LatencyModel, node: Hardware, dtype: str) -> Iterator[FloorProbe]:
    for eighths in PROBED_BATCHES:
        for start in (0, *PROBED_TOKENS):
            chunk = 8 * eighths
            floor_s = prefill_work(latency.shape, start + chunk, start).floor_s(node, dtype)
            point = f"chunk of {chunk} tokens after {start}"
            yield FloorProbe("hybrid", point, latency.hybrid.step_s(chunk, start), floor_s)
    yield from _decodes("hybrid", partial(latency.hybrid.step_s, 0, 0), latency, node, dtype)


def _links(latency: LatencyModel, node: Hardware) -> Iterator[FloorProbe]:
    links = [
        ("transfer", latency.transfer, node.nic_bytes_per_s),
        ("load from dram", latency.dram, node.host_to_device_bytes_per_s),
    ]
    if latency.ssd is not None:  # drives hang on the same lanes: they are no faster than the link to the devices
        links.append(("load from ssd", latency.ssd, node.host_to_device_bytes_per_s))
    for stage, link, rate in links:
        if rate is None:
            continue
        for tokens in PROBED_TOKENS:
            size_bytes = kv_bytes(latency.shape, float(tokens))
            yield FloorProbe(stage, f"KVCache of {tokens} tokens", link.seconds(size_bytes), size_bytes / rate)


def probe_floor(latency: LatencyModel, node: Hardware, dtype: str = "bfloat16") -> list[FloorProbe]:
    """Every probed point of every stage, possible or not."""
    return [
        *_prefills(latency, node, dtype),
        *_decodes("decode", latency.decode.step_s, latency, node, dtype),
        *_hybrids(latency, node, dtype),
        *_links(latency, node),
    ]


def check_floor(latency: LatencyModel, node: Hardware, dtype: str = "bfloat16") -> list[FloorProbe]:
    """The probed points of a latency model that is possible on this hardware.

    Raises:
        ValueError: naming stage, point, predicted time, floor and hardware of the worst impossible point.
    """
    probes = probe_floor(latency, node, dtype)
    worst = min(probes, key=lambda probe: probe.ratio)
    if worst.ratio < 1:
        raise ValueError(
            f"latency model {latency.name!r} predicts {worst.stage} of {worst.point} in {worst.predicted_s:.4g} s;"
            f" at the peak rates of {node.name!r} it takes at least {worst.floor_s:.4g} s"
        )
    return probes
