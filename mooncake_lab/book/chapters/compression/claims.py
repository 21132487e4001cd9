"""What compression costs by arithmetic, beside the claims of the four papers."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
import torch

from mooncake_lab.book.chapters.compression.experiment import lab_model, one_thread
from mooncake_lab.book.chapters.store.experiment import CapacityHitRates
from mooncake_lab.book.experiments import records
from mooncake_lab.book.paper import Compared, ComparisonTable, claimed, comparison_table, constant, detail
from mooncake_lab.compression import FullCache, KCache, Method, MiniCache, PyramidInfer, Session, SnapKV
from mooncake_lab.compression.eviction import window_attention
from mooncake_lab.compression.exam import exam
from mooncake_lab.compression.minicache import angle
from mooncake_lab.compression.session import PrefillMethod
from mooncake_lab.perf import HARDWARE, model_shape, reuse_bandwidth_bytes_per_s

Clock = Callable[[], float]
"""Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSimilarity:
    """How alike neighbouring layers' keys and values are, token by token (MiniCache, Figure 1a)."""

    model: str = "lab-recall"
    prompts: int = 4
    length: int = 1024
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a pair of layers and side: cosine and angle, means over tokens and heads."""
        session = Session(lab_model(self.model), room_tokens=self.length + 16)
        samples = exam("recall", self.prompts, seed=self.seed, length=self.length)
        with one_thread():
            prefilled = [session.prefill(sample.prompt()) for sample in samples]
        for side in ("keys", "values"):
            for shallow, _ in pairwise(range(session.plain.config.layers)):
                found = torch.cat([_angles(getattr(each, side), shallow).flatten() for each in prefilled])
                yield {
                    "side": side,
                    "shallow": shallow,
                    "cosine": float(found.cos().mean()),
                    "angle": float(found.mean()),
                }


def _angles(sides: tuple[torch.Tensor, ...], shallow: int) -> torch.Tensor:
    unit = [side / side.norm(dim=-1, keepdim=True).clamp(min=1e-12) for side in sides[shallow : shallow + 2]]
    return angle(*unit)


DECODE_METHODS: Final[dict[str, Method]] = {
    "full": FullCache(),
    "snapkv": SnapKV(capacity=256, window=32),
    "pyramidinfer": PyramidInfer(decay=0.7),
    "minicache": MiniCache(),
    "minicache_4bit": MiniCache(bits=4),
    "kcache": KCache(top=64),
}
"""What is timed, with one setting each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSteps:
    """Decode steps of a batch over compressed caches of one prompt, on the processor this runs on."""

    methods: tuple[str, ...] = tuple(DECODE_METHODS)
    model: str = "random:lab-8m"
    context_tokens: int = 2048
    batch: int = 4
    steps: int = 12
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a method: median seconds of a step (of processor time: others wait too), and bytes."""
        room = (self.batch + 1) * (self.context_tokens + 64)
        session = Session(lab_model(self.model, positions=self.context_tokens + 64), room_tokens=room)
        vocabulary = session.plain.config.vocabulary
        rng = np.random.default_rng(self.seed)
        prompt, tokens = rng.integers(vocabulary, size=self.context_tokens), rng.integers(vocabulary, size=1)
        whole = session.prefill(prompt, window=64)
        for name in self.methods:
            method = DECODE_METHODS[name]
            own = method.prefill(session.plain, prompt) if isinstance(method, PrefillMethod) else whole
            helds = [session.hold(own, method) for _ in range(self.batch)]
            device, host = (sum(getattr(held, f"{side}_bytes") for held in helds) for side in ("device", "host"))
            step = partial(session.extend, helds, np.tile(tokens, (self.batch, 1)))
            with one_thread():
                seconds = [_timed(step) for _ in range(self.steps)]
            for held in helds:
                held.release()
            step_s = float(np.median(seconds[2:]))
            yield {"method": name, "step_s": step_s, "device_bytes": device, "host_bytes": host}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueReads:
    """One layer's attention step with all values, and with the largest weights' values only (KCache)."""

    context_tokens: int = 4096
    top: int = 64
    kv_heads: int = 4
    head_width: int = 64
    repeats: int = 15
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: seconds of scores, of mixing all values, and of choosing and mixing a few (processor time)."""
        rng = torch.Generator().manual_seed(self.seed)
        shape = (self.kv_heads, self.context_tokens, self.head_width)
        keys, values = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
        query = torch.randn(1, 2 * self.kv_heads, self.head_width, generator=rng)
        weights = window_attention(query, keys)
        method = KCache(top=self.top)
        timed: dict[str, Callable[[], object]] = {
            "scores_s": partial(window_attention, query, keys),
            "all_values_s": partial(torch.matmul, weights.unflatten(0, (self.kv_heads, -1))[:, :, 0], values),
            "few_values_s": partial(method.mix, weights, values, self.kv_heads),
        }
        with one_thread():
            seconds = {name: [_timed(run) for _ in range(self.repeats)] for name, run in timed.items()}
        yield {name: float(np.median(each[2:])) for name, each in seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefixes:
    """A store whose prefixes are kept at a share of their bytes (the paper's model and node, FAST'25 §2.2)."""

    stored_share: float = 1.0
    capacity_bytes: float = 1e12
    workload: str = "conversation"
    prefix_tokens: int = 32_768
    node: Literal["a800-node", "h800-node"] = "a800-node"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: bytes of a prefix, hit rate of the trace, load time, and FAST'25 Eq. 2's bandwidth."""
        shape, node = model_shape("llama3-70b"), HARDWARE[self.node]
        per_token = shape.kv_bytes_per_token * self.stored_share
        capacity = int(self.capacity_bytes / per_token)
        stored = CapacityHitRates(
            workload=self.workload, capacity_tokens=capacity, first=self.first, seed=self.seed
        )
        (hits,) = stored.rows()
        link = node.nic_bytes_per_s or float("inf")
        least = reuse_bandwidth_bytes_per_s(shape, self.prefix_tokens, node.flops_per_s())
        yield {
            "prefix_bytes": self.prefix_tokens * per_token,
            "capacity_tokens": capacity,
            "hit_rate": hits["hit_rate"],
            "load_s": self.prefix_tokens * per_token / link,
            "least_bytes_per_s": float(least) * self.stored_share,
            "origin": hits["origin"],
            "source": hits["source"],
        }


def kcache_break_even_tokens(top: int, memory_bytes_per_s: float, host_bytes_per_s: float, sets: int = 1) -> float:
    """Context from which reading `top` values from the host beats reading all of them from the device.

    Without overlap: `n > top * sets * B_memory / B_host`, whatever the batch.

    Args:
        top: values fetched a set.
        memory_bytes_per_s: of the device.
        host_bytes_per_s: from host to device.
        sets: sets a KV head fetches: 1 when its query heads share one.
    """
    return top * sets * memory_bytes_per_s / host_bytes_per_s


def break_evens() -> pd.DataFrame:
    """Of KCache on the machines this book knows: one row a machine and number of values."""
    rows = [
        {"machine": name, "top": top, "tokens": kcache_break_even_tokens(top, each.memory_bytes_per_s, host)}
        for name, each in HARDWARE.items()
        for host in (each.host_to_device_bytes_per_s,)
        if host is not None
        for top in (32, 64, 128)
    ]
    return pd.DataFrame(rows)


def _timed(run: Callable[[], object], clock: Clock = time.process_time) -> float:
    start_s = clock()
    run()
    return clock() - start_s


_TRAINED: Final = "lab-recall"
"""The model whose layers are compared with those of the papers; the random one only shows what chance gives."""


def beside_papers(table: pd.DataFrame, similar: pd.DataFrame, element_bytes: int = 4) -> ComparisonTable:
    """Every claim of this topic with our number, where this book can have one."""
    return comparison_table(_rows(table, similar, element_bytes))


def shipped_share(decay: float, layers: int, tokens: int, every: int = 1) -> float:
    """Share of a prompt's KVCache that a shipped schedule of PyramidInfer keeps, by arithmetic alone.

    Args:
        decay: of the deepest layer.
        layers: of the model.
        tokens: of the prompt.
        every: layers from one selection to the next (1 for 7B, 2 for 13B).
    """
    method = PyramidInfer(decay=decay)
    kept, total, recent = tokens, 0, 1 + int(method.recent_ratio * tokens)
    for layer in range(layers):
        total += kept
        context = int((kept - recent) * method.ratio(layer, layers))
        if layer % every == 0 and context > method.min_context:
            kept = recent + context
    return total / (layers * tokens)


def minicache_compression(
    method: MiniCache, *, layers: int, kv_heads: int, head_dim: int, tokens: int = 256, seed: int = 0
) -> float:
    """How many times smaller MiniCache holds a cache of this shape in 16 bits, by counting its bytes.

    The number of bytes depends only on the shape. We therefore count the bytes of random keys and values, for one
    pair of layers and for one single layer, and multiply them by the numbers of pairs and of single layers.

    Args:
        method: with its bits.
        layers: of the model.
        kv_heads: of a layer.
        head_dim: elements of a head.
        tokens: of the counted prompt.
        seed: of keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randn(kv_heads, tokens, head_dim, generator=generator).half() for _ in range(4)]
    pair_bytes = sum(method.merge(*pair).bytes for pair in (sides[:2], sides[2:]))
    alone_bytes = sum(method.few_bits(side).bytes for side in sides[:2])
    pairs = len(method.pairs(layers))
    held_bytes = pairs * pair_bytes + (layers - 2 * pairs) * alone_bytes
    return layers * sum(side.nbytes for side in sides[:2]) / held_bytes


def _rows(table: pd.DataFrame, similar: pd.DataFrame, element_bytes: int) -> Iterator[Compared]:
    snap = _one(table, "recall", "snapkv", 0.0625)
    kept, prompt = (constant(f"snapkv_{name}_tokens").value for name in ("kept", "mean_prompt"))
    yield claimed("C01", 100 * (1 - kept / prompt))
    yield detail(claimed("C01", 100 * (1 - snap["device_share"])), "measured: 64 of 1,024 tokens kept")
    needle, full = _one(table, "needle", "snapkv", 0.03125), _one(table, "needle", "full", 1)
    yield claimed("C02", needle["accuracy"] / full["accuracy"] if full["accuracy"] else 0.0)
    yield claimed("C03", None)
    yield claimed("C04", 100 * shipped_share(0.8, 40, 512, every=2))
    yield claimed("C05", None)
    yield claimed("C06", minicache_compression(MiniCache(bits=4), layers=32, kv_heads=32, head_dim=128))
    mini = _one(table, "recall", "minicache", 4)
    yield detail(claimed("C06", 2 / element_bytes / mini["device_share"]), "measured on the lab's four layers")
    trained = similar["model"].to_numpy() == _TRAINED
    shallow, cosines = (similar[name].to_numpy()[trained] for name in ("shallow", "cosine"))
    yield claimed("C07", float(cosines[shallow >= (shallow.max() + 1) // 2].mean()))
    yield from (claimed(f"C{number:02}", None) for number in range(8, 15))


def _one(table: pd.DataFrame, task: str, method: str, knob: float) -> dict[str, Any]:
    (row,) = records(table, task=task, when="asked", method=method, knob=knob)
    return row
