"""What is refused is refused early, by name, and in a sentence."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import flat
import httpx
import numpy as np
import openai
import pytest
from quiet_workers import QuietCluster
from waiting_tokenizer import WaitingTokenizer

import mooncake_lab.serving.openai_api.server
from mooncake_lab.cli.field_names import by_option
from mooncake_lab.cli.live import serve
from mooncake_lab.cluster import carry_out, events
from mooncake_lab.serving import LiveCluster, WorkerError
from mooncake_lab.serving.launch import process as worker_process
from mooncake_lab.serving.openai_api.parsing import BadRequestError, Reader
from mooncake_lab.serving.openai_api.server import listen
from mooncake_lab.serving.openai_api.tokenizer import ByteTokenizer
from mooncake_lab.serving.stream import FailedError
from mooncake_lab.store.backends import SsdBackend, StorageFullError

MODEL = "random:lab-tiny"


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "encoded"),
    [
        (["a" * 101, *["b" * 90] * 63], None, 1),
        (["a", "b" * 101, "c" * 101], None, 2),
        ([*["a" * 90] * 63, "b" * 101], None, 64),
        (["a" * 90, *["b" * 90] * 63], 11, 1),  # the answer has no room
        (["a", "b" * 301], None, 0),  # too many characters, whatever the tokens are
        (["a", [1] * 101], None, 0),
        (["a", [1] * 95], 6, 0),
    ],
)
def test_no_text_is_encoded_after_one_that_is_too_long(prompts, max_tokens, encoded):
    """A body is refused at its first text that does not fit, and what is no text is looked at before."""
    counting = WaitingTokenizer(most_characters_a_token=3)
    reader = Reader(tokenizer=counting, model="m", most_tokens=100)
    with pytest.raises(BadRequestError, match=r"no more than 100 fit|together they may be 100|characters") as told:
        reader.completion(json.dumps({"model": "m", "prompt": prompts, "max_tokens": max_tokens}).encode())
    assert told.value.param == "prompt"
    assert len(counting.encoded) == encoded


@pytest.mark.parametrize("fields", [{"stop": ["x"] * 17}, {"stop": ""}, {"temperature": 3}, {"nonsense": 1}])
def test_what_is_wrong_besides_is_found_before_a_text_is_encoded(fields):
    """Bad options cost no tokenising."""
    counting = WaitingTokenizer(most_characters_a_token=3)
    reader = Reader(tokenizer=counting, model="m", most_tokens=100)
    with pytest.raises(BadRequestError):
        reader.completion(json.dumps({"model": "m", "prompt": "x"} | fields).encode())
    with pytest.raises(BadRequestError):
        reader.chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields).encode())
    assert counting.encoded == []


def test_short_bodies_do_not_wait_behind_long_ones(open_api, monkeypatch):
    """While many long bodies are tokenised, short ones of every kind are answered."""
    counting = WaitingTokenizer(most_characters_a_token=3)
    monkeypatch.setattr(mooncake_lab.serving.openai_api.server, "tokenizer_of", lambda _: counting)
    with open_api() as api, ThreadPoolExecutor(12) as executor:
        headers = {"Authorization": f"Bearer {api.token}"}

        def post(path, **body):
            url = f"{api.url}/v1/{path}"
            return httpx.post(url, json={"model": MODEL, "max_tokens": 2} | body, headers=headers, timeout=60)

        texts = ["wait" + "x" * 7000] * 64
        long = [executor.submit(post, "completions", prompt=texts, max_tokens=8) for _ in range(8)]
        long += [executor.submit(post, "completions", prompt="wait" + "x" * 5000) for _ in range(4)]
        try:
            assert counting.waiting.acquire(timeout=60)
            assert counting.waiting.acquire(timeout=60)
            assert post("completions", prompt="quick").status_code == 200
            assert post("completions", prompt=["quick"] * 8).status_code == 200
            assert post("chat/completions", messages=[{"role": "user", "content": "hi"}]).status_code == 200
            assert not any(one.done() for one in long)
        finally:
            counting.go_on.set()


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": [MESSAGE, {"role": "tool", "tool_call_id": "1", "content": "x"}]},
         "messages[1].role", "'tool'; this server offers no tools"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "offers no tools"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role", "'judge'; allowed are 'system'"),
        ({"messages": [MESSAGE, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
         "messages[1].tool_calls", "this server offers no tools: allowed is [] or null"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
         "messages[0].function_call", "this server offers no tools"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "is null; allowed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
         "messages[0].content[0].type", "'image_url'; this server reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]},
         "messages[0].content[1].type", "'input_audio'; this server reads text only"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [MESSAGE | {"weight": 1}]}, "messages[0].weight", "is no option of this server"),
        ({"messages": "x"}, "messages", "messages is text; allowed is a list"),
        ({"tools": [{"type": "function"}]}, "tools", "this server does not offer; allowed is [] or null"),
        ({"tool_choice": "required"}, "tool_choice", 'allowed is "none" or "auto" or null'),
        ({"response_format": {"type": "json_object"}}, "response_format", 'allowed is {"type":"text"} or null'),
        ({"logprobs": True}, "logprobs", "allowed is false or null"),
        ({"max_tokens": "7"}, "max_tokens", "max_tokens is text; allowed is a whole number or null"),
        ({"stream_options": {"foo": 1}}, "stream_options.foo", "is no option of this server"),
        ({"guided_json": {}}, "guided_json", "guided_json is no option of this server"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_named(fields, param, says):
    """A refusal is a sentence about the parameter that is in the way, which it names apart."""
    reader = Reader(tokenizer=ByteTokenizer(), model=MODEL, most_tokens=100)
    with pytest.raises(BadRequestError) as told:
        reader.chat(json.dumps({"model": MODEL, "messages": [MESSAGE]} | fields).encode())
    assert told.value.param == param
    assert says in str(told.value)
    assert "$" not in str(told.value)
    assert "`" not in str(told.value)


def test_no_tool_calls_are_no_tool_calls():
    """A turn that is sent back with an empty list of calls, or null, is a turn."""
    reader = Reader(tokenizer=ByteTokenizer(), model=MODEL, most_tokens=100)
    for calls in ([], None):
        turn = {"role": "assistant", "content": "x", "tool_calls": calls}
        reader.chat(json.dumps({"model": MODEL, "messages": [MESSAGE, turn]}).encode())


@pytest.fixture(scope="module")
def api(open_api):
    with open_api() as opened:
        yield opened


@pytest.fixture(scope="module")
def open_to_all(open_api):
    """A server without a key."""
    with open_api(address={"token": None}) as opened:
        yield opened


def test_what_is_not_there_says_what_is(api):
    """An unknown path is 404 and a wrong method 405, both in JSON with the calls that there are."""
    for method, path, status in (("POST", "/v1/responses", 404), ("POST", "/v1/embeddings", 404),
                                 ("GET", "/", 404), ("GET", "/v1/chat/completions", 405)):  # fmt: skip
        answer = httpx.request(method, api.url + path)
        assert answer.status_code == status
        says = answer.json()["error"]["message"]
        assert says.startswith(f"there is no {method} {path} here; there are ")
        assert "POST /v1/chat/completions" in says
        assert "GET /v1/models" in says
    with api.client() as client, pytest.raises(openai.NotFoundError, match="POST /v1/completions"):
        client.embeddings.create(model=MODEL, input="x")


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("localhost", True), ("LOCALHOST:8000", True), ("127.0.0.1:1", True), ("127.9.9.9", True),
        ("[::1]:80", True), ("evil.example", False), ("evil.example:8000", False), ("localhost.evil", False),
        ("127.0.0.1.evil.example", False), ("10.0.0.1", False), ("", False), ("[::1", False),
    ],
)  # fmt: skip
def test_without_a_key_other_hosts_are_refused(api, open_to_all, host, is_served):
    """A page whose name was given a loopback address (DNS rebinding) can neither read nor ask anything."""
    headers = {"Host": host}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    answers = [
        httpx.get(f"{open_to_all.url}/v1/models", headers=headers),
        httpx.get(f"{open_to_all.url}/metrics", headers=headers),
        httpx.post(f"{open_to_all.url}/v1/completions", json=body, headers=headers, timeout=60),
        httpx.get(f"{api.url}/metrics", headers=headers),  # open to this machine, with a key or without
    ]
    assert [answer.status_code for answer in answers] == [200 if is_served else 403] * 4
    if not is_served:
        assert answers[0].json()["error"]["message"].startswith(f"the request is for the host '{host}'; without")
    keyed = headers | {"Authorization": f"Bearer {api.token}"}
    for path in ("/v1/models", "/metrics"):
        assert httpx.get(api.url + path, headers=keyed).status_code == 200


@pytest.mark.parametrize(
    ("kind", "is_served"),
    [
        ("application/json", True), ("Application/JSON; charset=utf-8", True), ("text/plain", False),
        ("text/plain;application/json", False), ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=x", False), (None, False),
    ],
)  # fmt: skip
def test_without_a_key_bodies_are_json(api, open_to_all, kind, is_served):
    """What any page may send without asking is refused where there is no key; with one, curl is served."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(f"{open_to_all.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == (200 if is_served else 415)
    if not is_served:
        assert "application/json is required" in answer.json()["error"]["message"]
    headers["Authorization"] = f"Bearer {api.token}"
    keyed = httpx.post(f"{api.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert keyed.status_code == 200


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("decode-0 did not start: device_tokens is 10: its KVCache takes 3 GB",
         "decode-0 did not start: --device-tokens is 10: its KVCache takes 3 GB"),
        ("ssd_dir is None and ssd_tokens 4; give both", "--ssd-dir is None and --ssd-tokens 4; give both"),
        ("LiveOptions.threads is 0; PrefillPool.cache_tokens.", "--threads is 0; --cache-tokens."),
        ("the model and its pool, seed and port", "the model and its pool, seed and port"),
        ("the longest context (max_model_len)", "the longest context (--max-model-len)"),
        ("/data/cache_tokens/x and --device-tokens", "/data/cache_tokens/x and --device-tokens"),
        ("chunk_tokens, pack_tokens, max_requests and prefill_nodes",
         "--chunk-tokens, --pack-tokens, --max-requests and --prefill-nodes"),
        ("prefill_group stays", "prefill_group stays"),
    ],
)  # fmt: skip
def test_refusals_name_options(sentence, shown):
    """Users of the command line read the names of options, not of fields."""
    import inspect

    assert by_option(sentence, inspect.signature(serve).parameters) == shown


class NoProcesses:
    """A launcher that may not be asked for any."""

    def launch(self, *_):
        raise AssertionError("a process was started")

    def keep_spares(self):
        raise AssertionError("a process was started")

    def close(self):
        pass


def test_an_ssd_that_cannot_be_used_is_refused_before_a_model_is_loaded(believed, tmp_path):
    """A folder in use is named with its process, and a full disk with the bytes that are wanted and free."""
    size = {"ssd_dir": str(tmp_path), "ssd_tokens": 256, "prefill_nodes": 2}

    def start(**changes):
        spec, options = flat.live(model=MODEL, device="cpu", **size | changes)
        LiveCluster(spec, options, model=believed, launcher=NoProcesses()).__enter__()

    used = SsdBackend(tmp_path / "prefill-1", 2**16, fingerprint=b"f")
    with contextlib.closing(used), pytest.raises(WorkerError, match=r"/prefill-1 is open in process \d+"):
        start()
    with pytest.raises(WorkerError, match=r"needs \d{13,} more bytes for the ssd_tokens \d+ of 2 .* \d+ are free"):
        start(ssd_tokens=10**12)
    with pytest.raises(WorkerError, match="/proc/nowhere"):
        start(ssd_dir="/proc/nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerError, match=str(tmp_path / "file")):
        start(ssd_dir=str(tmp_path / "file"))


def test_an_error_of_storage_is_a_sentence(monkeypatch, capfd):
    """A worker that cannot use its storage tells the cluster why, without a traceback."""
    said = []

    class Pool:
        def send(self, message):
            said.append(message)

    monkeypatch.setattr(worker_process.os, "_exit", said.append)
    worker_process._fail(Pool(), StorageFullError("no room"))
    assert said == [b"no room", 1]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]", "::1", "[::1]", "localhost"])
def test_where_a_server_listens(host):
    """Addresses of both families are accepted, with brackets and without; the URL leads there."""
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
    listener, url = listen(host, 0)
    with listener:
        named = httpx.URL(url)
        socket.create_connection((named.host.strip("[]"), named.port)).close()


@pytest.mark.parametrize("host", ["nowhere.invalid", "256.1.1.1", "[::1", "x" * 300, ""])
def test_where_no_server_can_listen(host):
    """What is no address here is refused with the address and the reason."""
    with pytest.raises(OSError, match=r"cannot listen at '.*', port 0: ."):
        listen(host, 0)


def test_unknown_commands_are_not_dropped(believed):
    """What the coordinator asks and a live cluster cannot do is an error, not nothing."""
    quiet = QuietCluster(believed)
    carry_out(events.StartDecode(events.Attempt(0, 1), "decode-0", 0, True), quiet.runtime)
    with pytest.raises(AssertionError, match="unreachable, but got: <object"):
        carry_out(object(), quiet.runtime)


@pytest.mark.parametrize("gone", ["prefill-0", "decode-0"])
def test_waiting_for_workers_ends(believed, gone):
    """A request that no worker can serve fails after the time that it may wait, whatever it has so far."""
    quiet = QuietCluster(believed, worker_timeout_s=3.0)
    placed = quiet.submit(np.array([1, 2, 3], dtype=np.int32))
    quiet.take_down(gone)
    waiting = quiet.submit(np.array([1, 2, 3], dtype=np.int32))
    quiet.runtime._zero_s -= 2.5  # time passes
    quiet.runtime._time_passes(2.5)
    assert (placed.end, waiting.end) == (None, None)
    late = quiet.submit(np.array([1, 2, 3], dtype=np.int32))
    quiet.runtime._zero_s -= 1.0
    quiet.runtime._time_passes(1.0)
    for stream in (placed, waiting):
        assert isinstance(stream.end.error, FailedError)
        assert "one of each did not come up within 3 s" in str(stream.end.error)
        assert stream.end.error.retry_after_s > 0
    assert late.end is None
    quiet.bring_up(gone)
    quiet.runtime._time_passes(100.0)
    assert late.end is None
    assert quiet.attempt(late).n == 1


def test_a_wait_that_began_anew_lasts_as_long(believed):
    """A worker that came and went in the meantime does not shorten the wait after it."""
    quiet = QuietCluster(believed, worker_timeout_s=3.0)
    quiet.take_down("decode-0")
    stream = quiet.submit(np.array([1, 2, 3], dtype=np.int32))
    quiet.runtime._zero_s -= 2.0
    quiet.runtime._time_passes(2.0)
    quiet.bring_up("decode-0")
    quiet.take_down("decode-0")
    quiet.runtime._zero_s -= 2.0
    quiet.runtime._time_passes(2.0)
    assert stream.end is None
    quiet.runtime._zero_s -= 1.5
    quiet.runtime._time_passes(1.5)
    assert stream.end is not None


@pytest.mark.parametrize("stream", [False, True])
def test_clients_are_told_that_no_worker_came(open_api, monkeypatch, stream):
    """Where no worker can be started, a request is 503 with the time to come again, streamed or not."""
    with open_api(worker_timeout_s=0.5) as api, api.client() as client:

        def refuse(*_):
            raise OSError("no process")

        monkeypatch.setattr(api.runtime.supervisor._launcher, "launch", refuse)
        api.loop.call_soon_threadsafe(api.runtime.supervisor.kill, "decode-0")
        deadline_s = time.monotonic() + 60
        while httpx.get(f"{api.url}/health").status_code == 200 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match=r"did not come up within 0\.5 s") as told:
            client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert told.value.status_code == 503
        assert int(told.value.response.headers["retry-after"]) >= 1
        monkeypatch.undo()


def test_connections_send_each_part_of_an_answer_at_once():
    """What the server accepts does not wait for acknowledgements (Nagle): asyncio alone would leave that on."""
    listener, _ = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
