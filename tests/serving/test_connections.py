"""Clients that send half of something, or nothing, or read nothing, cost the others nothing."""

import asyncio
import contextlib
import functools
import json
import logging
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
import uvicorn

from mooncake_lab.serving.openai_api.connections import ClientConnection, ClientLimits, Gate, available_files
from mooncake_lab.serving.pacer import Pacer

MODEL = "random:lab-tiny"
MOST = 8
LIMITS = ClientLimits(header_s=0.3, body_s=0.3, idle_s=1, stalled_s=0.5, connections=MOST)
ENOUGH_S = 30


@pytest.fixture(scope="module")
def api(open_api):
    with open_api(address={"limits": LIMITS}) as opened:
        yield opened


def dial(api):
    host, port = api.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=ENOUGH_S)


def until_closed(peer):
    """All that the server still says before it hangs up; an error where it does not."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := peer.recv(2**16):
            found += part
    return found


@contextlib.contextmanager
def dripping(peer):
    """Send a byte now and then, meanwhile."""
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            with contextlib.suppress(OSError):
                peer.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def health(api):
    return httpx.get(f"{api.url}/health", timeout=ENOUGH_S).status_code


HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE + HALF], ids=["nothing", "half", "half a second request"])
def test_headers_have_a_time(api, sent):
    """A connection whose headers do not come is closed with 408, even if a byte comes now and then."""
    with dial(api) as peer:
        peer.sendall(sent)
        with dripping(peer) if sent else contextlib.nullcontext():
            said = until_closed(peer)
    assert b"408 Request Timeout" in said
    assert health(api) == 200


def test_bodies_have_a_time(api):
    """A body that stops in the middle is 408 in JSON."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.token}\r\n"
    with dial(api) as peer:
        peer.sendall(f'{head}Content-Length: 100\r\n\r\n{{"model":'.encode())
        said = until_closed(peer)
    assert b"408" in said.splitlines()[0]
    assert json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]["message"] == "the body did not come within 0.3 s"


def test_a_client_that_is_gone_writes_nothing_into_the_log(caplog):
    """Events that are sent to a connection which was reset are dropped, and asyncio does not log each of them."""
    done = asyncio.Event()

    async def app(_scope, _receive, send):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # a reset, which the server has not seen yet
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(50):
            await send({"type": "http.response.body", "body": b"x" * 100, "more_body": True})
        done.set()

    async def serve():
        connection = functools.partial(ClientConnection, Gate(LIMITS, MOST))
        config = uvicorn.Config(app, http=connection, lifespan="off", log_config=None)
        config.load()
        loop, state = asyncio.get_running_loop(), uvicorn.server.ServerState()
        server = await loop.create_server(
            lambda: connection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            await loop.run_in_executor(None, client.connect, server.sockets[0].getsockname())
            client.sendall(WHOLE)
            await done.wait()

    with socket.socket() as client, caplog.at_level(logging.WARNING, "asyncio"):
        asyncio.run(asyncio.wait_for(serve(), ENOUGH_S))
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_body_behind_the_answer_has_a_time(api):
    """A client that goes on sending what nobody reads, after its answer, is hung up on."""
    with dial(api) as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        with dripping(peer):
            said = until_closed(peer)
    assert b" 401 " in said.splitlines()[0]


def test_idle_connections_have_a_time(api):
    """A connection that asks no more is closed without a word."""
    with dial(api) as peer:
        peer.sendall(WHOLE)
        said = until_closed(peer)
    assert b" 200 " in said.splitlines()[0]
    assert said.count(b"HTTP/1.1") == 1


def test_who_reads_nothing_is_gone(open_api):
    """A client that does not read its stream is hung up on, and its request ends."""
    opening = open_api(address={"limits": LIMITS})
    # accepted sockets inherit it: what nobody reads must not vanish into the system's own buffers
    opening.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with opening as api:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = api.url.removeprefix("http://").split(":")
            peer.connect((host, int(port)))
            prompts = [[i, 1] for i in range(16)]
            body = {"model": MODEL, "prompt": prompts, "max_tokens": 8000, "stream": True, "ignore_eos": True}
            sent = json.dumps(body).encode()
            peer.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.token}\r\n"
                f"Content-Length: {len(sent)}\r\n\r\n".encode()
                + sent
            )
            streams = api.runtime.streams
            for wanted in (True, False):
                deadline_s = time.monotonic() + 2 * ENOUGH_S
                while bool(streams) != wanted and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                assert bool(streams) == wanted
        assert health(api) == 200


def test_strangers_do_not_keep_others_out(api, caplog):
    """With more half-sent headers than connections allowed, health and requests go on, and the log is quiet."""
    with caplog.at_level(logging.DEBUG), contextlib.ExitStack() as strangers:
        for number in range(5 * MOST):
            strangers.enter_context(dial(api)).sendall(HALF)
            if number % MOST == 0:
                assert health(api) == 200
        headers = {"Authorization": f"Bearer {api.token}"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
        made = httpx.post(f"{api.url}/v1/completions", json=body, headers=headers, timeout=ENOUGH_S)
        assert made.json()["usage"]["completion_tokens"] == 4
    # what the connections themselves cause, at any level; pools of clients and the loop's own tuning are no matter
    said = [record for record in caplog.records if record.name.startswith(("uvicorn", "asyncio", "mooncake"))]
    assert [record.getMessage() for record in said if record.levelno >= logging.WARNING] == []


def test_who_reads_slowly_gets_everything():
    """A client that takes a little all the time is not one that takes nothing."""
    size = 1_500_000

    async def answer(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    def read_slowly(port):
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            peer.connect(("127.0.0.1", port))
            peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            found = 0
            while part := peer.recv(20_000):
                found += len(part)
                time.sleep(0.03)
            return found

    async def served():
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        protocol = functools.partial(ClientConnection, Gate(replace(LIMITS, stalled_s=1.0), 8))
        config = uvicorn.Config(answer, http=protocol, ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        found = await asyncio.to_thread(read_slowly, listener.getsockname()[1])
        server.should_exit = True
        await serving
        return found

    assert asyncio.run(served()) > size


def test_streams_are_not_made_room_of(open_api, believed):
    """With every connection in a stream, one more is told 503, and the streams go on to their end."""
    slow = replace(believed, decode=replace(believed.decode, constant_s=0.02))
    pace = Pacer.of(slow)
    with open_api(address={"limits": LIMITS}, pacer=pace) as api, contextlib.ExitStack() as opened:
        headers = {"Authorization": f"Bearer {api.token}"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
        streams = []
        for _ in range(MOST):
            client = opened.enter_context(httpx.Client(headers=headers, timeout=2 * ENOUGH_S))
            stream = opened.enter_context(client.stream("POST", f"{api.url}/v1/completions", json=body))
            streams.append(stream.iter_lines())
            next(streams[-1])
        with dial(api) as late:
            assert b"503 Service Unavailable" in until_closed(late)
        for lines in streams:
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert health(api) == 200


def test_nonsense_is_no_traceback(api, caplog):
    """What is no HTTP is answered with 400 and not written down."""
    with caplog.at_level(logging.DEBUG, logger="mooncake_lab"), dial(api) as peer:
        peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert b" 400 " in until_closed(peer).splitlines()[0]
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_two_lengths_are_none(api):
    """A request with Content-Length and Transfer-Encoding is refused, whichever path it names."""
    for path in ("/health", "/v1/completions", "/nowhere"):
        with dial(api) as peer:
            peer.sendall(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
                "0\r\n\r\n".encode()
            )
            said = until_closed(peer)
        assert b" 400 " in said.splitlines()[0]
        assert b"both Content-Length and Transfer-Encoding" in said


def test_there_are_files_for_all_connections(monkeypatch):
    """However few files a process may open, connections and those that the loop accepts at once stay below."""
    for soft in (256, 1024, 4096, 10**6):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        connections, backlog = available_files(4096)
        assert 0 < connections + backlog < soft
        assert backlog >= 1
    assert available_files(10)[0] == 10


def ask_all(api, clients):
    """Statuses, bodies and headers that many clients get at once, or their error."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.token}\r\nConnection: close\r\n"
    )
    sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def one(_):
        with dial(api) as peer:
            peer.sendall(sent)
            found = b""
            while part := peer.recv(2**16):  # a reset is an error here
                found += part
        return found

    with ThreadPoolExecutor(clients) as executor:
        return list(executor.map(one, range(clients)))


def test_more_clients_than_connections_are_served(open_api):
    """Clients beyond the limit wait in the backlog; each is served or told 503 with the time to come again."""
    limits = replace(LIMITS, header_s=5, young_s=20.0)
    with open_api(address={"limits": limits}) as api:
        said = ask_all(api, 5 * MOST)
    assert [one.splitlines()[0] for one in said] == [b"HTTP/1.1 200 OK"] * (5 * MOST)


def test_clients_that_wait_too_long_are_told(open_api, believed):
    """While all connections are busy, clients get 503 in JSON with Retry-After, none is reset, and none is cut."""
    slow = Pacer.of(replace(believed, decode=replace(believed.decode, constant_s=0.5)))
    with open_api(address={"limits": replace(LIMITS, header_s=ENOUGH_S, young_s=0.3)}, pacer=slow) as api:
        said = ask_all(api, 5 * MOST)
    statuses = [int(one.split()[1]) for one in said]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= MOST
    for one in said:
        if b" 503 " in one.splitlines()[0]:
            head, _, body = one.partition(b"\r\n\r\n")
            assert b"Retry-After: 1" in head
            assert json.loads(body)["error"]["message"].startswith("all connections of this server are in use")


def test_what_is_late_is_told_in_json(api):
    """The answer 408 says in OpenAI's form what did not come."""
    with dial(api) as peer:
        peer.sendall(HALF)
        said = until_closed(peer)
    error = json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["message"] == "the headers did not come within 0.3 s"
    assert error["type"] == "invalid_request_error"


def test_a_young_connection_is_not_closed_for_another():
    """Who has just connected keeps its connection; who has waited longest loses it, once it has waited a while."""

    class Client:
        def __init__(self):
            self.gave_way = False

        def give_way(self):
            self.gave_way = True
            gate.leave(self)

        def check(self):
            pass

    async def entered():
        clients = [Client() for _ in range(4)]
        assert [gate.enter(client) for client in clients] == [True, True, False, False]
        assert not any(client.gave_way for client in clients)
        gate.now_s += LIMITS.header_s
        gate.works(clients[0])
        assert not gate.has_room()
        gate.now_s += ClientLimits().young_s
        assert gate.has_room()
        assert not gate.has_room(1)
        assert gate.enter(clients[2])
        assert [client.gave_way for client in clients] == [False, True, False, False]
        for client in clients:
            gate.leave(client)

    gate = Gate(ClientLimits(), 2)
    asyncio.run(entered())
