"""Latency models: closed forms equal what they close over, on numbers and on arrays."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.perf.layerwise import layerwise_times

seconds = st.floats(0, 1e-2)
small = st.floats(0, 1e-6)
counts = st.integers(0, 200_000)
prefills = st.builds(
    PrefillLatency,
    constant_s=seconds,
    per_token_s=st.floats(0, 1e-3),
    per_token_squared_s=small,
    load_s_per_token=small,
)
hosts = st.tuples(seconds, st.floats(0, 10))
no_host = st.just((0.0, 0.0))
decodes = st.builds(
    lambda *own, host: DecodeLatency(*own, *host), st.floats(1e-6, 1e-1), seconds, small, host=no_host | hosts
)
PREFILL = PrefillLatency(constant_s=0.05, per_token_s=1e-4, per_token_squared_s=8e-10, load_s_per_token=2e-6)
DECODE = DecodeLatency(0.025, 2e-4, 3e-8)
WHOLE = LatencyModel(
    name="test", shape=model_shape("lab-tiny"), prefill=PREFILL, decode=DECODE,
    hybrid=HybridLatency.of(PREFILL, DECODE), transfer=LinkLatency(1e6, 0.5), dram=LinkLatency(1e7),
    ssd=LinkLatency(1e5),
)  # fmt: skip


@given(decodes, st.integers(1, 256), st.integers(0, 10**7), st.integers(0, 400))
def test_a_stretch_is_the_sum_of_its_steps(decode, batch, context, steps):
    """The closed form of k steps of an unchanged batch is their sum, within 1e-9, with and without a host."""
    one_by_one = sum(decode.step_s(batch, context + k * batch) for k in range(steps))
    assert decode.stretch_s(batch, context, steps) == pytest.approx(one_by_one, rel=1e-9)


@given(decodes, st.integers(1, 256), st.integers(0, 10**7), st.integers(0, 3000))
def test_each_step_outlasts_the_one_before_by_the_growth(decode, batch, context, k):
    """Step k lasts first + k * growth, which is what the run log writes."""
    grown = decode.step_s(batch, context) + k * decode.step_growth_s(batch)
    assert grown == pytest.approx(decode.step_s(batch, context + k * batch), rel=1e-9)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 5000)), max_size=4), st.integers(0, 64))
def test_pieces_of_prompts_attend_to_their_own_prompt(pieces, requests):
    """An iteration costs its tokens together, and to each piece the attention that it has alone."""
    hybrid = HybridLatency.of(PREFILL, DECODE)
    blind = dataclasses.replace(hybrid, per_token_squared_s=0.0)
    attention_s = sum(hybrid.step_s(*piece) - blind.step_s(*piece) for piece in pieces)
    together_s = blind.step_s(sum(new for new, _ in pieces), 0, requests, 100 * requests)
    assert hybrid.batch_s(pieces, requests, 100 * requests) == pytest.approx(together_s + attention_s)


@given(st.integers(1, 64), st.integers(0, 10**6), hosts)
def test_the_host_costs_nothing_up_to_its_free_requests_and_its_rate_beyond(batch, context, host):
    """The share is zero up to `host_free`, then linear; decode and hybrid steps agree on it."""
    served = dataclasses.replace(DECODE, host_s=host[0], host_free=host[1])
    share = served.step_s(batch, context) - DECODE.step_s(batch, context)
    assert share == pytest.approx(host[0] * max(0.0, batch - host[1]), abs=1e-12)
    mixed, without = (HybridLatency.of(PREFILL, latency) for latency in (served, DECODE))
    added = mixed.step_s(512, 0, batch, context) - without.step_s(512, 0, batch, context)
    assert added == pytest.approx(share, abs=1e-9)


@given(prefills, st.lists(counts, min_size=3, max_size=3).map(sorted))
def test_chunks_cost_the_whole_plus_a_constant_each(prefill, cuts):
    """A prompt computed in two chunks pays its constant twice and everything else once."""
    low, middle, high = cuts
    whole = prefill.compute_s(high, low)
    parts = prefill.compute_s(middle, low) + prefill.compute_s(high, middle)
    assert parts - prefill.constant_s == pytest.approx(whole, rel=1e-9, abs=1e-9)


@given(prefills, counts, st.integers(1, 1000))
def test_prefill_grows_with_the_prompt(prefill, n, more):
    """A longer prompt never takes less time, and loading is what reuse adds to computing."""
    assert prefill.seconds(n + more) >= prefill.seconds(n)
    loaded = prefill.seconds(n + more, n) - prefill.compute_s(n + more, n)
    assert loaded == pytest.approx(prefill.load_s_per_token * n, abs=1e-6)


def test_hybrid_steps_join_the_two_stages():
    """Without a chunk it is a decode step; without decodes, a chunk's prefill without the prompt's constant."""
    hybrid = HybridLatency.of(PREFILL, DECODE)
    assert hybrid.step_s(0, 0, 16, 90_000) == pytest.approx(DECODE.step_s(16, 90_000), rel=1e-12)
    assert hybrid.step_s(2048, 4096) == pytest.approx(
        PREFILL.compute_s(6144, 4096) - PREFILL.constant_s, rel=1e-12
    )


@given(st.integers(1, 4096), st.integers(0, 64), st.sampled_from([1, 64, 128, 256]))
def test_tiles_only_ever_round_up(chunk, requests, tile):
    """A tiled step lasts as long as the untiled one of the next multiple of the tile."""
    untiled = HybridLatency(floor_s=0.001, per_token_s=1e-4, per_token_squared_s=0.0, per_context_token_s=0.0)
    tiled = dataclasses.replace(untiled, tile_tokens=tile)
    rounded = -(-(chunk + requests) // tile) * tile
    assert tiled.step_s(chunk, 0, requests) == pytest.approx(untiled.step_s(rounded, 0), rel=1e-12)
    assert tiled.step_s(chunk, 0, requests) >= untiled.step_s(chunk, 0, requests)


def test_models_answer_arrays_as_they_answer_numbers():
    """Element by element, an array of counts gives the same seconds."""
    n = np.array([1000.0, 5000.0, 9000.0])
    hosted = dataclasses.replace(DECODE, host_s=0.004, host_free=1500.0)
    for method in (
        PREFILL.seconds,
        lambda t: DECODE.step_s(4.0, t),
        lambda t: hosted.step_s(t, 0),
        LinkLatency(1e9, 0.01).seconds,
    ):
        assert method(n).tolist() == [method(float(each)) for each in n]


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_impossible_coefficients_are_refused(bad):
    """Negative or non-finite coefficients name themselves."""
    with pytest.raises(ValueError, match="per_token_s"):
        dataclasses.replace(PREFILL, per_token_s=bad)
    with pytest.raises(ValueError, match="per_request_s"):
        DecodeLatency(1.0, bad, 0.0)
    with pytest.raises(ValueError, match="latency_s"):
        LinkLatency(1.0, bad)
    for name in ("host_s", "host_free"):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(DECODE, **{name: bad})


def test_a_link_needs_bandwidth_and_a_hybrid_a_tile():
    """Zero bandwidth and a tile of no tokens are errors."""
    with pytest.raises(ValueError, match="bytes_per_s"):
        LinkLatency(0.0)
    with pytest.raises(ValueError, match="tile_tokens"):
        dataclasses.replace(HybridLatency.of(PREFILL, DECODE), tile_tokens=0)


def test_a_whole_model_moves_kvcache_by_the_token_and_travels_between_processes():
    """Transfer and loads count the model's own KVCache bytes; a model can be pickled and hashed."""
    shape, model = WHOLE.shape, dataclasses.replace(WHOLE, ssd=None)
    assert model.transfer_s(100) == 0.5 + 100 * shape.kv_bytes_per_token / 1e6
    assert model.dram_load_s(100) == 100 * shape.kv_bytes_per_token / 1e7
    with pytest.raises(ValueError, match="no ssd"):
        model.ssd_load_s(100)
    with_disk = dataclasses.replace(model, ssd=LinkLatency(1e5))
    assert with_disk.ssd_load_s(100) == 100 * shape.kv_bytes_per_token / 1e5
    assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301  # our own bytes
    assert hash(model) != hash(with_disk)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_load_beside_a_computation_is_the_recurrence_of_equal_layers(compute, load):
    """The closed form is that of layer-wise prefill, from disk as from elsewhere."""
    layers = WHOLE.shape.layers
    times = layerwise_times([load / layers] * layers, [compute / layers] * layers, [0.0] * layers)
    assert WHOLE.beside_load_s(compute, load) == pytest.approx(times.total_s)
    tokens = 7 * load
    assert WHOLE.beside_ssd_s(compute, tokens) == WHOLE.beside_load_s(compute, WHOLE.ssd_load_s(tokens))
