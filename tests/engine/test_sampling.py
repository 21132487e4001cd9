"""Sampling."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.engine import (
    GREEDY,
    CoupledEngine,
    DecodeEngine,
    EngineSettings,
    GenerationRequest,
    PrefillEngine,
    Sampling,
    load_model,
    sample,
)
from mooncake_lab.engine.sampling import without

LOGITS = st.lists(st.integers(-500, 500), min_size=2, max_size=20, unique=True).map(
    lambda numbers: [n / 100 for n in numbers]
)


def draws(logits, sampling, count):
    rows = torch.tensor([logits])
    return [sample(rows, [sampling], [position])[0] for position in range(count)]


class TestLaws:
    @given(LOGITS, st.integers(0, 9))
    def test_greedy_is_the_limit_of_all(self, logits, seed):
        """Temperature 0, top-k 1 and a tiny top-p all take the likeliest token."""
        best = int(np.argmax(logits))
        for how in (GREEDY, Sampling(temperature=1.0, top_k=1, seed=seed), Sampling(temperature=1.0, top_p=1e-9)):
            assert draws(logits, how, 3) == [best] * 3

    @given(LOGITS, st.integers(1, 20))
    def test_top_k_draws_among_the_k_likeliest(self, logits, k):
        """No other token ever appears."""
        allowed = set(np.argsort(logits)[::-1][:k].tolist())
        assert set(draws(logits, Sampling(temperature=2.0, top_k=k), 20)) <= allowed

    @given(LOGITS, st.floats(0.05, 1.0))
    def test_top_p_draws_from_the_smallest_set_that_reaches_p(self, logits, p):
        """A token appears only if the likelier ones have not reached p together."""
        shares = torch.tensor(logits).softmax(0).double().numpy()
        order = np.argsort(shares)[::-1]
        before = dict(zip(order.tolist(), np.cumsum(shares[order]) - shares[order], strict=True))
        assert all(before[token] < p + 1e-6 for token in draws(logits, Sampling(temperature=1.0, top_p=p), 20))

    def test_frequencies_follow_the_softmax(self):
        """Over many positions, tokens appear as often as their probability says (five standard errors)."""
        logits, count = [0.0, 1.0, -1.0, 0.5], 4000
        found = np.bincount(draws(logits, Sampling(temperature=0.7, seed=3), count), minlength=4) / count
        expected = (torch.tensor(logits) / 0.7).softmax(0).numpy()
        assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)).all()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"temperature": -1.0}, "temperature is -1"),
            ({"temperature": float("nan")}, "temperature is nan"),
            ({"top_p": 0.0}, "top_p is 0"),
            ({"top_k": 0}, "top_k is 0"),
            ({"seed": -1}, "seed is -1"),
        ],
    )
    def test_out_of_range_is_refused(self, change, message):
        """A parameter out of range is an error that names it."""
        with pytest.raises(ValueError, match=message):
            Sampling(**change)


def two_stages(model):
    """Prefill in one engine, decode in another."""

    def generate(requests):
        [request] = requests
        settings = EngineSettings(cache_blocks=8)
        first = PrefillEngine(model, settings)
        done = first.wait(first.submit(request))
        decode = DecodeEngine(model, settings)
        decode.submit(request, first_token=done.first_token, kv=(done.kv,))
        return decode.run()

    return generate


class TestLeastTokens:
    def test_no_end_token_comes_too_early(self):
        """Where every answer would end at once, it ends right after the least number of tokens."""
        model = load_model("random:lab-tiny", device="cpu", backend="dense")
        everything = tuple(range(model.config.vocabulary - 1))  # before that, one token is left to choose
        left = model.config.vocabulary - 1
        for least in (0, 1, 5):
            request = GenerationRequest(
                prompt=[1, 2, 3], max_new_tokens=9, end_tokens=everything, min_new_tokens=least
            )
            engines = CoupledEngine(model, settings=EngineSettings(cache_blocks=8)).engine, two_stages(model)
            for generate in (engines[0].generate, engines[1]):
                [output] = generate([request])
                assert output.tokens[:least] == (left,) * least
                assert len(output.tokens) == least + 1
                assert output.finish_reason == "end_token"

    def test_what_is_banned_is_never_drawn(self):
        """The given logits stay as they are, and neither the likeliest token nor a draw takes a banned one."""
        logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
        found = without(logits, [(0,), ()])
        assert torch.isfinite(logits).all()
        assert sample(found, [GREEDY, GREEDY], [0, 0]) == [1, 0]
        assert 0 not in draws(found[0].tolist(), Sampling(temperature=2.0), 50)
