"""The benchmark of servers under shared prefixes: its clients, router and record; no test asserts a time."""

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import pytest
from gain import KV_TOKENS, opened
from http_clients import Question, closed_loop, open_loop
from http_servers import cores, pinned, running, wait_until_open
from over_http import beside_each_other, beside_vllm, served_s
from router import Backend, Router
from serve import believed, beside_peers

from mooncake_lab.bench.rounds import Rounds
from mooncake_lab.conductor import LatencyEstimator, named_placement

BLOCK = 32


@contextlib.contextmanager
def listening(answer):
    """A server in a thread that answers each connection by `answer(reader, writer)`; its address."""
    loop, address = asyncio.new_event_loop(), list[str]()
    started = threading.Event()

    async def serve():
        async def each(reader, writer):
            with contextlib.suppress(ConnectionError):
                await answer(reader, writer)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(each, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        started.set()
        async with server:
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve_forever()

    thread = threading.Thread(target=lambda: loop.run_until_complete(task), daemon=True)
    task = loop.create_task(serve())
    thread.start()
    started.wait()
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


async def body_of(reader):
    """The JSON of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return json.loads(await reader.readexactly(length))


def events(*token_ids):
    """An answer with an event for each list of token ids."""
    lines = [f"data: {json.dumps({'choices': [{'text': '', 'token_ids': ids}]})}\n\n" for ids in token_ids]
    return ("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + "".join(lines) + "data: [DONE]\n\n").encode()


async def answer_all(reader, writer):
    """One event for the first token and one for all others."""
    asked = await body_of(reader)
    writer.write(events([1], [2] * (asked["max_tokens"] - 1)))


QUESTION = Question(prompt=[1, 2, 3], new_tokens=3)


class TestClients:
    def test_every_token_of_an_event_has_its_time(self):
        """Three tokens in two events are three times, in order; the answer has no error."""
        with listening(answer_all) as url:
            for answer in open_loop(url, [QUESTION] * 2, 5.0) + closed_loop(url, [QUESTION] * 3, 2):
                assert answer.error is None
                assert list(answer.token_times_s) == sorted(answer.token_times_s)
                assert len(answer.token_times_s) == 3
                assert answer.ttft_s >= 0

    @pytest.mark.parametrize(
        ("sent", "error"),
        [
            (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "ValueError: status 429"),
            (events([1], [2]), "2 of 3 tokens came"),
            (b"HTTP/1.1 200 OK\r\n\r\ndata: {what}\n\n", "JSONDecodeError"),
            (b"no HTTP\r\n\r\n", "RemoteProtocolError"),
            (b"", "RemoteProtocolError"),
        ],
    )
    def test_an_answer_that_is_not_whole_says_why(self, sent, error):
        """Refusals, short answers and garbage are errors of that answer, and no exception."""

        async def answer(reader, writer):
            await body_of(reader)
            writer.write(sent)

        with listening(answer) as url:
            (found,) = open_loop(url, [QUESTION], 5.0)
        assert error in found.error

    def test_clients_leave_a_server_that_is_silent(self):
        """After their patience, the answer is not done."""

        async def answer(reader, _):
            await body_of(reader)
            await reader.read()

        with listening(answer) as url:
            (found,) = open_loop(url, [QUESTION], 0.2)
        assert (found.error, found.ttft_s) == ("not done when the clients left", None)


def made(policy, names=("a", "b"), capacity_blocks=64):
    """A router before servers of these names."""
    backends = [Backend(name=name, capacity_blocks=capacity_blocks) for name in names]
    return Router(backends, named_placement(policy, 0), LatencyEstimator(believed("lab-30m")), BLOCK)


def tokens(text, count=10 * BLOCK):
    """A prompt that no other text shares."""
    return [text * 1000 + number for number in range(count)]


class TestRouter:
    def test_a_prompt_goes_where_its_prefix_is(self):
        """Two prefixes are each on one server, and whoever begins with one comes there."""
        router = made("cache_aware")
        homes = {}
        for text in (1, 2):
            backend, number = router.place(tokens(text), 1)
            homes[text] = backend.name
            backend.prefills_s.pop(number)
            other = router.place(tokens(9 + text), 1)[0]  # makes the chosen server no longer idle
            other.prefills_s.clear()
        for text in (2, 1, 2, 1):
            backend, number = router.place([*tokens(text), 7, 8, 9], 1)
            assert backend.name == homes[text]
            backend.prefills_s.pop(number)

    def test_the_plain_router_counts_requests(self):
        """Equal prompts alternate between idle servers; one that is done makes room."""
        router = made("fewest_requests")
        first, number = router.place(tokens(1), 1)
        second, _ = router.place(tokens(1), 1)
        assert {first.name, second.name} == {"a", "b"}
        first.end(number)
        assert router.place(tokens(1), 1)[0] is first

    def test_a_server_is_believed_to_forget_what_it_was_sent_long_ago(self):
        """As many blocks as its KVCache has are remembered, those used last; the end of a prompt goes first."""
        router = made("cache_aware", names=("a",), capacity_blocks=16)
        backend = router._backends["a"]
        requests = [router.place(tokens(text), 1)[1] for text in (1, 2)]
        held = [backend.matched_blocks(backend.requests[number].block_keys) for number in requests]
        assert held == [6, 10]

    def test_answers_pass_through(self):
        """Clients see the tokens of the server behind the router, and the router forgets the requests."""
        with listening(answer_all) as url:
            router = made("cache_aware", names=(url,))
            with listening(router.serve) as front:
                answers = open_loop(front, [QUESTION] * 3, 5.0)
            assert [len(answer.token_times_s) for answer in answers] == [3, 3, 3]
            backend = router._backends[url]
            assert (backend.requests, backend.prefills_s, backend.assigned_requests) == ({}, {}, 3)

    def test_a_server_that_is_gone_is_a_bad_gateway(self):
        """The client gets status 502, and nothing is left of the request."""
        router = made("fewest_requests", names=("http://127.0.0.1:9",))
        with listening(router.serve) as front:
            (answer,) = open_loop(front, [QUESTION], 5.0)
        assert answer.error == "ValueError: status 502"
        assert router._backends["http://127.0.0.1:9"].requests == {}


class TestOverHttp:
    def test_a_peer_that_does_not_run_here_is_left_out_in_one_sentence(self, capsys, monkeypatch, tmp_path):
        """No environment is made, nothing is started, and the rest of the program goes on."""
        monkeypatch.setattr("platform.machine", lambda: "riscv64")
        asked = SimpleNamespace(model="random:lab-tiny", environments=tmp_path, tokens=4, rounds=1)
        assert beside_peers(asked, [1]) == []
        said = capsys.readouterr().err
        assert said.startswith("vLLM is left out: vllm_peer.py needs Linux x86_64 (machine); this is ")
        assert said.count("\n") == 1
        assert not list(tmp_path.iterdir())

    def test_a_folder_is_refused(self, tmp_path):
        """Both servers load random weights that are saved for them."""
        with pytest.raises(ValueError, match="some/folder is a folder"):
            next(beside_vllm("some/folder", tmp_path, [1], 4, 1))

    def test_ratios_are_taken_within_a_round(self):
        """By hand, for two rounds of 12 tokens."""
        taken = Rounds({"ours": [1.0, 3.0], "vLLM": [2.0, 3.0]}, load_average=0.5)
        found = beside_each_other(taken, 12)
        assert (found["ours_per_s"], found["peer_per_s"]) == (6.0, 4.8)
        assert (found["least"], found["ratio"], found["most"]) == (1.0, 1.5, 2.0)

    def test_a_client_without_a_whole_answer_is_an_error(self):
        """A server that sends too little is no peer."""

        async def answer(reader, writer):
            await body_of(reader)
            writer.write(events([1]))

        with listening(answer) as url, pytest.raises(ValueError, match="no whole answer: 1 of 3 tokens came"):
            served_s(url, [QUESTION])


class TestRecord:
    @pytest.fixture
    def asked(self, tmp_path):
        """A small run."""
        setting = {"model": "lab-30m", "dtype": "bfloat16", "rates": [1.0], "seconds": 1.0, "rounds": 1}
        return SimpleNamespace(out=tmp_path / "gain.json", **setting)

    def test_an_interrupted_run_goes_on(self, asked):
        """What was measured is kept where the setting is the same."""
        record = opened(asked)
        record["cells"].append({"system": "ours_1"})
        asked.out.write_text(json.dumps(record))
        assert opened(asked)["cells"] == [{"system": "ours_1"}]

    def test_another_setting_is_another_file(self, asked):
        """One sentence names what differs."""
        asked.out.write_text(json.dumps(opened(asked) | {"kv_tokens": 1}))
        with pytest.raises(ValueError, match=f"has kv_tokens 1, asked is {KV_TOKENS}; name another file"):
            opened(asked)


class TestServers:
    def test_a_server_that_ends_is_named(self):
        """It is not waited for."""
        with running(["false"], set()) as process, pytest.raises(ValueError, match="vllm_1 ended with status 1"):
            wait_until_open(process, 9, "vllm_1")

    def test_cores_are_given_back(self):
        """What is started meanwhile runs on the cores that were named, and afterwards all are there again."""
        servers, clients = cores()
        assert len(servers) == len(clients) == 1
        with pinned(servers):
            assert cores() == (servers, servers)
        assert cores() == (servers, clients)
