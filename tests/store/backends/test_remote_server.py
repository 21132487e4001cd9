"""The block server and its listener stay up: a failure of one client does not affect the others."""

import contextlib
import errno
import socket
import threading

import pytest

from mooncake_lab.net import listener
from mooncake_lab.store.backends import BlockServer, DramBackend, RemoteBackend

TOKEN = b"a token of the tests"


class Wrapped:
    """A medium that is not the server's own memory, and whose writes a test can hold up."""

    def __init__(self, medium):
        self._medium = medium
        self.gate = threading.Event()
        self.writing = threading.Event()

    def __getattr__(self, name):
        """As the medium."""
        return getattr(self._medium, name)

    def write(self, *given, **named):
        """Wait for the gate, and write."""
        self.writing.set()
        assert self.gate.wait(60)
        self._medium.write(*given, **named)
        self.writing.clear()


@pytest.fixture
def arena():
    """What the server lends."""
    medium = DramBackend(2**20)
    yield medium
    medium.close()


def client_of(server):
    """A client of the server."""
    return RemoteBackend(server.address, TOKEN, fingerprint=b"model", timeout_s=5)


def store(medium, key):
    """A block of one layer."""
    block = medium.reserve(key, [4])
    medium.write(block, [b"data"])
    medium.commit(block)


def is_closed(peer):
    """Whether the server has closed the connection, within half a minute."""
    peer.settimeout(30)
    try:
        while peer.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


class Refusing:
    """A listener that has no descriptor for its next clients."""

    def __init__(self, listener, times):
        self._listener = listener
        self._times = times

    def __getattr__(self, name):
        """As the listener."""
        return getattr(self._listener, name)

    def accept(self):
        """Fail as often as asked for, then accept."""
        if self._times:
            self._times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()


def test_a_failed_accept_is_not_the_end(arena, caplog):
    """Out of descriptors, the server logs a warning, waits and continues; it still closes."""
    with BlockServer(arena, TOKEN, timeout_s=5) as server:
        server._listener._socket = Refusing(server._listener._socket, 2)
        for _ in range(3):  # the first one is accepted by the call that was under way
            client = client_of(server)
            store(client, b"%d" % len(list(client.blocks())))
            client.close()
        assert caplog.text.count("Too many open files") == 1  # the second warning came too soon
        accepting = server._listener._accepting
    assert not accepting.is_alive()


def test_close_waits_for_those_who_write(arena):
    """When `close` has returned no thread uses the backend, and what was not committed is freed."""
    medium = Wrapped(arena)
    server = BlockServer(medium, TOKEN, timeout_s=5)
    client = client_of(server)
    block = client.reserve(b"key", [4])

    def write():
        with contextlib.suppress(OSError):  # unless the answer left before
            client.write(block, [b"data"])

    writer = threading.Thread(target=write)
    writer.start()
    assert medium.writing.wait(60)
    closer = threading.Thread(target=server.close)
    closer.start()
    closer.join(0.3)
    assert closer.is_alive()
    medium.gate.set()
    closer.join(60)
    assert not closer.is_alive()
    assert not medium.writing.is_set()
    assert arena.used_bytes == 0
    writer.join()
    client.close()


def test_silent_connections_keep_no_client_out(arena, monkeypatch, caplog):
    """Connections that send nothing keep no client out: the oldest is closed, and few warnings are logged."""
    monkeypatch.setattr(listener, "_MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(listener, "_MAX_PEERS", 2)
    with BlockServer(arena, TOKEN, timeout_s=60) as server:
        silent = [socket.create_connection(server.address, 5) for _ in range(12)]
        clients = [client_of(server), client_of(server)]
        for client in clients:
            store(client, b"key" + bytes([clients.index(client)]))
        assert is_closed(silent[0])
        with pytest.raises(ConnectionError):
            client_of(server)
        assert len(server._listener._unauthenticated) <= 4
        assert 1 <= caplog.text.count("have not authenticated") < 8
        for peer in [*silent, *clients]:
            peer.close()
