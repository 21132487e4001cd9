"""Engines from outside: streaming, cancelling, refusing, logging, and callers that share one."""

import dataclasses
import json

import msgspec
import numpy as np
import pytest

from mooncake_lab.batching import Orca, Plan, PrefillOnly, gantt
from mooncake_lab.engine import (
    CoupledEngine,
    DecodeEngine,
    Engine,
    EngineSettings,
    GenerationRequest,
    KVSpan,
    PrefillEngine,
)
from mooncake_lab.engine.config import read_config

ROOM = EngineSettings(block_size_tokens=8, cache_blocks=40, max_batch_tokens=64, max_requests=8)


class TestStreaming:
    def test_every_token_is_streamed_once_in_order(self, model, prompts):
        """What the callback got, request by request, is the output."""
        seen = {}
        engine = CoupledEngine(model, settings=ROOM)
        outputs = engine.generate(
            prompts(0, 4), max_new_tokens=7, on_token=lambda i, token: seen.setdefault(i, []).append(token)
        )
        assert {output.request_id: list(output.tokens) for output in outputs} == seen

    def test_an_end_token_ends_an_output(self, model, prompts):
        """The output stops with the first end token, which is part of it."""
        prompt = prompts(3, 1)[0]
        whole = CoupledEngine(model, settings=ROOM).generate([prompt], max_new_tokens=12)[0].tokens
        request = GenerationRequest(prompt=prompt, max_new_tokens=12, end_tokens=(whole[5],))
        output = Engine(model, Orca(), ROOM).generate([request])[0]
        assert output.tokens == whole[: whole.index(whole[5]) + 1]
        assert output.finish_reason == "end_token"


class TestCancelling:
    def test_a_cancelled_request_frees_its_blocks_and_disturbs_nobody(self, model, prompts):
        """Cancelled from its own callback after three tokens; the others generate as if alone."""
        asked = prompts(0, 4)
        expected = CoupledEngine(model, settings=ROOM).generate(asked, max_new_tokens=9)
        engine = Engine(model, Orca(), ROOM)

        def stop(request_id, _):
            if len(seen.setdefault(request_id, [0])) == 3 and request_id == 2:
                engine.cancel(request_id)
            seen[request_id].append(0)

        seen = {}
        outputs = engine.generate([GenerationRequest(prompt=p, max_new_tokens=9, on_token=stop) for p in asked])
        engine.instance.check()
        assert outputs[2].finish_reason == "cancelled"
        assert outputs[2].tokens == expected[2].tokens[:3]
        assert [outputs[i].tokens for i in (0, 1, 3)] == [expected[i].tokens for i in (0, 1, 3)]
        assert engine.allocator.available == ROOM.cache_blocks


class TestPacking:
    @pytest.mark.parametrize(("most", "steps"), [(None, 1), (64, 1), (1, 2)])
    def test_waiting_prompts_share_an_iteration_up_to_its_tokens(self, model, prompts, most, steps):
        """Two short prompts are done after one iteration, or after two where one is computed at a time."""
        asked = [prompt[:20] for prompt in prompts(0, 2)]
        engine = PrefillEngine(model, ROOM, pack_tokens=most)
        ids = [engine.submit(GenerationRequest(prompt=prompt)) for prompt in asked]
        done = [[result.request_id for result in engine.step()] for _ in range(steps)]
        assert done == ([ids] if steps == 1 else [[ids[0]], [ids[1]]])


class TestRefusing:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            (
                GenerationRequest(prompt=[1] * 300, max_new_tokens=40),
                "339 tokens of KVCache; this engine's holds 320",
            ),
            (GenerationRequest(prompt=[1] * 1000, max_new_tokens=40), "the model's context length here is 1024"),
            (GenerationRequest(prompt=[1, 61]), "the prompt holds tokens 1 to 61"),
            (GenerationRequest(prompt=[-1, 3]), "the prompt holds tokens -1 to 3"),
        ],
    )
    def test_what_can_never_fit_is_refused_at_once(self, model, request_, message):
        """The error names the numbers; the engine is as before."""
        engine = CoupledEngine(model, settings=ROOM)
        with pytest.raises(ValueError, match=message):
            engine.submit(request_)
        assert not engine.engine.busy

    def test_what_a_policy_can_never_serve_ends_rejected(self, model, prompts):
        """Orca computes whole prompts: one wider than an iteration is rejected with its reason, others run."""
        outputs = CoupledEngine(model, Orca(), ROOM).generate([[1] * 100, *prompts(0, 2)])
        assert [output.finish_reason for output in outputs] == ["rejected", "length", "length"]
        assert "100 tokens of its prompt" in outputs[0].error

    def test_a_policy_that_does_nothing_is_an_error_not_a_hang(self, model):
        """An empty plan while a request waits raises and names the request."""

        class Idle:
            def plan(self, waiting, running, limits):  # noqa: ARG002  # a policy's signature
                return Plan()

        engine = Engine(model, Idle(), ROOM)
        engine.submit(GenerationRequest(prompt=[1]))
        with pytest.raises(RuntimeError, match=r"does nothing while requests \[0\]"):
            engine.step()

    def test_foreign_kvcache_is_refused(self, model, make):
        """KVCache of another model, or with a gap, or of too few tokens, is refused with the reason."""
        kv = PrefillEngine(make(7).model(), ROOM).prefill([1, 2, 3]).kv
        decode = DecodeEngine(model, ROOM)
        request = GenerationRequest(prompt=[1, 2, 3])
        with pytest.raises(ValueError, match="made by another model"):
            decode.submit(request, first_token=1, kv=[kv])
        own = PrefillEngine(model, ROOM).prefill([1, 2, 3]).kv
        gap = KVSpan(fingerprint=own.fingerprint, start=1, tokens=3, layers=own.layers)
        with pytest.raises(ValueError, match="no gap is allowed"):
            decode.submit(request, first_token=1, kv=[gap])
        with pytest.raises(ValueError, match="decode needs all of it"):
            decode.submit(GenerationRequest(prompt=[1, 2, 3, 4]), first_token=1, kv=[own])


class TestLog:
    def test_a_log_draws_a_gantt_chart_and_is_plain(self, model):
        """Two equal requests under Orca: both prompts, then decodes; every iteration encodes to JSON."""
        engine = CoupledEngine(model, Orca(), ROOM)
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=4)
        log = engine.engine.log
        assert gantt(log) == {0: "Pddd", 1: "Pddd"}
        assert all(timed.start_s <= timed.end_s for timed in log)
        decoded = msgspec.json.decode(msgspec.json.encode(log))
        assert [len(step["plan"]["segments"]) for step in decoded] == [2, 2, 2, 2]
        assert engine.engine.last_plan == log[-1].plan
        engine.step()
        assert engine.engine.last_plan.is_empty, "it computed nothing"

    def test_many_requests_leak_nothing(self, model):
        """After a long run every block is available, and no list has grown."""
        engine = CoupledEngine(
            model, settings=EngineSettings(cache_blocks=64, keep_log=False, max_requests=64, max_batch_tokens=256)
        )
        rng = np.random.default_rng(0)
        for _ in range(5):
            engine.generate(
                [rng.integers(0, 61, rng.integers(1, 20)).tolist() for _ in range(100)], max_new_tokens=2
            )
            engine.engine.instance.check()
        assert engine.engine.allocator.available == 64
        assert not engine.engine.log


def test_a_bad_prompt_leaves_nothing_behind(model):
    """When one of several cannot be served none is, and the next call returns its own outputs only."""
    engine = CoupledEngine(model, settings=ROOM)
    with pytest.raises(ValueError, match="the model knows"):
        engine.generate([[1], [10**6]])
    assert not engine.engine.busy
    (output,) = engine.generate([[5]], max_new_tokens=2)
    assert output.prompt_tokens == 1


def test_generate_returns_its_own_and_keeps_the_others(model):
    """A request that was waiting ends while others are generated, and is returned by the next step."""
    engine = CoupledEngine(model, settings=ROOM)
    early = engine.submit(GenerationRequest(prompt=[1, 2, 3], max_new_tokens=2, end_tokens=()))
    outputs = engine.generate([[4, 5], [6]], max_new_tokens=5)
    assert [output.prompt_tokens for output in outputs] == [2, 1]
    assert engine.engine.busy
    assert [output.request_id for output in engine.run()] == [early]
    assert not engine.engine.busy


def test_prefill_keeps_what_others_asked_for(model):
    """Waiting for one prompt loses no result of another."""
    engine = PrefillEngine(model, ROOM)
    first = engine.submit(GenerationRequest(prompt=[1, 2, 3]))
    alone = engine.prefill([4, 5, 6, 7])
    (other,) = engine.step()
    assert other.request_id == first
    assert alone.kv.tokens == 4


def test_a_callback_that_raises_loses_no_output(model):
    """Its error is the caller's; the outputs of that iteration come with the next one, and the others are told."""
    told = []

    def fail(_request, _token):
        raise RuntimeError("a client's own")

    engine = CoupledEngine(model, settings=ROOM)
    engine.submit(GenerationRequest(prompt=[1], max_new_tokens=1, on_token=fail))
    engine.submit(GenerationRequest(prompt=[2], max_new_tokens=1, on_token=lambda *token: told.append(token)))
    with pytest.raises(RuntimeError, match="a client's own"):
        engine.run()
    assert len(told) == 1
    assert len(engine.run()) == 2


def test_a_policy_that_raises_loses_no_output(model):
    """What ended before its error, here by a cancellation, is returned by the next step that succeeds."""

    class Fails:
        fails = True

        def plan(self, waiting, running, limits):
            if self.fails:
                raise LookupError("a policy's own")
            return PrefillOnly().plan(waiting, running, limits)

    policy = Fails()
    engine = Engine(model, policy, ROOM)
    cancelled, other = (engine.submit(GenerationRequest(prompt=[token], max_new_tokens=1)) for token in (1, 2))
    engine.cancel(cancelled)
    for _ in range(2):
        with pytest.raises(LookupError, match="a policy's own"):
            engine.step()
    policy.fails = False
    assert {one.request_id: one.finish_reason for one in engine.run()} == {cancelled: "cancelled", other: "length"}


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
