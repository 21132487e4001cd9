"""Several callers share an engine: nobody loses an output, whatever another one does."""

import dataclasses
import json

import pytest
import torch

from mooncake_lab.engine import CoupledEngine, DecodeEngine, EngineSettings, GenerationRequest, PrefillEngine
from mooncake_lab.engine.config import read_config
from mooncake_lab.engine.sampling import Sampling, sample

ROOM = EngineSettings(block_size_tokens=8, cache_blocks=60, max_batch_tokens=64, max_requests=8)


def test_a_bad_prompt_leaves_nothing_behind(model):
    """When one of several cannot be served none is, and the next call returns its own outputs only."""
    engine = CoupledEngine(model, None, ROOM)
    with pytest.raises(ValueError, match="the model knows"):
        engine.generate([[1], [10**6]])
    assert not engine.engine.busy
    (output,) = engine.generate([[5]], max_new_tokens=2)
    assert output.prompt_tokens == 1


def test_generate_returns_its_own_and_keeps_the_others(model):
    """A request that was waiting ends while others are generated, and is returned by the next step."""
    engine = CoupledEngine(model, None, ROOM)
    early = engine.submit(GenerationRequest(prompt=[1, 2, 3], max_new_tokens=2, end_tokens=()))
    outputs = engine.generate([[4, 5], [6]], max_new_tokens=5)
    assert [output.prompt_tokens for output in outputs] == [2, 1]
    assert engine.engine.busy
    assert [output.request_id for output in engine.run()] == [early]
    assert not engine.engine.busy


def test_prefill_keeps_what_others_asked_for(model):
    """Waiting for one prompt loses no result of another."""
    engine = PrefillEngine(model, ROOM)
    first = engine.submit([1, 2, 3])
    alone = engine.prefill([4, 5, 6, 7])
    (other,) = engine.step()
    assert other.request_id == first
    assert alone.kv.tokens == 4


def test_a_callback_that_raises_loses_no_output(model):
    """Its error is the caller's; the outputs of that iteration come with the next one, and the others are told."""
    told = []

    def fail(_request, _token):
        raise RuntimeError("a client's own")

    engine = CoupledEngine(model, None, ROOM)
    engine.submit(GenerationRequest(prompt=[1], max_new_tokens=1, on_token=fail))
    engine.submit(GenerationRequest(prompt=[2], max_new_tokens=1, on_token=lambda *token: told.append(token)))
    with pytest.raises(RuntimeError, match="a client's own"):
        engine.run()
    assert len(told) == 1
    assert len(engine.run()) == 2


def test_cancelling_what_is_not_there_yet_does_nothing(model):
    """An id that was not given cancels no later request."""
    engine = CoupledEngine(model, None, ROOM)
    engine.cancel(0)
    assert engine.submit(GenerationRequest(prompt=[1], max_new_tokens=3, end_tokens=())) == 0
    (output,) = engine.run()
    assert (output.finish_reason, len(output.tokens)) == ("length", 3)


@pytest.mark.parametrize("ends", [True, False])
def test_decode_of_what_is_done_already_ends_at_once(model, ends):
    """A first token that ends a request, or is all it asked for, is its output; a wild one is refused."""
    prefill, decode = PrefillEngine(model, ROOM), DecodeEngine(model, ROOM)
    done = prefill.prefill([1, 2, 3])
    end_tokens = (done.first_token,) if ends else ()
    request = GenerationRequest(prompt=[1, 2, 3], max_new_tokens=9 if ends else 1, end_tokens=end_tokens)
    decode.submit(request, first_token=done.first_token, kv=[done.kv])
    (output,) = decode.run()
    assert output.tokens == (done.first_token,)
    assert output.finish_reason == ("end_token" if ends else "length")
    wanted = dataclasses.replace(request, max_new_tokens=9)
    for wild in (-1, 10**6):
        with pytest.raises(ValueError, match="generated part holds"):
            decode.submit(wanted, first_token=wild, kv=[done.kv])
    decode.engine.instance.check()


def test_end_tokens_come_from_the_generation_config(tmp_path):
    """Where a directory has one, it decides, as in transformers' `generate`."""
    shape = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "vocab_size"), 8) | {"hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "intermediate_size": 8, "eos_token_id": 1}))
    assert read_config(tmp_path).end_tokens == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert read_config(tmp_path).end_tokens == (2, 3)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path).end_tokens == (1,)


def test_the_smallest_temperature_is_greedy():
    """No division makes the likeliest token lose."""
    assert sample(torch.tensor([[5.0, 10.0, 10.0 - 1e-3]]), [Sampling(temperature=1e-40)], [0]) == [1]


def test_equal_prompts_draw_differently(model):
    """The seed of each request of a call is its own, and the call is repeatable."""
    draws = [
        [output.tokens for output in CoupledEngine(model, None, ROOM).generate(
            [[1, 2]] * 4, max_new_tokens=8, sampling=Sampling(temperature=5.0, seed=3))]
        for _ in range(2)
    ]  # fmt: skip
    assert draws[0] == draws[1]
    assert len({tuple(tokens) for tokens in draws[0]}) > 1
