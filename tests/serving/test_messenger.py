"""The messenger refuses what it cannot take, and says why."""

import queue
import socket

import numpy as np
import pytest
import torch

from mooncake_lab.serving.kv import KVShape, raw
from mooncake_lab.serving.messages import VERSION, Begin, End, Hello, Job, Piece, Refused, Span, Taken
from mooncake_lab.serving.messenger import Courier, Identity, dial, expect, receive
from mooncake_lab.serving.reception import Reception
from mooncake_lab.store.media import PeerRefusedError, ProtocolError, wire

SHAPE = KVShape(fingerprint=b"f" * 16, layers=2, kv_heads=2, head_width=4, dtype=torch.float32)
WHO = Identity(name="sender", token=b"t" * 32, fingerprint=SHAPE.fingerprint, timeout_s=1.0)
JOB = Job(1, 1)
SPAN = Span(JOB, 0.0, 1.0, 5, 0)


@pytest.fixture
def came():
    return queue.SimpleQueue()


@pytest.fixture
def reception(came):
    one = Reception(WHO, SHAPE, most_tokens=64, delivered=came.put, give=lambda _: [])
    yield one
    one.close()


def piece(layer, start, tokens):
    values = torch.arange(2 * tokens * 8, dtype=torch.float32).reshape(2, tokens, 2, 4) + 1000 * layer + start
    return Piece(job=JOB, layer=layer, start=start, tokens=tokens), values


def test_pieces_make_a_whole(reception, came):
    """Layers that come in pieces, overlapping by a token, arrive as they were."""
    failed = queue.SimpleQueue()
    courier = Courier(reception.port, WHO, lambda job, reason: failed.put((job, reason)))
    courier.send(Begin(job=JOB, tokens=5))
    sent = {}
    for start, tokens in ((0, 3), (2, 3)):
        for layer in range(2):
            parcel, values = piece(layer, start, tokens)
            courier.send(parcel, [raw(values)])
            sent[layer, start] = values
    courier.send(End(job=JOB, first_token=7, span=SPAN))
    delivery = came.get(timeout=10)
    courier.close()
    assert failed.empty()
    assert delivery.first_token == 7
    for layer, tensor in enumerate(delivery.kv.layers):
        assert torch.equal(tensor[:, 2:], sent[layer, 2])
        assert torch.equal(tensor[:, :2], sent[layer, 0][:, :2])


def refusal_of(peer):
    parcel, _ = receive(peer, 5)
    assert isinstance(parcel, Refused)
    return parcel.reason


def test_wrong_version(reception):
    """Another version of the protocol is refused, naming both."""
    with socket.create_connection(("127.0.0.1", reception.port)) as peer:
        wire.greet_as_client(peer, WHO.token, WHO.fingerprint, 5)
        wire.send_frame(peer, Hello(version=VERSION + 1, name="old", fingerprint=WHO.fingerprint), (), 5)
        assert f"version {VERSION + 1}" in refusal_of(peer)


def test_wrong_token_and_model(reception):
    """A stranger, or a worker of another model, gets no further than its greeting."""
    with pytest.raises(PeerRefusedError):
        dial(reception.port, Identity(name="x", token=b"u" * 32, fingerprint=WHO.fingerprint, timeout_s=5.0))
    with pytest.raises(ConnectionError, match="another model"):
        dial(reception.port, Identity(name="x", token=WHO.token, fingerprint=b"g" * 16, timeout_s=5.0))


@pytest.mark.parametrize(
    ("parcel", "payload_bytes", "says"),
    [
        (Begin(job=JOB, tokens=65), 0, "65 tokens"),
        (Begin(job=JOB, tokens=5), 8, "8 bytes behind"),
        (Piece(job=JOB, layer=0, start=0, tokens=1), 64, "never began"),
        (End(job=JOB, first_token=0, span=SPAN), 0, "before all"),
        (Taken(), 0, "no question"),
    ],
)
def test_what_is_out_of_bounds(reception, came, parcel, payload_bytes, says):
    """Oversized, unexpected and incomplete parcels are refused with their reason, and nothing is delivered."""
    with dial(reception.port, WHO) as peer:
        wire.send_frame(peer, parcel, (np.zeros(payload_bytes, np.uint8),), 5)
        assert says in refusal_of(peer)
    assert came.empty()


def test_lengths_are_not_believed(reception):
    """A header that announces an endless body, or is none, ends the connection with a reason."""
    for head in (b"MCK1" + b"\xff" * 12, b"GET / HTTP/1.1\r\n"):
        with dial(reception.port, WHO) as peer:
            peer.sendall(head)
            assert "allowed are" in refusal_of(peer)


def test_slow_sender(reception, came):
    """A frame that stops in its middle is waited for no longer than agreed."""
    with dial(reception.port, WHO) as peer:
        wire.send_frame(peer, Begin(job=JOB, tokens=5), (), 5)
        parcel, values = piece(0, 0, 5)
        frame = np.concatenate([raw(values)[:100]])
        body = wire.msgspec.msgpack.encode(parcel)
        peer.sendall(wire._HEADER.pack(wire._MAGIC, len(body), values.nbytes) + body + frame.tobytes())
        assert "took too long" in refusal_of(peer)
    assert came.empty()


def test_deaf_receiver():
    """A peer that accepts and then says nothing costs a courier its time limit, and the job is reported."""
    failed = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        courier = Courier(deaf.getsockname()[1], WHO, lambda job, reason: failed.put((job, reason)))
        courier.send(Begin(job=JOB, tokens=5))
        courier.send(End(job=JOB, first_token=0, span=SPAN))
        job, reason = failed.get(timeout=30)
        courier.close()
    assert job == JOB
    assert "could not be delivered" in reason
    assert failed.empty()


def test_expect_other(reception):
    """An answer of another kind than expected is no answer."""
    with dial(reception.port, WHO) as peer:
        wire.send_frame(peer, Begin(job=JOB, tokens=5), (), 5)
        for layer in range(2):
            parcel, values = piece(layer, 0, 5)
            wire.send_frame(peer, parcel, (raw(values),), 5)
        wire.send_frame(peer, End(job=JOB, first_token=0, span=SPAN), (), 5)
        with pytest.raises(ProtocolError, match="Taken where a Hello"):
            expect(peer, Hello, 5)
