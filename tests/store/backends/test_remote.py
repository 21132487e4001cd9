"""Remote blocks: who may enter, what is believed, and how long anybody waits."""

import contextlib
import socket
import struct
import threading
import time

import numpy as np
import pytest
from waiting import until

from mooncake_lab.net import wire
from mooncake_lab.net.layers import receive_layers
from mooncake_lab.net.wire import PeerRefusedError, ProtocolError
from mooncake_lab.store.backends import (
    BlockNotFoundError,
    BlockServer,
    DamagedBlockError,
    DramBackend,
    RemoteBackend,
    Reservation,
    StorageError,
)
from mooncake_lab.store.backends import remote as messages

TOKEN = b"a token of the tests"


@pytest.fixture
def arena():
    """What the server lends."""
    medium = DramBackend(2**20)
    yield medium
    medium.close()


@pytest.fixture
def server(arena):
    """A server on loopback."""
    with BlockServer(arena, TOKEN, timeout_s=2) as made:
        yield made


def client_of(server, fingerprint=b"model", token=TOKEN):
    """A client of the server."""
    return RemoteBackend(server.address, token, fingerprint=fingerprint, timeout_s=5)


def greeted(server):
    """A bare connection after its handshake."""
    peer = socket.create_connection(server.address, 5)
    wire.greet_as_client(peer, TOKEN, b"model", 5)
    return peer


def store(medium, key, data):
    """A block of one layer."""
    block = medium.reserve(key, [len(data)])
    medium.write(block, [data])
    medium.commit(block)
    return block


def is_hung_up(peer):
    """Whether the server closes the connection, within half a minute."""
    peer.settimeout(30)
    try:
        while peer.recv(4096):
            pass
    except ConnectionError:
        pass
    peer.close()
    return True


def test_a_wrong_token_is_refused(server, arena):
    """A client with another token learns nothing, and the server lives on."""
    with pytest.raises(PeerRefusedError, match="does not accept this token"):
        client_of(server, token=b"x" * 16)
    client = client_of(server)
    store(client, b"key", b"data")
    client.close()
    assert len(list(arena.blocks())) == 1


def test_a_server_must_know_the_token_too():
    """A client hangs up on a server that cannot answer its challenge."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor():
            peer, _ = listener.accept()
            peer.sendall(wire._GREETING + bytes(32))
            peer.recv(1000)
            peer.sendall(bytes(32))
            peer.close()

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(PeerRefusedError, match="server does not know"):
            RemoteBackend(listener.getsockname(), TOKEN, fingerprint=b"m", timeout_s=5)
        thread.join()


def test_what_was_not_committed_goes_with_its_client(server, arena):
    """Reservations of a client that vanished are freed."""
    client = client_of(server)
    client.reserve(b"open", [1000])
    store(client, b"kept", b"data")
    client.close()
    until(lambda: arena.used_bytes == 4096)
    assert [block.key for block in arena.blocks()] == [b"\x05modelkept"]
    assert arena.used_bytes == 4096


def frame(body=b"", *, magic=b"MCK2", body_bytes=None, payload_bytes=0):
    """A frame, as wrong as it is asked to be."""
    return struct.pack("<4sIQ", magic, len(body) if body_bytes is None else body_bytes, payload_bytes) + body


@pytest.mark.parametrize(
    "sent",
    [
        frame(magic=b"EVIL"),
        frame(body_bytes=2**31),
        frame(b"\xc1 is no msgpack"),
        frame(b"\x91\x63"),
        frame(b"\x91\x07", payload_bytes=2**40),
    ],
    ids=["magic", "body bound", "no msgpack", "no question", "payload of nothing"],
)
def test_broken_frames_end_the_connection(server, sent):
    """What breaks a bound or is no question is not believed; the client is hung up on, others are served."""
    peer = greeted(server)
    peer.sendall(sent)
    assert is_hung_up(peer)
    client = client_of(server)
    store(client, b"key", b"data")
    client.close()


def test_a_client_that_stalls_inside_a_frame_is_left(server, arena):
    """A frame that begins has to end; meanwhile others are served, and what it held is freed."""
    peer = greeted(server)
    wire.send_frame(peer, messages.Reserve(b"key", (100,), 0), [], 5)
    body, _ = wire.receive_head(peer, 5)
    half = wire.msgspec.msgpack.encode(messages.Write(messages.ANSWERS.decode(body).blocks[0], 0, 1))
    peer.sendall(frame(half, payload_bytes=108) + bytes(50))
    client = client_of(server)
    store(client, b"other", b"data")
    client.close()
    assert is_hung_up(peer)
    assert [block.key for block in arena.blocks()] == [b"\x05modelother"]


def test_a_server_that_stalls_inside_a_large_layer_times_out():
    """However many bytes are to come: when none does for the timeout, the client stops waiting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def begin_and_stall():
            peer, _ = listener.accept()
            wire.greet_as_server(peer, TOKEN, 5)
            for answer, payload in ((messages.Room(2**30, 0), 0), (messages.Done(), 2**26 + 8)):
                wire.receive_head(peer, 5)
                peer.sendall(frame(wire.msgspec.msgpack.encode(answer), payload_bytes=payload))
            peer.sendall(bytes(1000))
            over.wait(30)
            peer.close()

        over = threading.Event()
        thread = threading.Thread(target=begin_and_stall)
        thread.start()
        client = RemoteBackend(listener.getsockname(), TOKEN, fingerprint=b"m", timeout_s=2)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            client.read_into(Reservation(key=b"k", layer_bytes=(2**26,), sequence=1), [np.empty(2**26, np.uint8)])
        assert time.monotonic() - began_s < 20  # a slow link would have 67 s
        over.set()
        thread.join()
        client.close()


def test_a_fingerprint_and_a_key_do_not_run_together(server):
    """Model `a` with key `bc` is not model `ab` with key `c`; a client without a model is not let in."""
    one, other = client_of(server, b"a"), client_of(server, b"ab")
    block = store(one, b"bc", b"data")
    assert list(other.blocks()) == []
    with pytest.raises(BlockNotFoundError):
        other.read_into(Reservation(key=b"c", layer_bytes=(4,), sequence=block.sequence), [bytearray(4)])
    one.close()
    other.close()
    peer = socket.create_connection(server.address, 5)
    with pytest.raises(PeerRefusedError):
        wire.greet_as_client(peer, TOKEN, b"", 5)
    peer.close()


def test_bytes_that_change_on_their_way_are_not_kept(server):
    """A write whose checksum does not fit is refused, and the block cannot be committed."""
    peer = greeted(server)

    def ask(question, payload=()):
        wire.send_frame(peer, question, list(payload), 5)
        return messages.ANSWERS.decode(wire.receive_head(peer, 5)[0])

    def layers(*sums):
        return [np.frombuffer(b"data" * len(sums) + struct.pack(f"<{len(sums)}Q", *sums), np.uint8)]

    (name,) = ask(messages.Reserve(b"key", (4,), 0)).blocks
    assert ask(messages.Write(name, 0, 1), layers(123)).kind == "damaged"
    assert ask(messages.Commit((name,))).kind == "value"
    assert ask(messages.Write(Reservation(b"none", (4,)), 0, 1), layers(123)).kind == "not_held"
    assert ask(messages.Write(name, 0, 2), layers(1, 2)).kind == "value"
    assert ask(messages.Write(name, 0, 1), layers()).kind == "value"
    assert ask(messages.Write(name, -1, 1), layers(1)).kind == "value"
    assert ask(messages.Read(name, 0, 9)).kind in {"value", "not_held"}
    assert isinstance(ask(messages.Status()), messages.Room)
    peer.close()


def test_each_refusal_names_one_fault(server):
    """What a client asks for wrongly comes back as one sentence: what it is, and what is allowed."""
    peer = greeted(server)

    def ask(question, payload_bytes=0):
        wire.send_frame(peer, question, [np.zeros(payload_bytes, np.uint8)], 5)
        return messages.ANSWERS.decode(wire.receive_head(peer, 5)[0])

    (name,) = ask(messages.Reserve(b"key", (4, 4), 0)).blocks
    for question, payload_bytes, says in (
        (messages.FreeBlocks((name, name)), 0, "comes 2 times; once is allowed"),
        (messages.FreeBlocks((Reservation(b"none", (4,)),)), 0, "dram has no block " + b"\x05modelnone".hex()),
        (messages.Write(name, 0, 1), 4, "a Write of 1 layers with a payload of 4 bytes; they take 12"),
        (messages.Write(name, 1, 2), 16, "layers 1 to 2 of a block of 2 layers; allowed are 0 to 1"),
    ):
        assert says in ask(question, payload_bytes).reason
    assert isinstance(ask(messages.FreeBlocks((name,))), messages.Done)
    peer.close()


def test_a_large_block_comes_in_runs(arena):
    """A block of many runs is the same at both ends, and one wrong checksum anywhere refuses it."""
    sizes = [60_000] * 15
    layers = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number, size in enumerate(sizes)]
    with BlockServer(arena, TOKEN, timeout_s=5) as server:
        client = client_of(server)
        block = client.reserve(b"large", sizes)
        client.write(block, layers)
        client.commit(block)
        found = [np.empty(size, np.uint8) for size in sizes]
        client.read_into(block, found)
        assert all(np.array_equal(*pair) for pair in zip(found, layers, strict=True))
        arena.read(next(arena.blocks()), 7, 1)[0][59_999] ^= 1
        with pytest.raises(DamagedBlockError, match="not what was written"):
            client.read_into(block, found)
        client.read_into(block, found[8:], first_layer=8)
        client.close()


def dripping(count):
    """A connection on which a byte comes every 20 ms."""
    near, far = socket.socketpair()

    def drip():
        with contextlib.suppress(OSError):
            for _ in range(count):
                far.sendall(b"x")
                time.sleep(0.02)
        far.close()

    threading.Thread(target=drip, daemon=True).start()
    return near


def test_a_frame_that_drips_is_given_up():
    """Each layer comes in time, all of them do not: the time that is allowed is the frame's, not the layer's."""
    with dripping(600) as near, pytest.raises(TimeoutError, match="longer over a frame"):
        receive_layers(near, [np.empty(1, np.uint8) for _ in range(400)], 0, 0.5)


def test_the_last_wait_of_a_slow_frame_is_not_called_a_stall(monkeypatch):
    """A frame whose time ends during a wait that was cut short took too long; it did not stall."""
    near, far = socket.socketpair()
    far.sendall(b"x")
    frame = wire.Frame(near, socket.SO_RCVTIMEO, 0, 2)
    started_s = wire.time.monotonic()
    assert frame.receive_some([bytearray(1)]) == 1
    monkeypatch.setattr(wire.time, "monotonic", lambda: started_s + 1.95)
    with near, far, pytest.raises(TimeoutError, match="longer over a frame"):
        frame.receive_some([bytearray(1)])


def test_a_peer_that_sends_nothing_stalls():
    """Where no byte of a frame came, the whole wait is over, and that is said."""
    near, far = socket.socketpair()
    with near, far, pytest.raises(TimeoutError, match=r"stalled for 0\.05 s"):
        wire.Frame(near, socket.SO_RCVTIMEO, 0, 0.05).receive_some([bytearray(1)])


def test_an_interrupted_question_leaves_no_answer_behind(server, monkeypatch):
    """After an interrupt between question and answer the next question gets its own answer."""
    client = client_of(server)

    receive_head = wire.receive_head

    def interrupt(*arguments, **more):
        if threading.current_thread() is threading.main_thread():  # the server has threads of its own
            raise KeyboardInterrupt
        return receive_head(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(wire, "receive_head", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = client.used_bytes
    assert client.reserve(b"key", [5]).layer_bytes == (5,)
    client.close()


def test_a_server_that_answers_something_else_is_left():
    """An answer of the wrong type closes the connection: who knows what the next one would be."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rest = []

        def answer_room():
            peer, _ = listener.accept()
            wire.greet_as_server(peer, TOKEN, 5)
            for _ in range(2):
                wire.receive_head(peer, 5)
                wire.send_frame(peer, messages.Room(2**30, 0), (), 5)
            peer.settimeout(5)
            rest.append(peer.recv(1))
            peer.close()

        thread = threading.Thread(target=answer_room)
        thread.start()
        client = RemoteBackend(listener.getsockname(), TOKEN, fingerprint=b"m", timeout_s=5)
        with pytest.raises(ProtocolError, match="answers a Reserve with a Room"):
            client.reserve(b"key", [5])
        thread.join()
        assert rest == [b""]
        client.close()


def test_what_the_server_cannot_name_is_no_mistake_of_the_caller(server):
    """A good key that is too long behind this fingerprint is a `StorageError`, and so is a value it refuses."""
    client = client_of(server, b"f" * 64)
    with pytest.raises(StorageError, match="may have 63 bytes"):
        client.reserve(b"k" * 100, [5])
    block = store(client, b"k" * 63, b"data")
    found = bytearray(4)
    client.read_into(block, [found])
    assert found == b"data"
    refused = messages.Failed("value", "reason")
    assert isinstance(messages.error_of(refused, messages.Status()), StorageError)
    assert isinstance(messages.error_of(refused, messages.Commit(())), ValueError)
    client.close()


def test_a_server_that_was_started_anew_is_asked_anew(arena):
    """A connection that ended while nothing was asked costs no question: the next one connects."""
    server = BlockServer(arena, TOKEN, timeout_s=1)
    client = client_of(server)
    block = store(client, b"key", b"data")
    port = server.address[1]
    server.close()
    with BlockServer(arena, TOKEN, port=port, timeout_s=1):
        found = bytearray(4)
        client.read_into(block, [found])
        assert found == b"data"
    client.close()
