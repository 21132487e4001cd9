"""PyramidInfer: which layers see which tokens, and that dropping none is the engine's prefill."""

import torch

from mooncake_lab.compression import PyramidInfer
from mooncake_lab.compression.pyramidinfer import ThinnedLayer

STEEP = PyramidInfer(decay=0.5, min_context=8)


def lengths(prefilled):
    return [keys.shape[1] for keys in prefilled.keys]


def farthest(rows, among):
    """Distance of that row which is farthest from its nearest neighbour among others."""
    return (rows[:, None] - among).norm(dim=-1).amin(dim=1).max()


def test_without_decay_it_is_the_full_prefill(session, prompt, whole):
    """At a decay of one nothing is dropped, and logits are those of the engine."""
    found = PyramidInfer(decay=1.0).prefill(session.plain, prompt)
    assert lengths(found) == [150] * 4
    torch.testing.assert_close(found.logits, whole.logits, atol=1e-5, rtol=1e-5)


def test_deeper_layers_hold_no_more(session, prompt):
    """Lengths do not grow with depth, the first layer is whole, and bytes are the sum of what layers hold."""
    found = STEEP.prefill(session.plain, prompt)
    held = lengths(found)
    assert held[0] == 150
    assert held == sorted(held, reverse=True)
    assert held[-1] < 150
    assert found.bytes == sum(2 * 2 * tokens * 8 * 4 for tokens in held)


def test_layers_are_exact_up_to_the_first_shortened_one(session, prompt, whole):
    """The first shorter layer still has exact keys, for its tokens had seen everything; the next one has not."""
    method = STEEP
    found = method.prefill(session.plain, prompt)
    first_short = next(i for i, tokens in enumerate(lengths(found)) if tokens < 150)
    assert first_short < 3
    for layer in range(first_short + 1):
        assert farthest(found.keys[layer][0], whole.keys[layer][0]) < 1e-4
    deeper = first_short + 1
    assert farthest(found.keys[deeper][0], whole.keys[deeper][0]) > 1e-3


def test_sinks_and_recent_tokens_stay():
    """The first four tokens and the voters are among what every layer keeps, in order."""
    voters, keys = torch.randn(31, 4, 8), torch.randn(2, 150, 8)
    kept = STEEP.keep(voters, keys, 0.3)
    assert kept[:4].tolist() == [0, 1, 2, 3]
    assert kept[-31:].tolist() == list(range(119, 150))
    assert (kept.diff() > 0).all()
    assert len(kept) == 31 + int(119 * 0.3)


def test_small_contexts_are_left_alone():
    """A context that would fall to `min_context` or below is not cut at all."""
    voters, keys = torch.randn(10, 4, 8), torch.randn(2, 100, 8)
    assert PyramidInfer(min_context=64).keep(voters, keys, 0.7) is None
    assert PyramidInfer(min_context=61).keep(voters, keys, 0.7) is not None


def test_decode_goes_on_from_layers_of_different_lengths(session, prompt):
    """Layers of different lengths grow together, and positions stay true."""
    held, logits = session.start(prompt, STEEP)
    before = [layer.tokens for layer in held.layers]
    session.generate(held, int(logits.argmax()), 4)
    assert [layer.tokens for layer in held.layers] == [tokens + 3 for tokens in before]
    assert held.position == 153
    held.release()


def long_answer(session, prompt, exceed=8, **change):
    """Tokens of each layer behind the prompt after 60 tokens of an answer to a prompt of 20, and the answer."""
    held, logits = session.start(prompt[:20], PyramidInfer(min_context=8, exceed=exceed, **change))
    before = [layer.tokens for layer in held.layers]
    answer = session.generate(held, int(logits.argmax()), 61)
    grown = [layer.tokens - tokens for layer, tokens in zip(held.layers, before, strict=True)]
    assert held.position == 80
    held.release()
    return grown, answer


def test_old_generated_tokens_are_thinned(session, prompt):
    """Eight at a time once they are older than five: of 60, six eights, of which each layer keeps its share."""
    grown, _ = long_answer(session, prompt)
    kept = [PyramidInfer(exceed=8).generated(layer, 4) for layer in range(4)]
    assert kept == [7, 6, 3, 1]
    assert grown == [6 * each + 12 for each in kept]


def test_thinning_that_keeps_all_changes_nothing(session, prompt):
    """Where all of each eight stay, the answer is that of a cache which never thins."""
    keeps_all = long_answer(session, prompt, generated_ratio=1.0, generated_decay=1.0)
    assert keeps_all == ([60] * 4, long_answer(session, prompt, exceed=1000)[1])


def test_thinning_keeps_what_the_voters_look_at(session):
    """One of eight old tokens stays, the one that the last queries point at; recent ones stay as they are."""
    keys = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(1))
    layer = ThinnedLayer.of(session.pool, keys[:, :0], keys[:, :0])
    layer.begin(PyramidInfer(exceed=8), recent=5, kept=1)
    layer.grow(13)
    session.pool.cache.write(0, layer.blocks, 0, torch.stack((keys, keys)).transpose(1, 2))
    layer.asked(50 * keys[:, 3].repeat_interleave(2, dim=0).expand(13, -1, -1))
    torch.testing.assert_close(layer.read()[0], keys[:, [3, *range(8, 13)]])
    assert layer.device_bytes == session.pool.used_bytes + 5 * 4 * 8 * 4
    layer.release()
