"""A front that did not run for a while answers what arrived in time, and kills nobody for its own silence."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import flat
import pytest

from mooncake_lab.serving import ClusterRuntime
from mooncake_lab.serving.timeouts import within

PAUSE_S = 2.5
ENOUGH_S = 60

SERVER = """
import asyncio, functools, json, socket
import uvicorn
from mooncake_lab.serving.openai_api.connections import ClientConnection, ClientLimits, Gate

async def echo(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})

async def serve():
    limits = ClientLimits(header_s=2, body_s=2, idle_s=2, stalled_s=2)
    protocol = functools.partial(ClientConnection, Gate(limits, 64))
    config = uvicorn.Config(
        echo, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=2
    )
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])

asyncio.run(serve())
"""


@pytest.fixture(scope="module")
def front():
    """A server process, and its port."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield process, int(process.stdout.readline())
        process.kill()


def answer(peer):
    """The status of the next answer, and its body."""
    said = b""
    while b"\r\n\r\n" not in said and (part := peer.recv(2**16)):
        said += part
    if not said:
        return None, b""
    head, _, body = said.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if b"content-length" in line)
    while len(body) < length and (part := peer.recv(2**16)):
        body += part
    return int(head.split()[1]), body


WHOLE = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd"
CUTS = {"headers": 0, "half of the headers": 20, "body": len(WHOLE) - 2, "next request": len(WHOLE)}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_arrived_in_a_pause_is_answered(front, cut):
    """Headers, a body, and a further request that come while the front is stopped are not too late after it."""
    process, port = front
    with contextlib.ExitStack() as opened:
        peers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=ENOUGH_S)) for _ in range(8)
        ]
        for peer in peers:
            peer.sendall(WHOLE[:cut])
            if cut == len(WHOLE):
                assert answer(peer) == (200, b"abcd")
        time.sleep(0.3)  # the front has them
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for peer in peers:
                peer.sendall(WHOLE[cut:] or WHOLE)
            time.sleep(PAUSE_S)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert [answer(peer) for peer in peers] == [(200, b"abcd")] * len(peers)


def test_what_never_comes_is_still_refused(front):
    """A pause does not keep a client that sends nothing for ever; it is told in JSON what did not come."""
    process, port = front
    with socket.create_connection(("127.0.0.1", port), timeout=ENOUGH_S) as peer:
        peer.sendall(WHOLE[:-2])
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGCONT)
        status, body = answer(peer)
    assert status == 408
    assert json.loads(body)["error"]["message"] == "the body did not come within 2 s"


def test_a_limit_does_not_count_a_pause():
    """What came while the loop was kept is there before its time is over, as often as that happens."""

    async def read_late():
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            reading = asyncio.create_task(within(reader.readexactly(2), 1.5))
            for byte in (b"a", b"b"):
                await asyncio.sleep(0.05)
                theirs.sendall(byte)
                time.sleep(1.0)  # noqa: ASYNC251  # the loop is kept
            found = await reading
            writer.close()
            return found

    assert asyncio.run(read_late()) == b"ab"


def test_a_limit_ends_what_takes_too_long():
    """Work that is not done in time is cancelled, work that fails raises its error, waiting can be cancelled."""
    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            raise KeyError("done")
        except asyncio.CancelledError:
            ended.append(seconds)
            raise

    async def all_three():
        with pytest.raises(TimeoutError):
            await within(work(50), 0.1)
        with pytest.raises(KeyError):
            await within(work(0), 0.1)
        waiting = asyncio.create_task(within(work(60), 50))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)

    asyncio.run(all_three())
    assert ended == [50, 60]


def test_time_passes_before_the_first_run(believed):
    """While workers still start, no request waits, and the pulses of the workers go on."""
    runtime = ClusterRuntime(*flat.live(), model=believed, write=print)
    runtime._time_passes(1.0)
