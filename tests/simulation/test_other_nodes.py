"""Prefill and decode nodes of different hardware."""

from dataclasses import replace

import pytest

from mooncake_lab.book.testbeds import node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import DecodeStretch, Moved, Prefilled, Request, TracedRequest
from mooncake_lab.perf import LinkLatency, model_shape
from mooncake_lab.simulation import Cluster

FAST, SLOW = node_latency("h200-node"), node_latency("a800-node")
SPEC = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2)


def requests(count=12, *, every_s=0.4):
    """Requests that share nothing, of growing length."""
    return [
        TracedRequest(
            Request(
                id=i, arrival_s=i * every_s, input_tokens=512 * (i + 1),
                block_keys=tuple(100 * i + k for k in range(i + 1)),
            ),
            20 + i,
        )
        for i in range(count)
    ]  # fmt: skip


def spans(log, kind):
    """How long each record of a kind lasted."""
    return [record.at_s - record.start_s for record in log if isinstance(record, kind)]


@pytest.mark.parametrize("model", [FAST, SLOW])
def test_equal_nodes_are_one_kind(model):
    """A decode model that equals the other changes no record."""
    assert Cluster(SPEC, model, decode_model=replace(model)).run(requests()) == Cluster(SPEC, model).run(
        requests()
    )


def test_each_stage_has_the_times_of_its_hardware():
    """Prompts take what they take on their hardware, whatever decodes; steps likewise."""
    logs = {
        (one.name, other.name): Cluster(SPEC, one, decode_model=other).run(requests(1))
        for one in (FAST, SLOW)
        for other in (FAST, SLOW)
    }
    for (prefill, decode), log in logs.items():
        same, steps = logs[prefill, prefill], logs[decode, decode]
        assert spans(log, Prefilled) == pytest.approx(spans(same, Prefilled))
        found, expected = ([each for each in one if isinstance(each, DecodeStretch)] for one in (log, steps))
        assert [(each.steps, each.first_step_s, each.step_growth_s) for each in found] == [
            (each.steps, each.first_step_s, each.step_growth_s) for each in expected
        ]


@pytest.mark.parametrize("slower", ["prefill", "decode"])
def test_the_slower_network_card_is_the_limit(slower):
    """A prompt alone moves at the rate of the slower of the two cards, whichever node has it."""
    card = 1e9
    other = replace(SLOW, transfer=LinkLatency(card))
    models = {"prefill": (other, SLOW), "decode": (SLOW, other)}[slower]
    spec = replace(SPEC, streams_layers=False)
    log = Cluster(spec, models[0], decode_model=models[1]).run(requests(1))
    (moved,) = (record for record in log if isinstance(record, Moved))
    assert moved.bytes == 512 * SLOW.shape.kv_bytes_per_token
    assert moved.at_s - moved.start_s == pytest.approx(moved.bytes / card)


def test_the_conductor_believes_in_the_steps_of_decode_nodes():
    """Its estimate of a step is that of the nodes that decode, and of a prompt that of those that prefill."""
    believed = Cluster(SPEC, SLOW, decode_model=FAST).estimate
    assert believed.decode_step_s(8, 80_000) == FAST.decode.step_s(8, 80_000)
    assert believed.prefill_s(0, 9000, 0) == SLOW.prefill.seconds(9000, 0)


def test_impossible_mixtures_are_refused():
    """Coupled nodes are alike, and both kinds of nodes run one model."""
    with pytest.raises(ValueError, match="the cluster has none, and its nodes"):
        Cluster(ClusterSpec.coupled(nodes=2), SLOW, decode_model=FAST)
    with pytest.raises(ValueError, match="both must run the same model"):
        Cluster(SPEC, SLOW, decode_model=replace(FAST, shape=model_shape("llama3-8b")))
