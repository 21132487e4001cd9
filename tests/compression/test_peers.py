"""Where NVIDIA's kvpress implements the same method, both keep the same tokens of the same inputs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mooncake_lab.compression import PrefilledPrompt, RecentTokens, SnapKV

PEER = load_file(Path(__file__).parent / "peers" / "kvpress.safetensors")
COUNTS = sorted({int(name.split(".")[2]) for name in PEER if name.startswith("snapkv")})


@pytest.fixture
def inputs():
    """The keys and queries that kvpress decided on."""
    keys = tuple(PEER[f"keys.{layer}"] for layer in (0, 1))
    queries = tuple(PEER[f"queries.{layer}"] for layer in (0, 1))
    return PrefilledPrompt(tokens=96, keys=keys, values=keys, queries=queries, logits=torch.zeros(1))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layer", [0, 1])
def test_snapkv_keeps_what_kvpress_keeps(inputs, layer, count):
    """With average pooling, as kvpress has it, the same places of every KV head stay, window included."""
    kept = SnapKV(capacity=count, window=16, kernel=5, pooling="avg").keep(inputs, layer)
    assert torch.equal(kept, PEER[f"snapkv.{layer}.{count}"])


@pytest.mark.parametrize("count", COUNTS)
def test_sinks_and_recent_keep_what_kvpress_keeps(inputs, count):
    """Kvpress's StreamingLLM and our control are the same four sinks and the same recent tokens."""
    kept = RecentTokens(capacity=count, sinks=4).keep(inputs, 0)
    assert torch.equal(kept, PEER[f"streaming.0.{count}"])


def test_the_pooling_of_the_paper_chooses_otherwise(inputs):
    """The paper's runs pool by maximum: on the same inputs that is another choice, so the two differ."""
    kept = SnapKV(capacity=48, window=16, kernel=5, pooling="max").keep(inputs, 0)
    assert not torch.equal(kept, PEER["snapkv.0.48"])
