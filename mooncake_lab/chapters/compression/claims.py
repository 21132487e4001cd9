"""Our numbers on compression compared with the claims of the four papers."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd
import torch

from mooncake_lab.compression import MiniCache, PyramidInfer
from mooncake_lab.paper import Compared, ComparisonTable, claim, claimed, comparison_table, detail

_TRAINED: Final = "lab-recall"
"""The model whose layers are compared with those of the papers; the random one only shows what chance gives."""


def beside_papers(table: pd.DataFrame, similar: pd.DataFrame, element_bytes: int = 4) -> ComparisonTable:
    """Every claim of this topic with our number, where this book can have one.

    Args:
        table: what `compression.accuracy` made.
        similar: rows of `LayerSimilarity`; only those of the trained model are used.
        element_bytes: of an element of our full cache; the papers' have two.
    """
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
    yield claimed(claim("C01"), 100 * (1 - snap["device_share"]))
    needle, full = _one(table, "needle", "snapkv", 0.03125), _one(table, "needle", "full", 1)
    yield claimed(claim("C02"), needle["accuracy"] / full["accuracy"] if full["accuracy"] else 0.0)
    yield claimed(claim("C03"), None)
    yield claimed(claim("C04"), 100 * shipped_share(0.8, 40, 512, every=2))
    yield claimed(claim("C05"), None)
    yield claimed(claim("C06"), minicache_compression(MiniCache(bits=4), layers=32, kv_heads=32, head_dim=128))
    mini = _one(table, "recall", "minicache", 4)
    yield detail(
        claimed(claim("C06"), 2 / element_bytes / mini["device_share"]), "measured on the lab's four layers"
    )
    trained = similar["model"].to_numpy() == _TRAINED
    shallow, cosines = (similar[name].to_numpy()[trained] for name in ("shallow", "cosine"))
    yield claimed(claim("C07"), float(cosines[shallow >= (shallow.max() + 1) // 2].mean()))
    yield claimed(claim("C08"), None)


def _one(table: pd.DataFrame, task: str, method: str, knob: float) -> dict[str, float]:
    here = (table["task"] == task) & (table["when"] == "asked") & (table["method"] == method)
    (at,) = np.flatnonzero(here & (table["knob"] == knob))
    return {name: float(table[name].to_numpy()[at]) for name in ("accuracy", "device_share")}
