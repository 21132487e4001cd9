"""Hardware: the paper's node is the paper's, and peaks add up over devices."""

import dataclasses

import pytest

from mooncake_lab.core import GB, TERA, gbps
from mooncake_lab.paper import constant, fact
from mooncake_lab.perf import HARDWARE, hardware

TABLE1 = "fast_table1_constants"


def test_the_a800_node_is_table_1():
    """Devices, peak FLOP/s, host link and network of the testbed are those the paper prints."""
    node = hardware("a800-node")
    assert node.devices == fact(TABLE1, x="G_gpus_per_node").value
    assert node.bfloat16_flops_per_s == fact(TABLE1, x="G_tflops_per_gpu").value * TERA
    assert node.flops_per_s() == constant("G_a800_node").value
    assert node.host_to_device_bytes_per_s == fact(TABLE1, x="B_h2d_GBps").value * GB
    assert node.nic_bytes_per_s == gbps(fact(TABLE1, x="B_nic_Gbps").value)


def test_the_h800_node_is_the_assumed_one():
    """The paper's 19 GB/s rests on a peak it does not print; ours is the one on record as assumed."""
    assumed = constant("G_h800_node")
    assert assumed.source == "assumed"
    assert hardware("h800-node").flops_per_s() == assumed.value


@pytest.mark.parametrize("name", HARDWARE)
def test_every_machine_goes_by_its_own_name_and_says_its_source(name):
    """The table's key is the machine's name; no number is without a source."""
    machine = hardware(name)
    assert machine.name == name
    assert machine.source
    assert machine.flops_per_s("bfloat16") > machine.flops_per_s("float32")
    assert machine.memory_bytes == machine.devices * machine.device_memory_bytes


def test_an_unknown_machine_or_data_type_is_answered_with_the_known_ones():
    """The error names what was asked for and what there is."""
    with pytest.raises(ValueError, match=r"'abacus'.*a800-node.*h200"):
        hardware("abacus")
    with pytest.raises(ValueError, match=r"'int3'.*bfloat16, float32"):
        hardware("h200").flops_per_s("int3")


def test_a_rate_of_zero_is_refused():
    """A machine that computes or moves nothing has no roofline."""
    with pytest.raises(ValueError, match="device_memory_bytes_per_s"):
        dataclasses.replace(hardware("h200"), device_memory_bytes_per_s=0.0)
