"""A small random Llama with grouped queries, on the reference backend: laws hold whatever the weights."""

import numba
import numpy as np
import pytest
import torch

from mooncake_lab.compression.session import Session
from mooncake_lab.engine import LlamaConfig, choose_backend, make_model, random_weights

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models gain nothing from threads, and lose much where other tests run beside them."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


def small_model(*, layers=4, kv_heads=2, backend="dense", seed=0):
    """Four query heads of width 8 on some KV heads; a vocabulary of 50."""
    config = LlamaConfig(
        layers=layers, width=32, query_heads=4, kv_heads=kv_heads, head_width=8, ffn_width=48,
        vocabulary=50, tied_embeddings=True, max_positions=512,
    )  # fmt: skip
    weights = random_weights(config, seed=seed, device=CPU, dtype=torch.float32)
    return make_model(weights, choose_backend(CPU, torch.float32, backend))


@pytest.fixture(scope="session")
def session():
    """A session whose pool every test must leave empty."""
    return Session(small_model(), room_tokens=2000, block_size_tokens=8)


@pytest.fixture(autouse=True)
def _nothing_leaks(session):
    yield
    assert session.pool.used_bytes == 0, "a test left KVCache blocks behind"


@pytest.fixture
def prompt():
    """150 random tokens."""
    return np.random.default_rng(0).integers(50, size=150)


@pytest.fixture
def whole(session, prompt):
    """The prompt's exact prefill, with its last 32 queries."""
    return session.prefill(prompt, window=32)


@pytest.fixture
def step(session, whole):
    """Logits after two further tokens on what a method keeps; the cache is released again."""

    def run(method, prefilled=whole):
        held = session.hold(prefilled, method)
        logits = session.extend([held], np.array([[7, 11]]), every=True)
        held.release()
        return logits

    return run
