"""The program that trains `lab-recall`: contexts, an interruption, and weights that others load."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from mooncake_lab.compression import Session
from mooncake_lab.compression.exam import exam
from mooncake_lab.compression.questions import Context, filler, rng_of
from mooncake_lab.engine import load_model

PATH = Path(__file__).parents[2] / "data" / "models" / "lab-recall" / "train.py"


@pytest.fixture(scope="module")
def program():
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("train_lab_recall", PATH)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_contexts_have_answers_to_learn(program):
    """A step fills its rectangle; a context's answers weigh one in all, the first of them at least a quarter."""
    pool = filler(np.random.default_rng(0), 4096)
    for stage in program.STAGES:
        for step in range(3):
            batch = program.draw_batch(stage, Context(rng_of(0, step), pool))
            assert batch.tokens.size == stage.rows * stage.length
            assert not (batch.recalls & (batch.weights == 0)).any()
            sums = batch.weights.sum(axis=1)
            assert sums[sums > 0] == pytest.approx(1)
    for weights in program.draw_batch(program.STAGES[1], Context(rng_of(0, 0), pool)).weights:
        assert weights[np.flatnonzero(weights)[:2]].sum() >= 0.25 - 1e-6


def test_interrupted_training_goes_on_where_it_was(program, tmp_path):
    """Two steps, and one, a new process and another, give the same weights."""
    stages = (replace(program.STAGES[0], rows=2, at_least=10),)
    straight = program.Trainer(program.Training(stages=stages), tmp_path / "a")
    straight.step()
    straight.step()
    often = program.Training(stages=stages, checkpoint_steps=1)
    program.Trainer(often, tmp_path / "b").step()
    again = program.Trainer(often, tmp_path / "b")
    assert again.state.step == 1
    again.step()
    for name, weights in straight.network.state_dict().items():
        torch.testing.assert_close(again.network.state_dict()[name], weights, atol=1e-6, rtol=1e-5)


def test_saved_network_is_the_engines_and_hugging_faces(program, tmp_path):
    """The same tokens get the same logits from the network that is trained, the engine and transformers."""
    network = program.LabNetwork(program.lab_config())
    program.save_model(network.state_dict(), tmp_path)
    (sample,) = exam("recall", 1, length=200)
    with torch.inference_mode():
        ours = network(torch.from_numpy(sample.tokens)[None])[0]
        theirs = LlamaForCausalLM.from_pretrained(tmp_path)(torch.from_numpy(sample.tokens)[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    engine = Session(load_model(str(tmp_path), device="cpu"), room_tokens=512).prefill(sample.tokens)
    torch.testing.assert_close(ours[-1], engine.logits, atol=1e-3, rtol=1e-3)
