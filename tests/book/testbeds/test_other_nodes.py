"""Nodes that the papers do not measure: scaled, checked, or refused."""

import pytest

from mooncake_lab.book.paper import assumption
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.book.testbeds.nodes import device_tokens, node_latency
from mooncake_lab.perf import hardware, model_shape


def test_the_papers_node_is_the_calibrated_one():
    """Nothing is scaled where the papers have measured."""
    assert node_latency() == paper_node_latency()


def test_faster_hardware_is_faster_and_says_that_it_is_scaled():
    """An H800 node takes less time for everything, and its name tells where that comes from."""
    base, faster = node_latency(), node_latency("h800-node")
    assert faster.prefill.seconds(16_384) < base.prefill.seconds(16_384)
    assert faster.decode.step_s(8, 80_000) < base.decode.step_s(8, 80_000)
    assert faster.transfer_s(16_384) < base.transfer_s(16_384)
    assert "scaled" in faster.name


def test_what_does_not_fit_is_refused():
    """70B weights in one 80 GB card, or a cluster of cards without a network, cannot be simulated."""
    with pytest.raises(ValueError, match="bytes of weights"):
        device_tokens(hardware("a100"), model_shape("llama3-70b"))
    with pytest.raises(ValueError, match="allowed is hardware with a network card: a800-node, h800-node"):
        node_latency("a100", "llama3-8b")


def test_device_memory_holds_what_the_ledger_assumes():
    """The decode node's KVCache is the number of the assumptions' ledger, to a thousandth."""
    tokens = device_tokens(hardware("a800-node"), model_shape("llama3-70b"))
    assert tokens == pytest.approx(assumption("B15").value, rel=1e-3)
