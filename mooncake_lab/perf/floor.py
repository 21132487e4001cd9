"""The floor check: no stage may beat the peak of its own hardware.

A fitted latency model can be impossible and look reasonable: extrapolated beyond its data, or fitted to
short prompts. At least one published simulator predicts, by default, prefills three times faster than the
peak FLOP/s of the GPUs it names. The check is cheap: the models of `experiments` and of the command line pass it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from mooncake_lab.perf.hardware import Hardware
from mooncake_lab.perf.latency import LatencyModel
from mooncake_lab.perf.roofline import decode_work, kv_bytes, prefill_work

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
