"""The examination: questions that their contexts answer, and marks that are what greedy decoding says."""

from pathlib import Path

import numpy as np
import pytest

from mooncake_lab.compression import FullCache, Oracle, Session, SnapKV
from mooncake_lab.compression import questions as v
from mooncake_lab.compression.exam import exam, marks
from mooncake_lab.compression.questions import EXAMINED, Context, filler, needle
from mooncake_lab.engine import load_model

MODEL = Path(__file__).parents[2] / "data" / "models" / "lab-recall"


@pytest.fixture(scope="module")
def lab():
    """The trained model, with room for a few contexts."""
    return Session(load_model(str(MODEL), device="cpu"), room_tokens=2048)


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


def test_needle_lies_where_it_is_put():
    """Depth zero is the front of the filler, depth one its end."""
    context = Context(np.random.default_rng(0), filler(np.random.default_rng(0), 4096))
    front, back = (needle(context, 200, depth=depth).questions[0].evidence[0] for depth in (0.0, 1.0))
    assert front == 1
    assert back == 200 - 5 - 5


def test_tokens_are_readable():
    """Bytes read as text and everything else by its name."""
    tokens = [v.BEGIN, ord("a"), v.SET, v.FIRST_KEY + 3, v.FIRST_VALUE, v.FIRST_ENDING + 9, v.FIRST_TOPIC, v.END]
    assert v.readable(tokens) == "[BEGIN]a[SET][k3][v0][w9][topic 0][END]"


def test_marks_compare_methods_on_the_same_sample(lab):
    """Every method is marked, bytes are measured, and the pool is left empty."""
    (sample,) = exam("two_questions", 1, length=256)
    methods = {
        "full": lambda _: FullCache(),
        "snapkv": lambda _: SnapKV(capacity=64),
        "oracle": lambda sample: Oracle(capacity=64, evidence=sample.questions[-1].evidence),
    }
    for when in ("asked", "later", "turn"):
        found = marks(lab, sample, methods, when=when)
        assert list(found) == list(methods)
        assert found["snapkv"].device_bytes < found["full"].device_bytes / 3
        assert lab.pool.used_bytes == 0


def test_a_right_answer_is_the_greedy_one(lab):
    """The mark of the full cache is what token by token greedy decoding says."""
    for sample in exam("recall", 3, length=128):
        mark = marks(lab, sample, {"full": lambda _: FullCache()})["full"]
        held, logits = lab.start(sample.prompt(), FullCache())
        said = lab.generate(held, int(logits.argmax()), 2)
        held.release()
        assert mark.right == (said == sample.answer().tolist())
