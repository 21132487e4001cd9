"""Iteration costs: laws of the linear part, tiles, attention that adds up, and transfer by the roofline."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf import HybridLatency, IterationCost, LinearCost, hardware, model_shape, transferred

LINEAR = LinearCost(((4.0, 0.040), (128.0, 0.050), (256.0, 0.070), (1024.0, 0.22)), 128)
COST = IterationCost(name="a test", linear=LINEAR, per_pair_s=2e-8, per_context_token_s=1.4e-6, beside_s=1e-3)
tokens = st.integers(1, 5000)


class TestLinear:
    @given(tokens, tokens)
    def test_more_tokens_never_take_less(self, fewer, more):
        """The linear part never falls with its tokens."""
        low, high = sorted((fewer, more))
        assert LINEAR.seconds(low) <= LINEAR.seconds(high)

    def test_a_started_tile_costs_a_whole_one(self):
        """257 tokens cost what 384 do, and more than 256."""
        assert LINEAR.seconds(257) == LINEAR.seconds(384) > LINEAR.seconds(256)

    def test_tiles_can_be_switched_off(self):
        """Without tiles 257 tokens cost hardly more than 256, and whole tiles cost the same either way."""
        smooth = dataclasses.replace(LINEAR, tile_tokens=1)
        assert smooth.seconds(256) < smooth.seconds(257) < LINEAR.seconds(257)
        assert smooth.seconds(384) == LINEAR.seconds(384)

    @given(st.integers(0, 3))
    def test_anchors_are_met(self, index):
        """The cost goes through its anchors."""
        at, seconds = LINEAR.anchors[index]
        assert LINEAR.seconds(at) == seconds

    def test_dust_is_no_tile(self):
        """A mean that misses a whole tile by rounding does not start another."""
        assert LINEAR.seconds(256 + 1e-12) == LINEAR.seconds(256)

    def test_the_ends(self):
        """Nothing costs nothing, one token reads all weights, and saturated tokens cost alike."""
        assert LINEAR.seconds(0) == 0
        assert LINEAR.seconds(1) == LINEAR.seconds(4)
        assert LINEAR.seconds(4096) == pytest.approx(4 * LINEAR.seconds(1024))

    @pytest.mark.parametrize("anchors", [((1.0, 1.0),), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ()])
    def test_anchors_that_do_not_rise_are_refused(self, anchors):
        """Two rising anchors are the least."""
        with pytest.raises(ValueError, match="two or more are needed"):
            LinearCost(anchors)


class TestIteration:
    @given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
    def test_attention_of_pieces_adds_up_but_for_rereads(self, sizes):
        """However a prompt is cut, its pairs are those of the whole; only reading again is added."""
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        cut = sum(COST.chunk_attention_s(size, start) for size, start in zip(sizes, starts, strict=True))
        whole = COST.chunk_attention_s(sum(sizes))
        assert cut == pytest.approx(whole + COST.per_context_token_s * sum(starts), rel=1e-9)
        free = dataclasses.replace(COST, rereads=False)
        pairs = sum(free.chunk_attention_s(size, start) for size, start in zip(sizes, starts, strict=True))
        assert pairs == pytest.approx(free.chunk_attention_s(sum(sizes)), rel=1e-9)

    @given(st.integers(1, 2000), st.integers(0, 4000), st.integers(1, 64), st.integers(1, 4000))
    def test_together_is_never_dearer_than_apart(self, chunk, start, decodes, context):
        """Without tiles, one iteration of both saves a reading of the weights and costs the meeting at most."""
        smooth = dataclasses.replace(COST, linear=LinearCost(LINEAR.anchors))
        both = smooth.step_s(chunk, start, decodes, decodes * context)
        apart = smooth.step_s(chunk, start) + smooth.step_s(0, 0, decodes, decodes * context)
        assert both <= apart + COST.beside_s

    def test_it_steps_as_a_hybrid_latency_does(self):
        """With a floor and a slope for anchors it is `HybridLatency`, but for half a token a row."""
        hybrid = HybridLatency(floor_s=0.05, per_token_s=1e-4, per_token_squared_s=1e-9, per_context_token_s=1e-6)
        linear = LinearCost(((500.0, 0.05), (5000.0, 0.5)))
        cost = IterationCost(
            name="the same", linear=linear, per_pair_s=2e-9, per_context_token_s=1e-6, rereads=False
        )
        for step in ((100, 0, 0, 0), (1000, 500, 20, 30_000), (0, 0, 8, 8000)):
            assert cost.step_s(*step) == pytest.approx(hybrid.step_s(*step), rel=1e-4)

    @pytest.mark.parametrize("name", ["per_pair_s", "per_context_token_s", "beside_s"])
    def test_negative_coefficients_are_refused(self, name):
        """No attention gives time back."""
        with pytest.raises(ValueError, match="negative coefficient"):
            dataclasses.replace(COST, **{name: -1.0})


class TestTransfer:
    def moved(self, shape="llama-33b", device="a100"):
        """The test's cost on another machine."""
        return transferred(
            COST,
            source=(model_shape("llama-13b"), hardware("a6000")),
            target=(model_shape(shape), hardware(device)),
            name="moved",
        )

    def test_to_itself_changes_nothing(self):
        """The same model on the same device has the same cost."""
        same = self.moved("llama-13b", "a6000")
        assert same.linear.anchors == COST.linear.anchors
        assert same.step_s(300, 100, 5, 5000) == pytest.approx(COST.step_s(300, 100, 5, 5000), rel=1e-12)

    def test_shares_of_the_roofline_are_kept(self):
        """Weights and contexts keep their share of the bandwidth, pairs their share of the peak."""
        moved = self.moved()
        for cost, name, device in ((COST, "llama-13b", "a6000"), (moved, "llama-33b", "a100")):
            shape, machine = model_shape(name), hardware(device)
            read_s = shape.streamed_weight_bytes / machine.memory_bytes_per_s
            context_s = shape.kv_bytes_per_token / machine.memory_bytes_per_s
            pair_s = 4 * shape.query_width * shape.layers / machine.flops_per_s()
            shares = (
                cost.linear.seconds(1) / read_s, cost.per_context_token_s / context_s, cost.per_pair_s / pair_s
            )  # fmt: skip  # three ratios
            if cost is COST:
                expected = shares
            assert shares == pytest.approx(expected)

    def test_what_the_engine_costs_stays(self):
        """A cost for each running request belongs to the engine, and comes along."""
        there = (model_shape("llama-33b"), hardware("a100"))
        host = dataclasses.replace(COST, per_decode=LinearCost(((1, 1e-3), (8, 9e-3))))
        here = (model_shape("llama-13b"), hardware("a6000"))
        assert transferred(host, source=here, target=there, name="moved").per_decode == host.per_decode
