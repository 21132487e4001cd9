"""KVCache between workers: it arrives as it was sent, and what cannot be accepted is refused with a reason."""

import contextlib
import queue
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice

import msgspec
import numpy as np
import pytest
import torch
from waiting import until

from mooncake_lab.cluster import events
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.net import wire
from mooncake_lab.net.wire import PeerRefusedError
from mooncake_lab.serving.kv_transfer import (
    Identity,
    borrow,
    dial,
)
from mooncake_lab.serving.kv_transfer.fetch import fetch_layers
from mooncake_lab.serving.kv_transfer.receiver import KVReceiver
from mooncake_lab.serving.kv_transfer.sender import KVSender, KVSenders, cuts
from mooncake_lab.serving.kv_transfer.transfer_engine import BUFFER_BYTES, TransferEngineChannel
from mooncake_lab.serving.messages import (
    TRANSFER_MESSAGES,
    Ack,
    CancelOrder,
    EndTransfer,
    GetBlocks,
    Job,
    KVChunk,
    Probe,
    RemoteAddress,
    RemoteWrite,
    StartTransfer,
    TransferRefused,
)
from mooncake_lab.store.backends import StorageError

LAYOUT = KVLayout(fingerprint=b"f" * 16, layers=2, kv_heads=2, head_width=4, dtype=torch.float32)
BLOCKS = replace(LAYOUT, block_tokens=4)
WHO = Identity(name="sender", token=b"t" * 32, fingerprint=LAYOUT.fingerprint, timeout_s=1.0)
JOB = Job(1, 1, 1)
REPORTS = (
    events.PrefixFetched(at_s=0.5, attempt=JOB.attempt, instance="prefill-0", source="pool", start_s=0.0, bytes=9),
    events.PrefillDone(
        at_s=1.0, attempt=JOB.attempt, instance="prefill-0", start_s=0.0, computed_tokens=5, reused_tokens=0
    ),
)


@pytest.fixture
def came():
    return queue.SimpleQueue()


@pytest.fixture
def reception(came):
    one = KVReceiver(WHO, BLOCKS, most_tokens=64, delivered=came.put, give=lambda *_: iter(()))
    yield one
    one.close()


@pytest.fixture(scope="module")
def channel():
    """Mooncake's Transfer Engine, which here writes into its own process."""
    return TransferEngineChannel(2 * BUFFER_BYTES + 2**20)


@pytest.fixture
def granting(came, channel):
    """A reception that peers may push to; at the end all memory that it lent is back."""
    one = KVReceiver(WHO, BLOCKS, most_tokens=64, delivered=came.put, give=layers_of, channel=channel)
    yield one
    one.close()
    deadline_s = time.monotonic() + 5
    while channel.used_bytes and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert channel.used_bytes == 0


def layers_of(_, keys):
    """Two blocks of four tokens, whatever is asked for; b"lost" loses the second one's last layer."""
    for layer in range(2):
        blocks = torch.tensor([layer, 10 + layer], dtype=torch.float32)[: len(keys)]
        if b"lost" in keys and layer:
            blocks = blocks[:1]
        yield blocks[:, None, None, None, None].expand(-1, *BLOCKS.layer_shape).contiguous()


def piece(layer, start, tokens):
    values = torch.arange(2 * tokens * 8, dtype=torch.float32).reshape(2, tokens, 2, 4) + 1000 * layer + start
    return KVChunk(job=JOB, layer=layer, start=start, tokens=tokens), values


@pytest.mark.parametrize("way", ["connection", pytest.param("channel", marks=pytest.mark.wheel)])
def test_pieces_make_a_whole(way, request, came):
    """Layers that come in pieces, overlapping by a token, arrive as they were, by either way."""
    reception = request.getfixturevalue("reception" if way == "connection" else "granting")
    channel = None if way == "connection" else request.getfixturevalue("channel")
    before = 0 if channel is None else channel.written_bytes
    failed = queue.SimpleQueue()
    sender = KVSender(reception.port, WHO, lambda job, reason: failed.put((job, reason)), channel)
    sender.send(StartTransfer(job=JOB, tokens=5))
    sent = {}
    for start, tokens in ((0, 3), (2, 3)):
        for layer in range(2):
            message, values = piece(layer, start, tokens)
            sender.send(message, [bytes_of(values)])
            sent[layer, start] = values
    sender.send(EndTransfer(job=JOB, first_token=7, reports=REPORTS))
    delivery = came.get(timeout=10)
    sender.close()
    assert failed.empty()
    assert (delivery.first_token, delivery.reports) == (7, REPORTS)
    for layer, tensor in enumerate(delivery.kv.layers):
        assert torch.equal(tensor[:, 2:], sent[layer, 2])
        assert torch.equal(tensor[:, :2], sent[layer, 0][:, :2])
    assert channel is None or channel.written_bytes - before == 4 * 3 * LAYOUT.layer_bytes


def test_a_piece_that_is_larger_than_what_may_wait_is_sent_alone(reception, came, monkeypatch):
    """Each piece waits until the one before it is sent, and none waits forever."""
    monkeypatch.setattr("mooncake_lab.serving.kv_transfer.sender.MOST_WAITING_BYTES", 1)
    failed = queue.SimpleQueue()
    sender = KVSender(reception.port, WHO, lambda job, reason: failed.put((job, reason)))

    def send():
        sender.send(StartTransfer(job=JOB, tokens=5))
        for layer in range(2):
            message, values = piece(layer, 0, 5)
            sender.send(message, [bytes_of(values)])
        sender.send(EndTransfer(job=JOB, first_token=7, reports=REPORTS))

    threading.Thread(target=send, daemon=True).start()
    assert came.get(timeout=10).first_token == 7
    sender.close()
    assert failed.empty()


def test_bytes_on_their_way_from_a_device_are_waited_for_by_the_sender(reception, came):
    """`send` returns at once; the sender's thread waits until the bytes are there, and then sends them."""
    failed, copied, waiting = queue.SimpleQueue(), threading.Event(), []
    sender = KVSender(reception.port, WHO, lambda *why: failed.put(why))
    sender.send(StartTransfer(job=JOB, tokens=1))
    on_device = [piece(layer, 0, 1) for layer in range(2)]
    for message, values in on_device:
        host = torch.zeros_like(values)

        def wait(host=host, values=values):
            waiting.append(threading.current_thread())
            copied.wait(10)
            host.copy_(values)

        sender.send(message, [bytes_of(host)], wait=wait)
    sender.send(EndTransfer(job=JOB, first_token=7, reports=REPORTS))
    assert came.empty()
    copied.set()
    delivery = came.get(timeout=10)
    sender.close()
    assert failed.empty()
    assert threading.current_thread() not in waiting
    for (_, values), tensor in zip(on_device, delivery.kv.layers, strict=True):
        assert torch.equal(values, tensor)


def send_one_token(sender):
    """A whole delivery of one token in two layers."""
    sender.send(StartTransfer(job=JOB, tokens=1))
    for layer in range(2):
        message, values = piece(layer, 0, 1)
        sender.send(message, [bytes_of(values)])
    sender.send(EndTransfer(job=JOB, first_token=7, reports=REPORTS))


@pytest.mark.parametrize("most_bytes", [1, 64, 3 * 64, 5 * 64, 2**20])
def test_long_pieces_are_cut_into_whole_tokens(most_bytes):
    """Parts of a piece put together are the piece; none is longer than the buffer, if a token is not."""
    whole, values = piece(1, 3, 5)
    built = torch.zeros_like(values)
    for part, (keys, its_values) in cuts(whole, bytes_of(values), most_bytes):
        where = slice(part.start - 3, part.start - 3 + part.tokens)
        bytes_of(built[0, where])[:], bytes_of(built[1, where])[:] = keys, its_values
        assert keys.nbytes + its_values.nbytes <= max(most_bytes, LAYOUT.layer_bytes)
        assert (part.job, part.layer) == (whole.job, whole.layer)
    assert torch.equal(built, values)


@pytest.mark.wheel
def test_fetched_blocks_come_by_the_channel(granting, channel):
    """Blocks that another worker holds are written where we want them; what it lacks does not come."""
    before = channel.written_bytes
    assert_blocks(fetch_layers(granting.port, WHO, BLOCKS, JOB, [b"a", b"b", b"c"], channel))
    assert channel.written_bytes - before == 2 * 4 * LAYOUT.bytes_per_token


@pytest.mark.wheel
def test_without_memory_the_connection_carries_the_bytes(granting, reception, came, channel):
    """A channel that has no room, on either side, is none: nothing is refused, nothing waits."""
    before, held = channel.written_bytes, channel.take(2 * BUFFER_BYTES + 2**20)
    try:
        assert_blocks(fetch_layers(granting.port, WHO, BLOCKS, JOB, [b"a", b"b"], channel))
        for one in (granting, reception):
            sender = KVSender(one.port, WHO, lambda job, reason: came.put((job, reason)), channel)
            send_one_token(sender)
            assert came.get(timeout=10).first_token == 7
            sender.close()
    finally:
        channel.give(held)
    assert channel.written_bytes == before


def assert_blocks(layers):
    """These are what `layers_of` gives."""
    for layer, (came, sent) in enumerate(zip(layers, layers_of(JOB, [b"a", b"b"]), strict=True)):
        assert torch.equal(came, sent), layer


def receiver_of(came, channel, give):
    return KVReceiver(WHO, BLOCKS, most_tokens=64, delivered=came.put, give=give, channel=channel)


@pytest.mark.parametrize("way", ["connection", pytest.param("channel", marks=pytest.mark.wheel)])
def test_a_fetch_ends_where_the_holder_has_no_more(way, request, came):
    """A block that its holder loses is missing from that layer on; where the connection ends, all are."""
    channel = None if way == "connection" else request.getfixturevalue("channel")
    with closing(receiver_of(came, channel, layers_of)) as holder:
        assert [len(layer) for layer in fetch_layers(holder.port, WHO, BLOCKS, JOB, [b"a", b"lost"], channel)] == [
            2,
            1,
        ]
    with closing(receiver_of(came, channel, lambda *asked: islice(layers_of(*asked), 1))) as holder:
        assert [len(layer) for layer in fetch_layers(holder.port, WHO, BLOCKS, JOB, [b"a"], channel)] == [1]
    with closing(receiver_of(came, channel, layers_of)) as holder:
        port = holder.port
    assert not list(fetch_layers(port, WHO, BLOCKS, JOB, [b"a"], channel))


@pytest.mark.wheel
def test_bytes_that_another_process_wrote_are_refused(granting, came, channel):
    """The bytes in the buffer must have the checksum that the sender reports."""
    with dial(granting.port, WHO) as peer:
        buffer = borrow(peer, WHO, 4096)
        wire.send_frame(peer, StartTransfer(job=JOB, tokens=5), (), 5)
        message, values = piece(0, 0, 5)
        pushed = channel.write(buffer, [bytes_of(values)])
        channel.write(buffer, [np.ones(8, np.uint8)])
        wire.send_frame(peer, msgspec.structs.replace(message, pushed=pushed), (), 5)
        assert "not as they were sent" in refusal_of(peer)
    assert came.empty()


@pytest.mark.wheel
@pytest.mark.parametrize(
    ("buffer_bytes", "start_s", "reason"),
    [
        (None, 0.0, "no buffer"),
        (64, 0.0, "buffer of 64"),
        (4096, 1e12, "a push began at 1e+12 s; allowed are 0 to"),
        (4096, -1.0, "a push began at -1 s; allowed are 0 to"),
    ],
)
def test_pushes_that_cannot_be_are_refused(granting, buffer_bytes, start_s, reason):
    """Without a buffer, past its end, or at no time."""
    with dial(granting.port, WHO) as peer:
        if buffer_bytes:
            borrow(peer, WHO, buffer_bytes)
        wire.send_frame(peer, StartTransfer(job=JOB, tokens=5), (), 5)
        message, _ = piece(0, 0, 5)
        wire.send_frame(peer, msgspec.structs.replace(message, pushed=RemoteWrite(1, start_s)), (), 5)
        assert reason in refusal_of(peer)


@pytest.mark.wheel
@pytest.mark.parametrize("segment", ["10.0.0.1:80", "127.0.0.1", "x"])
def test_engines_write_to_this_machine_only(granting, segment):
    """A peer cannot send our engine to another machine."""
    with dial(granting.port, WHO) as peer:
        wire.send_frame(peer, GetBlocks(JOB, (b"a",), RemoteAddress(segment, 4096)), (), 5)
        assert "no message" in refusal_of(peer)


@pytest.mark.wheel
def test_a_write_that_fails_is_an_error(channel):
    """An address that was never lent, and a process that is not there, are errors and no hang."""
    region = channel.take(64)
    channel.give(region)
    for where in (RemoteAddress("127.0.0.1:9", 4096), RemoteAddress(region.where.segment, 4096)):
        with pytest.raises(StorageError, match="cannot write"):
            channel.write(where, [np.ones(64, np.uint8)])
    assert channel.used_bytes == 0


def refusal_of(peer):
    message, _ = wire.receive_message(peer, TRANSFER_MESSAGES, 5)
    assert isinstance(message, TransferRefused)
    return message.reason


def test_a_holder_that_closes_its_cache_says_so(came):
    """An error of the store ends the connection with its reason, and no other connection."""

    def closed(_job, _keys):
        raise StorageError("the prefix cache is closed")
        yield

    one = KVReceiver(WHO, BLOCKS, most_tokens=64, delivered=came.put, give=closed)
    with contextlib.closing(one):
        for _ in range(2):
            with dial(one.port, WHO) as peer:
                wire.send_frame(peer, GetBlocks(JOB, (b"a",), None), (), 5)
                assert refusal_of(peer) == "the prefix cache is closed"


def test_wrong_token_and_model(reception):
    """A peer with another token, or of another model, is refused in the handshake."""
    with pytest.raises(PeerRefusedError):
        dial(reception.port, Identity(name="x", token=b"u" * 32, fingerprint=WHO.fingerprint, timeout_s=5.0))
    with pytest.raises(ConnectionError, match="another model"):
        dial(reception.port, Identity(name="x", token=WHO.token, fingerprint=b"g" * 16, timeout_s=5.0))


@pytest.mark.parametrize(
    ("message", "payload_bytes", "says"),
    [
        (StartTransfer(job=JOB, tokens=65), 0, "65 tokens"),
        (StartTransfer(job=JOB, tokens=5), 8, "8 bytes behind"),
        (KVChunk(job=JOB, layer=0, start=0, tokens=1), 64, "never began"),
        (
            EndTransfer(job=JOB, first_token=0, reports=REPORTS),
            0,
            "the end of Job(run=1, request_id=1, n=1), which never began here",
        ),
        (Ack(), 0, "a Ack answers a message; a receiver has sent none"),
        (Probe(None, 2**26 + 1), 0, "a probe of 67108865 bytes; allowed are 67108864"),
        (Probe(pushed=RemoteWrite(1, 0.0), pushed_bytes=1), 1, "a probe that was pushed, with 1 bytes behind it"),
        (
            Probe(pushed=RemoteWrite(1, 0.0), pushed_bytes=1),
            0,
            "refers to pushed bytes, but no buffer was lent to this connection",
        ),
    ],
)
def test_what_is_out_of_bounds(reception, came, message, payload_bytes, says):
    """Oversized, unexpected and incomplete messages are refused with their reason, and nothing is delivered."""
    with dial(reception.port, WHO) as peer:
        wire.send_frame(peer, message, (np.zeros(payload_bytes, np.uint8),), 5)
        assert says in refusal_of(peer)
    assert came.empty()


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_a_probe_of_a_size_that_is_allowed_is_acknowledged(reception, came, size):
    """Its bytes follow it, are dropped, and the next probe over the same connection is read from its beginning."""
    with dial(reception.port, WHO) as peer:
        for _ in range(2):
            wire.send_frame(peer, Probe(None, 0), (np.zeros(size, np.uint8),), 5)
            assert isinstance(wire.receive_message(peer, TRANSFER_MESSAGES, 5.0)[0], Ack)
    assert came.empty()


@pytest.mark.parametrize(
    ("wrong", "payload_bytes", "says"),
    [
        ({"layer": 2}, 64, "a piece of layer 2; allowed are 0 to 1"),
        ({"start": 5}, 64, "a piece of tokens 5 to 6; the request has 5"),
        ({"start": 1}, 64, "a piece of layer 0 begins at token 1; the one before it ended at 0"),
        ({}, 63, "a piece of 1 tokens with 63 bytes behind it; it needs 64"),
    ],
)
def test_each_fault_of_a_piece_has_its_own_sentence(reception, came, wrong, payload_bytes, says):
    """A layer, tokens or bytes that cannot be are named with what is allowed, and nothing is delivered."""
    with dial(reception.port, WHO) as peer:
        wire.send_frame(peer, StartTransfer(job=JOB, tokens=5), (), 5)
        message = KVChunk(**{"job": JOB, "layer": 0, "start": 0, "tokens": 1} | wrong)
        wire.send_frame(peer, message, (np.zeros(payload_bytes, np.uint8),), 5)
        assert refusal_of(peer) == says
    assert came.empty()


@pytest.mark.parametrize("cut", [3, 20, -1])
def test_truncated_frame(reception, came, cut):
    """A frame that its sender cuts short is refused by how much is missing; nothing of it is delivered."""
    message, values = piece(0, 0, 5)
    body = wire.msgspec.msgpack.encode(message)
    head = wire.frame_head(message, values.nbytes)
    frame = head + bytes_of(values).tobytes()
    with dial(reception.port, WHO) as peer:
        wire.send_frame(peer, StartTransfer(job=JOB, tokens=5), (), 5)
        peer.sendall(frame[:cut])
        peer.shutdown(socket.SHUT_WR)
        reason = refusal_of(peer)
    part = {3: len(head) - len(body), 20: len(head), -1: len(frame)}[cut]
    assert f"in the middle of a frame, {part - len(frame[:cut])} bytes too early" in reason
    assert came.empty()


def test_an_idle_sender_ends_and_begins_again(reception, came, monkeypatch):
    """Without messages its thread ends and its connection is closed; the next message opens another one."""
    monkeypatch.setattr("mooncake_lab.serving.kv_transfer.sender._IDLE_S", 0.01)
    sender = KVSender(reception.port, WHO, lambda job, reason: came.put((job, reason)))
    for _ in range(3):
        send_one_token(sender)
        assert came.get(timeout=10).first_token == 7
        assert until(lambda: sender._thread is None)
        assert sender._peer is None
    sender.send(StartTransfer(job=JOB, tokens=5))
    time.sleep(0.1)
    assert sender._thread is not None, "a prompt that is under way keeps it"
    sender.send(CancelOrder(JOB))
    assert until(lambda: sender._thread is None)


def test_a_job_under_way_on_a_broken_connection_is_reported(reception, came):
    """A job under way on a broken connection is reported, although another sender was made meanwhile."""
    senders = KVSenders(WHO, lambda job, reason: came.put((job, reason)))
    other = KVReceiver(WHO, BLOCKS, most_tokens=64, delivered=came.put, give=lambda *_: iter(()))
    port = other.port
    sender = senders.to(port)
    sender.send(StartTransfer(job=JOB, tokens=1))
    sender.send(piece(0, 0, 1)[0], [bytes_of(piece(0, 0, 1)[1])])
    assert until(lambda: not sender._queue)
    other.close()
    time.sleep(0.2)
    senders.to(reception.port)
    assert senders.to(port) is sender
    senders.to(port).send(piece(1, 0, 1)[0], [bytes_of(piece(1, 0, 1)[1])])
    senders.to(port).send(EndTransfer(job=JOB, first_token=7, reports=REPORTS))
    job, reason = came.get(timeout=10)
    assert job == JOB
    assert "could not be delivered" in reason


def test_bytes_that_wait_are_bounded(monkeypatch, came, reception):
    """What waits for a destination is bounded: the next piece waits until there is room, and all arrive."""
    monkeypatch.setattr("mooncake_lab.serving.kv_transfer.sender.MOST_WAITING_BYTES", 2 * LAYOUT.layer_bytes)
    sender = KVSender(reception.port, WHO, lambda job, reason: came.put((job, reason)))
    most = 0
    sender.send(StartTransfer(job=JOB, tokens=5))
    for start in range(5):
        for layer in range(2):
            message, values = piece(layer, start, 1)
            sender.send(message, [bytes_of(values)])
            most = max(most, sender._waiting_bytes)
    sender.send(EndTransfer(job=JOB, first_token=7, reports=REPORTS))
    assert came.get(timeout=10).first_token == 7
    assert most <= 2 * LAYOUT.layer_bytes
    sender.close()


def test_a_receiver_that_does_not_answer_fails_the_job():
    """After the time limit of a sender whose peer accepts and is silent, the job is reported as failed."""
    failed = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        sender = KVSender(deaf.getsockname()[1], WHO, lambda job, reason: failed.put((job, reason)))
        sender.send(StartTransfer(job=JOB, tokens=5))
        sender.send(EndTransfer(job=JOB, first_token=0, reports=REPORTS))
        job, reason = failed.get(timeout=30)
        sender.close()
    assert job == JOB
    assert "could not be delivered" in reason
    assert failed.empty()
