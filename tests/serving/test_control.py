"""The connection between the cluster and a worker: what is no frame, or no worker, is refused with a reason."""

import asyncio
import contextlib
import logging
import socket
import struct
import sys
import threading

import flat
import pytest
import torch
from waiting import until

from mooncake_lab.engine import load_model
from mooncake_lab.net.frames import MAGIC, ProtocolError
from mooncake_lab.perf import model_shape
from mooncake_lab.serving.calibration import measuring_limit_s
from mooncake_lab.serving.launch import WorkerError
from mooncake_lab.serving.launch.process import _place
from mooncake_lab.serving.messages import (
    MOST_BODY_BYTES,
    VERSION,
    WORKER_MESSAGES,
    Ping,
    Pong,
    Ready,
    Shutdown,
    pack,
    read_frame,
    receive_frame,
)
from mooncake_lab.serving.roles.prefill import PrefillRole
from mooncake_lab.serving.spec import worker_spec
from mooncake_lab.serving.supervisor import Supervisor
from mooncake_lab.serving.worker import Worker

HEADER = struct.Struct("<4sIQ")


def from_socket(sent):
    """What a worker makes of these bytes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        found = []
        with theirs.makefile("rb") as stream:
            while (body := read_frame(stream)) is not None:
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
    assert [WORKER_MESSAGES.decode(body) for body in read(pack([Pong(1, 0.5), Pong(2, 0.0)]))] == [
        Pong(1, 0.5),
        Pong(2, 0.0),
    ]
    assert read(b"") == []


@BOTH
@pytest.mark.parametrize("cut", [1, 15, 16, 17])
def test_truncated(read, cut):
    """A frame without its end is no end of the connection."""
    with pytest.raises(ConnectionResetError, match="in the middle of a frame"):
        read(pack([Pong(1, 0.5)])[:cut])


@BOTH
@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            HEADER.pack(MAGIC, MOST_BODY_BYTES + 1, 0),
            f"^a frame with a body of {MOST_BODY_BYTES + 1} bytes; allowed",
        ),
        (HEADER.pack(b"HTTP", 4, 0) + b"1234", "^a frame that begins with b'HTTP'; frames begin with b'MCK2'$"),
        (HEADER.pack(MAGIC, 1, 7) + b"12345678", "^a frame with a payload of 7 bytes; allowed are 0$"),
    ],
)
def test_lengths_are_not_believed(read, head, says):
    """What is no frame of a worker is refused before anything is read of it, each fault by its own sentence."""
    with pytest.raises(ProtocolError, match=says):
        read(head)


def test_what_is_too_large_is_not_sent(monkeypatch):
    """The sender is told, not the receiver."""
    monkeypatch.setattr("mooncake_lab.serving.messages.MOST_BODY_BYTES", 4)
    with pytest.raises(ValueError, match=r"a Ping message of \d+ bytes; allowed are 4"):
        pack([Ping(2**60)])


class Quiet:
    """The process of a worker that a `FakePool` launched."""

    def __init__(self, role):
        self.role, self.killed = role, False

    def kill(self):
        self.killed = True

    def wait(self, timeout_s):
        del timeout_s
        return True

    def reason(self):
        return "exited with status 3"


class FakePool:
    """A pool whose workers send given bytes, and then nothing; without any, they close the connection."""

    def __init__(self, *messages):
        self.messages = messages
        self.ends, self.processes = [], []

    def launch(self, spec, control):
        end = control.dup()
        end.sendall(b"".join(self.messages))
        if not self.messages:
            end.close()
        self.ends.append(end)
        self.processes.append(Quiet(spec.role))
        return self.processes[-1]

    def keep_spares(self):
        pass

    def close(self):
        for end in self.ends:
            end.close()

    def save(self):
        """The workers are done: they hang up."""
        for end in self.ends:
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def fake_pool():
    """Makes one: `fake_pool(bytes, ..)`."""
    with contextlib.ExitStack() as opened:
        yield lambda *messages: opened.enter_context(contextlib.closing(FakePool(*messages)))


def supervised(cluster, pool, worker_exit=lambda *_: None):
    """The workers of a cluster that does nothing with what it hears."""
    ignored = dict.fromkeys(("worker_up", "heard", "shared_store_gone"), lambda *_: None)
    return Supervisor(*cluster, pool, worker_exit=worker_exit, **ignored)


def start(cluster, pool):
    """Start a cluster's workers, and close it."""

    async def starting():
        supervisor = supervised(cluster, pool)
        try:
            await asyncio.wait_for(supervisor.start(), 20)
        finally:
            await supervisor.close()

    asyncio.run(starting())


def ready(version=VERSION):
    return Ready(
        version=version, name="prefill-0", pid=2**22 + 1, port=1, fingerprint=b"f", max_context_tokens=8,
        capacity_tokens=8, shape=model_shape("lab-tiny"), end_tokens=(), device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ((pack([ready(VERSION + 1)]),), f"version={VERSION + 1}.*this cluster speaks version {VERSION}"),
        ((pack([Pong(1, 0.0)]),), "first message is Pong"),
        ((b"GET / HTTP/1.1\r\n\r\n",), "frames begin with b'MCK2'"),
        ((pack([Ping(1)]),), "[Ii]nvalid"),
        ((), "did not start: exited with status 3"),
    ],
)
def test_strange_workers_are_refused(fake_pool, messages, says):
    """A worker of another version, one that does not begin with its name, and none at all stop the start."""
    with pytest.raises(WorkerError, match=says):
        start(flat.live(device="cpu"), fake_pool(*messages))


def test_the_start_has_a_time_limit(fake_pool):
    """A worker that sends nothing is given up after the limit, which the error states."""
    half = pack([ready()])[:5]
    with pytest.raises(WorkerError, match=r"it was not ready within 0\.1 s: exited with status 3"):
        start(flat.live(device="cpu", start_timeout_s=0.1), fake_pool(half))


def test_nonsense_later_ends_a_worker(fake_pool, caplog):
    """What follows the first message is held to the same rules: the worker is given up and replaced."""

    async def running():
        gone = asyncio.Event()
        alone = flat.live(device="cpu", coupled_nodes=1)
        supervisor = supervised(alone, fake_pool(pack([ready()]), b"\0" * 16), lambda *_: gone.set())
        await supervisor.start()
        await asyncio.wait_for(gone.wait(), 20)
        await asyncio.sleep(0.05)
        await supervisor.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(running())
    assert "frames begin with b'MCK2'" in caplog.text


@pytest.mark.parametrize(
    ("has_ssd", "bytes_per_s", "is_killed"), [(True, 1e5, False), (True, 1e12, True), (False, 1e5, True)]
)
def test_what_is_cached_is_saved_at_the_end(
    fake_pool, monkeypatch, caplog, tmp_path, has_ssd, bytes_per_s, is_killed
):
    """A worker with an SSD has as long as its DRAM takes to be written; one that is cut off is logged."""
    monkeypatch.setattr("mooncake_lab.serving.supervisor._STOP_S", 0.1)
    monkeypatch.setattr("mooncake_lab.serving.supervisor._SLOWEST_SSD_BYTES_PER_S", bytes_per_s)
    ssd = {"ssd_dir": str(tmp_path), "ssd_tokens": 4096} if has_ssd else {}
    cluster, pool = flat.live(device="cpu", cache_tokens=4096, **ssd), fake_pool(pack([ready()]))

    async def running():
        supervisor = supervised(cluster, pool)
        await supervisor.start()
        saved = asyncio.get_running_loop().call_later(0.4, pool.save)
        await supervisor.close()
        saved.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(running())
    roles = [process.role for process in pool.processes]
    assert pool.processes[roles.index("prefill")].killed == is_killed
    assert ("prefill-0 is killed after" in caplog.text) == (is_killed and has_ssd)


def test_timing_may_take_longer_the_larger_the_model_is():
    """One round of prompts and batches fits in, at a sixth of the speed of one core; an hour is the most."""
    shape = model_shape("lab-100m")
    assert 120 < measuring_limit_s(model_shape("lab-tiny")) < 122
    assert measuring_limit_s(shape) > 4816 * 2 * shape.parameters / 5e9
    assert measuring_limit_s(model_shape("llama3-8b")) == 3600


@pytest.mark.parametrize(
    ("device", "gpus", "expected"), [("auto", 2, "cuda:1"), ("auto", 1, "cuda:0"), ("cpu", 2, "cpu")]
)
def test_workers_take_gpus_in_turn(monkeypatch, device, gpus, expected):
    """The sixth worker takes the second GPU of two; one GPU is shared by all; a choice is a choice."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    cluster = flat.live(device=device, prefill_nodes=3, decode_nodes=3)
    assert _place(worker_spec(*cluster, "decode-2", b"t" * 32), {}) == expected


def test_a_worker_answers_while_it_saves(monkeypatch):
    """Told to stop, it still answers pings until what it holds is saved; then it hangs up, and its threads end."""
    closing = threading.Event()
    monkeypatch.setattr(PrefillRole, "close", lambda _: closing.wait(20))
    monkeypatch.setattr("os._exit", lambda _: pytest.fail("the process ended"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    model = load_model("random:lab-tiny", device="cpu", positions=256, backend="dense")
    spec = worker_spec(*flat.live(device="cpu", cache_tokens=256, max_model_len=256), "prefill-0", b"t" * 32)
    ours, theirs = socket.socketpair()
    before = threading.active_count()
    with ours, theirs, ours.makefile("rb") as stream:
        running = threading.Thread(target=Worker(theirs, spec, model).run)
        running.start()
        assert isinstance(WORKER_MESSAGES.decode(read_frame(stream)), Ready)
        ours.sendall(pack([Shutdown()]))
        ours.sendall(pack([Ping(5)]))
        assert WORKER_MESSAGES.decode(read_frame(stream)) == Pong(5, 0.0)
        closing.set()
        assert read_frame(stream) is None
        running.join(20)
    assert until(lambda: threading.active_count() == before, 5)
