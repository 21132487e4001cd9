"""KVCache between host and device, with stand-ins for streams and events: when it is copied, and whereto."""

import fake_streams
import pytest
import torch
from fake_streams import OnDevice

from mooncake_lab.engine.host_copies import HostCopies
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.layerwise.loader import LayerLoader, PrefixLostError

LAYERS, TOKENS = 5, 4
LAYOUT = KVLayout(
    fingerprint=b"m", layers=LAYERS, kv_heads=2, head_width=3, dtype=torch.float32, block_tokens=TOKENS
)


@pytest.fixture
def streams(monkeypatch):
    return fake_streams.fake_streams(monkeypatch)


class Blocks:
    """A source of one block whose layers differ; layer `lost` cannot be had."""

    blocks = 1

    def __init__(self, lost=None):
        self.lost = lost

    def read(self, layer, _block, into):
        into.copy_(wanted(layer) if layer != self.lost else torch.full_like(into, 9.0))
        return layer != self.lost


def wanted(layer):
    """The bytes of a layer."""
    return torch.arange(2 * TOKENS * 6, dtype=torch.float32).reshape(2, TOKENS, 2, 3) + 100 * layer


def load(streams, source, on_layer=None):
    """Load all layers; what the cache then holds, by layer."""
    cache, held = fake_streams.fake_cache(LAYERS, TOKENS, 2, 3, lambda: streams.current)
    prefix = LayerLoader(source, LAYOUT, on_layer=on_layer)
    prefix.begin(cache, [7])
    return prefix, held


def test_layers_take_two_pinned_tensors_in_turn(streams):
    """Five layers need two pieces of pinned memory, and none is filled again before its copy is done."""
    told = {}
    prefix, held = load(streams, Blocks(), told.__setitem__)
    prefix.wait(LAYERS - 1, TOKENS)
    prefix.stop()
    assert [tuple(each.shape) for each in streams.pinned] == [(1, *LAYOUT.layer_shape)] * 2
    for layer in range(LAYERS):
        assert torch.equal(held[layer], wanted(layer))
        assert torch.equal(told[layer], wanted(layer))  # a copy of its own: the memory was filled again
        assert told[layer].is_contiguous()


def test_the_copies_wait_for_what_was_asked_of_the_device_before(streams):
    """Blocks may still be written for others: the loader's stream begins after the one that computes."""
    prefix, _ = load(streams, Blocks())
    prefix.stop()
    assert prefix._copies is not streams.default
    assert prefix._copies.waits == [streams.default]


def test_a_loss_on_the_way_to_a_device_ends_the_prefix(streams):
    """The layers before it are there, what was read of the lost one is not used, and the computation is told."""
    prefix, held = load(streams, Blocks(lost=2))
    with pytest.raises(PrefixLostError):
        prefix.wait(2, TOKENS)
    prefix.stop()
    assert (sorted(held), prefix.tokens, prefix.lost_blocks) == ([0, 1], 0, 1)


def test_a_layer_leaves_over_a_stream_of_its_own(streams):
    """The copy into pinned memory waits for the computing stream, not the reverse, and is done by `wait`."""
    copies = HostCopies()
    spans = [OnDevice(wanted(layer)) for layer in range(2)]
    started = [copies.start(span) for span in spans]
    own = started[0].copied.stream
    assert own is started[1].copied.stream is not streams.default
    assert set(own.waits) == {streams.default}
    assert not streams.default.waits
    assert [span.used_by for span in spans] == [[own], [own]]
    assert len(own.asked) > 0  # nothing waited yet
    for layer, copy in enumerate(started):
        copy.wait()
        assert torch.equal(copy.tensor, wanted(layer))
    assert len(streams.pinned) == 2


@pytest.mark.usefixtures("streams")
def test_a_whole_span_is_on_the_host():
    """All layers are started before the first is waited for; start and tokens stay."""
    kv = KVSpan(fingerprint=b"m", start=8, tokens=TOKENS, layers=tuple(OnDevice(wanted(i)) for i in range(3)))
    host = HostCopies().of(kv)
    assert (host.start, host.tokens) == (8, TOKENS)
    for layer, tensor in enumerate(host.layers):
        assert torch.equal(tensor, wanted(layer))


def test_on_a_cpu_nothing_is_copied():
    """A span on the host is sent and stored as it is."""
    span = wanted(0)
    copy = HostCopies().start(span)
    copy.wait()
    assert copy.tensor.data_ptr() == span.data_ptr()


def test_buffers_that_a_device_copies_from_are_pinned(streams):
    """What a decode worker receives into is pinned where its model is on a device, and ordinary elsewhere."""
    LAYOUT.empty(3)
    assert streams.pinned == []
    pinned = KVLayout(fingerprint=b"m", layers=2, kv_heads=2, head_width=3, dtype=torch.float32, is_pinned=True)
    buffers = pinned.empty(3)
    assert [each.shape for each in streams.pinned] == [(2, 3, 2, 3)] * 2
    assert all(mine is theirs for mine, theirs in zip(buffers, streams.pinned, strict=True))


def test_a_digest_brings_weights_to_the_host_through_one_pinned_piece(small, monkeypatch):
    """Weights on a device are digested through pinned memory that is allocated once, to the digest of a CPU."""
    weights = small.weights()
    expected = weights.digest()
    fake = fake_streams.fake_streams(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("fresh memory for each tensor"))
    monkeypatch.setattr("mooncake_lab.engine.weights._PIECE_BYTES", 1000)
    assert weights.digest() == expected
    assert [each.numel() for each in fake.pinned] == [1000]
