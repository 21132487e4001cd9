"""Models and machines: sizes follow from dimensions, those of the papers are theirs, and peaks add up."""

import dataclasses

import pytest

from mooncake_lab.book.paper import constant, fact
from mooncake_lab.core import GB, TERA, gbps
from mooncake_lab.perf import HARDWARE, MODELS, hardware, model_shape

TABLE1 = "fast_table1_constants"


def test_an_unknown_model_is_answered_with_the_known_ones():
    """The error names what was asked for and every model there is."""
    with pytest.raises(ValueError, match=r"'llama9'.*llama2-70b, llama3-70b.*lab-tiny"):
        model_shape("llama9")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_goes_by_its_own_name(name):
    """The table's key is the shape's name, and its heads and widths fit together."""
    shape = model_shape(name)
    assert shape.name == name
    assert shape.query_width == shape.width
    assert shape.gqa * shape.kv_width == shape.query_width


@pytest.mark.parametrize("name", ["llama2-70b", "llama3-70b"])
def test_the_70b_shapes_are_table_1(name):
    """Layers, width, grouped heads and element size are those the paper prints."""
    shape = model_shape(name)
    assert shape.layers == fact(TABLE1, x="l_layers").value
    assert shape.width == fact(TABLE1, x="d_model").value
    assert shape.gqa == fact(TABLE1, x="gqa_q_heads_per_kv_head").value
    assert shape.bytes_per_element == fact(TABLE1, x="s_bytes_per_element").value
    assert shape.kv_bytes_per_token == constant("kv_bytes_per_token").value


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-70b", 70),
        ("llama3-70b", 70),
        ("llama3-8b", 8),
        ("llama-13b", 13),
        ("llama-33b", 33),
        ("yi-34b", 34),
        ("falcon-7b", 7),
        ("falcon-180b", 180),
        ("gpt3-175b", 175),
        ("lab-100m", 0.1),
        ("lab-30m", 0.03),
        ("lab-8m", 0.008),
    ],
)
def test_models_have_the_parameters_their_names_say(name, billions):
    """A name's billions are right within 3 %."""
    assert model_shape(name).parameters == pytest.approx(billions * 1e9, rel=0.03)


def test_grouped_heads_shrink_the_cache_and_only_the_cache_grows_with_bytes():
    """Sharing KV heads divides KVCache bytes by the group; halving the element halves them."""
    shape = model_shape("llama3-70b")
    ungrouped = dataclasses.replace(shape, kv_heads=shape.query_heads)
    assert ungrouped.kv_bytes_per_token == shape.gqa * shape.kv_bytes_per_token
    doubled = dataclasses.replace(shape, bytes_per_element=2 * shape.bytes_per_element)
    assert doubled.kv_bytes_per_token == 2 * shape.kv_bytes_per_token
    assert doubled.weight_bytes == 2 * shape.weight_bytes
    assert doubled.parameters == shape.parameters


def test_a_size_of_one_is_a_size():
    """One layer of one head that is one element wide is a model."""
    sizes = ("layers", "width", "query_heads", "kv_heads", "head_width", "ffn_width", "ffn_matrices", "vocabulary")
    one = dataclasses.replace(model_shape("lab-tiny"), **dict.fromkeys(sizes, 1), bytes_per_element=1)
    assert (one.layer_parameters, one.kv_bytes_per_token) == (2 * (1 + 1) + 1, 2)


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("kv_heads", 3), ("vocabulary", -1)])
def test_impossible_shapes_are_refused(field, value):
    """A size below one, or heads that do not divide, is an error that names the model."""
    with pytest.raises(ValueError, match="lab-tiny"):
        dataclasses.replace(model_shape("lab-tiny"), **{field: value})


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
