"""The lab: questions their contexts answer, training that may be interrupted, weights that others load."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from mooncake_lab.compression import FullCache, Oracle, Session, SnapKV
from mooncake_lab.compression.lab import tasks as v
from mooncake_lab.compression.lab.curriculum import STAGES, draw_batch, rng_of
from mooncake_lab.compression.lab.examine import exam, marks
from mooncake_lab.compression.lab.network import LabNetwork, lab_config, save_model
from mooncake_lab.compression.lab.tasks import EXAMINED, Context, medley, needle
from mooncake_lab.compression.lab.text import filler
from mooncake_lab.compression.lab.train import Trainer, Training, orthogonal
from mooncake_lab.engine import load_model
from mooncake_lab.engine.rope import rotate

POOL = filler(np.random.default_rng(0), 4096)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return LabNetwork(lab_config())


@pytest.fixture(scope="module")
def saved(network, tmp_path_factory):
    """The untrained network as a model directory."""
    directory = tmp_path_factory.mktemp("lab")
    save_model(network.state_dict(), directory)
    return directory


@pytest.mark.parametrize("task", EXAMINED)
def test_answers_stand_in_their_contexts(task):
    """What is asked for is written at the evidence, before the question; samples have exactly the length."""
    for sample in exam(task, 5, seed=3, length=256):
        assert len(sample.tokens) == 256
        assert 0 <= sample.tokens.min() <= sample.tokens.max() < v.VOCABULARY
        for index, asked in enumerate(sample.questions):
            assert asked.asked_at < asked.answer_at <= 256 - asked.answer_tokens
            written = sample.tokens[list(asked.evidence)][-asked.answer_tokens :]
            assert (written == sample.answer(index)).all()
            assert max(asked.evidence) < asked.answer_at


@given(st.integers(0, 10_000), st.sampled_from([128, 256, 512]), st.integers(1, 8), st.integers(0, 8))
def test_medleys_ask_for_what_stands_in_them(seed, length, pairs, gap):
    """Records of every kind, each question's answer at its evidence, and exactly the length, whatever is drawn."""
    questions = 1 + seed % pairs
    sample = medley(Context(np.random.default_rng(seed), POOL), length, pairs=pairs, questions=questions, gap=gap)
    assert len(sample.tokens) == length
    assert len(sample.questions) == questions + 2 + (length >= 256)
    for index, asked in enumerate(sample.questions):
        assert (sample.tokens[list(asked.evidence)][-asked.answer_tokens :] == sample.answer(index)).all()
        assert max(asked.evidence) < asked.asked_at


def test_exams_are_the_same_everywhere_and_differ_by_seed():
    """The same seed asks the same questions, another seed others."""
    first, again, other = (exam("recall", 2, seed=seed, length=128) for seed in (0, 0, 1))
    assert all((a.tokens == b.tokens).all() for a, b in zip(first, again, strict=True))
    assert not (first[0].tokens == other[0].tokens).all()


def test_needle_lies_where_it_is_put():
    """Depth zero is the front of the filler, depth one its end."""
    context = Context(np.random.default_rng(0), POOL)
    front, back = (needle(context, 200, depth=depth).questions[0].evidence[0] for depth in (0.0, 1.0))
    assert front == 1
    assert back == 200 - 5 - 5


def test_tokens_are_readable():
    """Bytes read as text and everything else by its name."""
    tokens = [v.BEGIN, ord("a"), v.SET, v.FIRST_KEY + 3, v.FIRST_VALUE, v.FIRST_ENDING + 9, v.FIRST_TOPIC, v.END]
    assert v.readable(tokens) == "[BEGIN]a[SET][k3][v0][w9][topic 0][END]"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_batches_have_answers_to_learn(stage):
    """A step's contexts fill their rectangle, and answers are a part of it."""
    for step in range(3):
        batch = draw_batch(stage, Context(rng_of(0, step), POOL))
        assert batch.tokens.size == stage.rows * stage.length
        assert not (batch.recalls & (batch.weights == 0)).any()
        assert (batch.weights > 0).mean() < 1
        sums = batch.weights.sum(axis=1)
        assert sums[sums > 0] == pytest.approx(1)


def test_first_answer_of_a_context_counts_a_quarter_at_least():
    """However many questions follow: they have an example just before them."""
    batch = draw_batch(STAGES[1], Context(rng_of(0, 0), POOL))
    for weights in batch.weights:
        first = np.flatnonzero(weights)[:2]
        assert weights[first].sum() >= 0.25 - 1e-6
        assert weights[first[0]] == weights[first[1]]


def test_unknown_tasks_are_refused():
    """An exam names the tasks there are."""
    with pytest.raises(ValueError, match="recall, needle"):
        exam("spelling", 1)


def test_interrupted_training_goes_on_where_it_was(tmp_path):
    """Four steps, and two, a new process and two more, give the same weights."""
    stage = replace(STAGES[0], rows=2, at_least=10)
    straight = Trainer(Training(stages=(stage,), checkpoint_steps=100), tmp_path / "a")
    halves = [Trainer(Training(stages=(stage,), checkpoint_steps=2), tmp_path / "b") for _ in range(1)]
    for _ in range(4):
        straight.step()
    halves[0].step()
    halves[0].step()
    again = Trainer(Training(stages=(stage,), checkpoint_steps=2), tmp_path / "b")
    assert again.state.step == 2
    again.step()
    again.step()
    for name, weights in straight.network.state_dict().items():
        torch.testing.assert_close(again.network.state_dict()[name], weights, atol=1e-6, rtol=1e-5)


def test_saved_network_is_the_engines_and_hugging_faces(network, saved):
    """The same tokens get the same logits from the trained module, the engine and transformers."""
    sample = exam("recall", 1, length=200)[0]
    with torch.inference_mode():
        ours = network(torch.from_numpy(sample.tokens)[None])[0]
        theirs = LlamaForCausalLM.from_pretrained(saved)(torch.from_numpy(sample.tokens)[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    engine = Session(load_model(str(saved), device="cpu"), room_tokens=512).prefill(sample.tokens)
    torch.testing.assert_close(ours[-1], engine.logits, atol=1e-3, rtol=1e-3)


def test_untrained_heads_look_back(network):
    """Before any training, the first KV head's queries put most of their weight on the token before."""
    attention, tokens = network.model.layers[0].self_attn, torch.randint(v.VOCABULARY, (1, 64))
    seen = {}
    handle = attention.register_forward_pre_hook(lambda _, inputs: seen.update(hidden=inputs[0]))
    with torch.inference_mode():
        network(tokens)
        query, key = (
            rotate(part(seen["hidden"])[0].view(64, -1, 32), network.cosines[:64], network.sines[:64])[:, 0]
            for part in (attention.q_proj, attention.k_proj)
        )
    handle.remove()
    scores = (query @ key.T * 32**-0.5).masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf)
    assert scores.softmax(dim=-1).diagonal(-1).mean() > 0.5


def test_muon_steps_are_nearly_orthogonal():
    """Singular values of an update lie around one, whatever those of the gradient."""
    matrices = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0))
    for found in (orthogonal(matrices), orthogonal(matrices.transpose(1, 2))):
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.4
        assert values.max() < 1.3


def test_marks_compare_methods_on_the_same_sample(saved):
    """Every method is marked, bytes are measured, and the pool is left empty."""
    session = Session(load_model(str(saved), device="cpu"), room_tokens=2048)
    (sample,) = exam("two_questions", 1, length=256)
    methods = {
        "full": lambda _: FullCache(),
        "snapkv": lambda _: SnapKV(capacity=64),
        "oracle": lambda sample: Oracle(capacity=64, evidence=sample.questions[-1].evidence),
    }
    for when in ("asked", "later", "turn"):
        found = marks(session, sample, methods, when=when)
        assert list(found) == list(methods)
        assert found["snapkv"].device_bytes < found["full"].device_bytes / 3
        assert session.pool.used_bytes == 0


def test_a_right_answer_is_the_greedy_one(saved):
    """The mark of the full cache is what token by token greedy decoding says."""
    session = Session(load_model(str(saved), device="cpu"), room_tokens=2048)
    for sample in exam("recall", 3, length=128):
        mark = marks(session, sample, {"full": lambda _: FullCache()})["full"]
        held, logits = session.start(sample.prompt(), FullCache())
        said = session.generate(held, int(logits.argmax()), 2)
        held.release()
        assert mark.right == (said == sample.answer().tolist())
