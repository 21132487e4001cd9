"""The connection between the cluster and a worker: what is no frame, or no worker, is refused with a reason."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
import time

import pytest

from mooncake_lab.perf import model_shape
from mooncake_lab.serving import LiveSpec
from mooncake_lab.serving.birth import Nursery
from mooncake_lab.serving.frames import MOST_BODY_BYTES, pack, read_frame, receive_frame
from mooncake_lab.serving.messages import EVENTS, VERSION, Ping, Pong, Ready
from mooncake_lab.serving.nursery import _place
from mooncake_lab.serving.spec import worker_spec
from mooncake_lab.serving.supervisor import Callbacks, Supervisor, WorkerError
from mooncake_lab.store.media import ProtocolError

HEADER = struct.Struct("<4sI")


def from_socket(sent):
    """What a worker makes of these bytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        found = []
        while (body := read_frame(theirs)) is not None:
            found.append(body)
        return found


def from_stream(sent):
    """What the cluster makes of these bytes."""

    async def reading():
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        found = []
        while (body := await receive_frame(reader)) is not None:
            found.append(body)
        return found

    return asyncio.run(reading())


BOTH = pytest.mark.parametrize("read", [from_socket, from_stream])


@BOTH
def test_frames_come_as_they_were(read):
    """Messages packed in one breath are read one by one; the end of the connection is the end."""
    assert [EVENTS.decode(body) for body in read(pack([Pong(1, 0.5), Pong(2, 0.0)]))] == [
        Pong(1, 0.5),
        Pong(2, 0.0),
    ]
    assert read(b"") == []


@BOTH
@pytest.mark.parametrize("cut", [1, 7, 9])
def test_truncated(read, cut):
    """A frame without its end is no end of the connection."""
    with pytest.raises(ConnectionResetError, match="in the middle of a frame"):
        read(pack([Pong(1, 0.5)])[:cut])


@BOTH
@pytest.mark.parametrize("head", [HEADER.pack(b"MLC1", MOST_BODY_BYTES + 1), HEADER.pack(b"HTTP", 4) + b"1234"])
def test_lengths_are_not_believed(read, head):
    """A body that is announced too large, and another protocol, are refused before anything is read of them."""
    with pytest.raises(ProtocolError, match=f"allowed are b'MLC1' and {MOST_BODY_BYTES}"):
        read(head)


def test_what_is_too_large_is_not_sent(monkeypatch):
    """The sender is told, not the receiver."""
    monkeypatch.setattr("mooncake_lab.serving.frames.MOST_BODY_BYTES", 4)
    with pytest.raises(ValueError, match=r"a Ping message of \d+ bytes; allowed are 4"):
        pack([Ping(2**60)])


class Cuckoo:
    """A nursery whose workers say what they are told to, and then nothing."""

    def __init__(self, *first_words):
        self.first_words = first_words
        self.ends = []

    def check(self, spec):
        pass

    def open(self):
        pass

    def bear(self, spec, control):
        del spec
        end = control.dup()
        end.sendall(b"".join(self.first_words))
        if not self.first_words:
            end.close()
        self.ends.append(end)

    def close(self):
        for end in self.ends:
            end.close()


@pytest.fixture
def cuckoo():
    """Makes one: `cuckoo(bytes, ..)`."""
    with contextlib.ExitStack() as nests:
        yield lambda *words: nests.enter_context(contextlib.closing(Cuckoo(*words)))


def ready(version=VERSION):
    return Ready(
        version=version, name="prefill-0", pid=2**22 + 1, port=1, fingerprint=b"f", window=8, capacity_tokens=8,
        shape=model_shape("lab-tiny"), end_tokens=(), device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((pack([ready(VERSION + 1)]),), f"version={VERSION + 1}.*this cluster speaks version {VERSION}"),
        ((pack([Pong(1, 0.0)]),), "first words are Pong"),
        ((b"GET / HTTP/1.1\r\n\r\n",), "allowed are b'MLC1'"),
        ((pack([Ping(1)]),), "[Ii]nvalid"),
        ((), "ended before it was ready"),
    ],
)
def test_strange_workers_are_refused(cuckoo, words, says):
    """A worker of another version, one that does not begin with its name, and none at all stop the start."""

    async def starting():
        callbacks = Callbacks(born=lambda *_: None, heard=lambda *_: None, died=lambda *_: None)
        supervisor = Supervisor(LiveSpec(device="cpu"), callbacks, cuckoo(*words))
        try:
            await asyncio.wait_for(supervisor.start(), 20)
        finally:
            await supervisor.close()

    with pytest.raises(WorkerError, match=says):
        asyncio.run(starting())


def test_a_worker_that_talks_nonsense_later_dies(cuckoo, caplog):
    """What comes after the first words is held to the same rules: the worker is given up, and another one born."""
    died = asyncio.Event()

    async def living():
        callbacks = Callbacks(born=lambda *_: None, heard=lambda *_: None, died=lambda *_: died.set())
        alone = LiveSpec(device="cpu", prefill_nodes=0, decode_nodes=0, coupled_nodes=1)
        supervisor = Supervisor(alone, callbacks, cuckoo(pack([ready()]), b"\0" * 8))
        await supervisor.start()
        await asyncio.wait_for(died.wait(), 20)
        await asyncio.sleep(0.05)
        await supervisor.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(living())
    assert "allowed are b'MLC1'" in caplog.text


def test_closing_does_not_wait_for_a_model():
    """A nursery that still loads is ended at once, and whoever waits for it is told."""
    nursery = Nursery(LiveSpec(model="random:lab-tiny", device="cpu"))
    told = []

    def opening():
        try:
            nursery.open()
        except (ValueError, OSError) as error:
            told.append(error)

    thread = threading.Thread(target=opening)
    thread.start()
    deadline_s = time.monotonic() + 20
    while nursery._loading is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    pid = nursery._loading.pid
    late = threading.Thread(target=opening)  # waits for the first, and must not begin anew after it
    late.start()
    nursery.close()
    thread.join(20)
    late.join(20)
    assert len(told) == 2
    assert nursery._process is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"), [("auto", 2, "cuda:1"), ("auto", 1, "cuda:0"), ("cpu", 2, "cpu")]
)
def test_workers_take_gpus_in_turn(monkeypatch, device, gpus, expected):
    """The sixth worker takes the second GPU of two; one GPU is shared by all; a choice is a choice."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    spec = LiveSpec(device=device, prefill_nodes=3, decode_nodes=3)
    assert _place(worker_spec(spec, "decode-2", b"t" * 32)) == expected
