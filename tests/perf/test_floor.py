"""The floor check: a possible model passes, an impossible one is named."""

import dataclasses

import pytest

from mooncake_lab.perf import (
    DecodeLatency,
    HybridLatency,
    LatencyModel,
    LinkLatency,
    PrefillLatency,
    check_floor,
    decode_work,
    hardware,
    model_shape,
    prefill_work,
    probe_floor,
)

NODE = hardware("a800-node")
SHAPE = model_shape("llama3-70b")


def model_at_share(share):
    """A model that reaches `share` of every peak of the node, and nothing else costs anything."""
    peak = NODE.flops_per_s() * share
    memory = NODE.memory_bytes_per_s * share
    prefill = PrefillLatency(
        constant_s=SHAPE.weight_bytes / memory,
        per_token_s=(2 * SHAPE.layers * SHAPE.layer_parameters + 4 * SHAPE.query_width * SHAPE.layers) / peak,
        per_token_squared_s=2 * SHAPE.query_width * SHAPE.layers / peak,
        load_s_per_token=SHAPE.kv_bytes_per_token / NODE.host_to_device_bytes_per_s / share,
    )
    decode = DecodeLatency(
        SHAPE.streamed_weight_bytes / memory,
        decode_work(SHAPE, 1, 0).flops / peak + SHAPE.kv_bytes_per_token / memory,
        SHAPE.kv_bytes_per_token / memory,
    )
    return LatencyModel(
        name=f"{share:.0%} of peak", shape=SHAPE, prefill=prefill, decode=decode,
        hybrid=dataclasses.replace(HybridLatency.of(prefill, decode), constant_s=prefill.constant_s),
        transfer=LinkLatency(NODE.nic_bytes_per_s * share),
        dram=LinkLatency(NODE.host_to_device_bytes_per_s * share),
    )  # fmt: skip


def test_a_model_at_the_peak_passes_and_every_stage_is_probed():
    """Full use of every peak is possible, and nothing is left unprobed."""
    probes = check_floor(model_at_share(1.0), NODE)
    assert min(probe.ratio for probe in probes) >= 1
    assert {probe.stage for probe in probes} == {"prefill", "decode", "hybrid", "transfer", "load from dram"}


def test_a_prefix_in_gpu_memory_is_not_bounded_by_the_host_link():
    """Only a model that loads reused prefixes has the host link in the floor of a prefill."""
    model = model_at_share(1.0)
    resident = dataclasses.replace(model, prefill=dataclasses.replace(model.prefill, load_s_per_token=0.0))
    assert min(probe.ratio for probe in check_floor(resident, NODE)) >= 1


def test_half_the_peak_takes_at_least_twice_the_floor_on_links():
    """Ratios are predicted over floor."""
    links = [probe for probe in probe_floor(model_at_share(0.5), NODE) if probe.stage == "transfer"]
    assert [probe.ratio for probe in links] == pytest.approx([2.0] * len(links))


def sped_up(stage, factor):
    """A model at half the peak with one stage `factor` times faster."""
    model = model_at_share(0.5)
    if stage == "prefill":
        faster = dataclasses.replace(
            model.prefill,
            constant_s=model.prefill.constant_s / factor,
            per_token_s=model.prefill.per_token_s / factor,
            per_token_squared_s=model.prefill.per_token_squared_s / factor,
        )
    elif stage == "decode":
        faster = DecodeLatency(
            model.decode.constant_s / factor, model.decode.per_request_s, model.decode.per_context_token_s
        )
    elif stage == "hybrid":
        faster = dataclasses.replace(model.hybrid, per_token_s=model.hybrid.per_token_s / factor, constant_s=0.0)
    else:
        faster = LinkLatency(getattr(model, stage).bytes_per_s * factor)
    return dataclasses.replace(model, **{stage: faster})


@pytest.mark.parametrize("stage", ["prefill", "decode", "hybrid", "transfer", "dram"])
def test_a_stage_that_beats_the_peak_is_named_with_its_time_and_the_floor(stage):
    """Six times too optimistic a stage (a coefficient fitted to short prompts did that once) is caught."""
    with pytest.raises(ValueError, match=rf"predicts .*{stage}.* in [\d.e-]+ s; at the peak rates of 'a800-node'"):
        check_floor(sped_up(stage, 6.0), NODE)


def test_a_slower_data_type_has_a_higher_floor():
    """What bfloat16 can do, float32 cannot."""
    with pytest.raises(ValueError, match="at least"):
        check_floor(model_at_share(0.5), NODE, "float32")
    assert prefill_work(SHAPE, 8192).floor_s(NODE, "float32") > prefill_work(SHAPE, 8192).floor_s(NODE)
