"""What an operator relies on: metrics, names, the log, and an event loop that is never busy with one client."""

import json
import re
import socket
import threading
import time

import httpx
import pytest
from quiet_workers import QuietCluster
from waiting_tokenizer import WaitingTokenizer

import mooncake_lab.serving.openai_api.server
from mooncake_lab.core import Arrived, read_log, write_log
from mooncake_lab.serving.messages import CacheUpdate
from mooncake_lab.serving.openai_api.app import _is_from_here
from mooncake_lab.serving.openai_api.parsing import BadRequestError, Reader
from mooncake_lab.serving.openai_api.telemetry import Telemetry
from mooncake_lab.serving.openai_api.tokenizer import ByteTokenizer

MODEL = "a name"


@pytest.fixture(scope="module")
def api(open_api):
    with open_api(address={"model": MODEL}) as opened:
        yield opened


def post(api, body, path="completions", scheme="Bearer"):
    headers = {"Authorization": f"{scheme} {api.token}"}
    return httpx.post(f"{api.url}/v1/{path}", json={"model": MODEL} | body, headers=headers, timeout=60)


def metric(api, name):
    lines = httpx.get(f"{api.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_the_name_of_the_model(api):
    """Answers and the list of models have the name that was given; the cluster's own is unknown."""
    assert post(api, {"prompt": "x", "max_tokens": 1}).json()["model"] == MODEL
    headers = {"Authorization": f"Bearer {api.token}"}
    assert httpx.get(f"{api.url}/v1/models", headers=headers).json()["data"][0]["id"] == MODEL
    assert post(api, {"model": "random:lab-tiny", "prompt": "x"}).status_code == 404


def test_the_scheme_has_no_case(api):
    """`bearer` is `Bearer`; another scheme is none."""
    for scheme in ("bearer", "BEARER"):
        assert post(api, {"prompt": "x", "max_tokens": 1}, scheme=scheme).status_code == 200
    answer = post(api, {"prompt": "x", "max_tokens": 1}, scheme="Basic")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_ipv6_loopback(open_api):
    """At ::1 the URL has brackets, and a client that uses it is served and is on this machine."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with open_api(address={"model": MODEL, "host": "::1"}) as api:
        assert re.fullmatch(r"http://\[::1\]:\d+", api.url)
        assert post(api, {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert httpx.get(f"{api.url}/metrics").status_code == 200
        far = {"X-Forwarded-For": "10.0.0.1"}
        assert httpx.get(f"{api.url}/metrics", headers=far).status_code == 401


class Asked:
    """A request from some address."""

    def __init__(self, host):
        self.client = None if host is None else type("Client", (), {"host": host})


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False), ("", False), (None, False), ("localhost.evil", False),
    ],
)  # fmt: skip
def test_who_is_here(host, is_here):
    """Loopback addresses are this machine, of either family."""
    assert _is_from_here(Asked(host)) == is_here


def test_metrics_are_open_to_this_machine_alone(api):
    """Prometheus on the same machine needs no token; who comes through a proxy from elsewhere does."""
    assert httpx.get(f"{api.url}/metrics").status_code == 200
    far = {"X-Forwarded-For": "10.0.0.1"}
    assert httpx.get(f"{api.url}/metrics", headers=far).status_code == 401
    knows = far | {"Authorization": f"Bearer {api.token}"}
    assert httpx.get(f"{api.url}/metrics", headers=knows).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_ttft_is_the_clients(api, monkeypatch, stream):
    """The time to first token includes reading and tokenising: at least what the tokenizer slept."""
    slept_s = 0.3
    encode = ByteTokenizer.encode

    def slow(self, text):
        time.sleep(slept_s)
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", slow)
    before = {name: metric(api, name) for name in ("mooncake_ttft_seconds_sum", "mooncake_ttft_seconds_count")}
    assert post(api, {"prompt": "x", "max_tokens": 2, "stream": stream}).status_code == 200
    after = {name: metric(api, name) for name in before}
    assert after["mooncake_ttft_seconds_count"] == before["mooncake_ttft_seconds_count"] + 1
    assert after["mooncake_ttft_seconds_sum"] - before["mooncake_ttft_seconds_sum"] >= slept_s


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("layout", [{}, {"coupled_nodes": 1}])
def test_cached_tokens(open_api, layout):
    """A prompt that was served before is reused but for its last block, and the usage says so, streamed or not."""
    with open_api(address={"model": MODEL}, **layout) as api:
        prompt = list(range(100))
        ask = {"prompt": prompt, "max_tokens": 3, "temperature": 0}
        assert cached(post(api, ask).json()["usage"]) == 0
        assert cached(post(api, ask).json()["usage"]) == 96
        assert cached(post(api, ask | {"prompt": prompt[:40] + [7] * 60}).json()["usage"]) == 32
        text = post(api, ask | {"stream": True, "stream_options": {"include_usage": True}}).text
        last = json.loads([line for line in text.splitlines() if line.startswith("data: {")][-1][6:])
        assert cached(last["usage"]) == 96


def test_the_log_has_names_and_the_time(open_api, tmp_path):
    """The log tells the completion of each request that arrived, and when by the clock on the wall."""
    with open_api(address={"model": MODEL}) as api:
        before_s = time.time()
        made = post(api, {"prompt": ["x", "y"], "max_tokens": 1}).json()
        after_s = time.time()
    heard = api.log
    arrived = [record for record in heard if isinstance(record, Arrived)]
    assert [record.completion_id for record in arrived] == [made["id"]] * 2
    assert all(before_s <= record.wall_s <= after_s for record in arrived)
    write_log(tmp_path / "log", heard)
    assert list(read_log(tmp_path / "log")) == heard


def test_damage_is_counted(believed):
    """Blocks that workers find damaged are summed over all they say, and no page counts one twice."""
    quiet, telemetry = QuietCluster(believed), Telemetry()

    def counted():
        runtime = quiet.runtime
        page = telemetry.page(runtime.workers, runtime.damaged_blocks, len(runtime.streams)).decode().splitlines()
        return [line for line in page if line.startswith("mooncake_damaged_blocks_total")]

    assert counted() == []
    quiet.receive("prefill-0", CacheUpdate(damaged_blocks=2))
    for _ in range(2):
        assert counted() == ['mooncake_damaged_blocks_total{worker="prefill-0"} 2.0']
    quiet.take_down("prefill-0")
    quiet.bring_up("prefill-0")
    quiet.receive("prefill-0", CacheUpdate(damaged_blocks=1))
    assert counted() == ['mooncake_damaged_blocks_total{worker="prefill-0"} 3.0']


def test_tokenising_stops_nobody(open_api, monkeypatch):
    """While one prompt is tokenised the loop goes on: other requests are served, and workers are heard."""
    slow = WaitingTokenizer()
    monkeypatch.setattr(mooncake_lab.serving.openai_api.server, "tokenizer_of", lambda _: slow)
    with open_api(address={"model": MODEL}) as api:
        found = []
        ask = {"messages": [{"role": "user", "content": "wait" + "x" * 4000}], "max_tokens": 2}
        asking = threading.Thread(target=lambda: found.append(post(api, ask, "chat/completions")))
        asking.start()
        assert slow.waiting.acquire(timeout=60)
        heard_s = {name: link.heard_s for name, link in api.runtime.supervisor.connections.items()}
        made = post(api, {"prompt": "quick", "max_tokens": 20, "ignore_eos": True})
        assert made.json()["usage"]["completion_tokens"] == 20
        assert httpx.get(f"{api.url}/health").json()["status"] == "ok"
        assert all(link.heard_s > heard_s[name] for name, link in api.runtime.supervisor.connections.items())
        assert found == []
        slow.go_on.set()
        asking.join()
        assert found[0].json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("most_a_token", [1, 7])
def test_what_cannot_fit_is_not_tokenised(most_a_token):
    """A text of more characters than the window can hold is refused by its length, one that might fit is read."""
    slow = WaitingTokenizer(most_characters_a_token=most_a_token)
    reader = Reader(tokenizer=slow, model="m", most_tokens=50)
    most = 50 * most_a_token
    for characters in (most + 1, 10**6):
        text = "x" * characters
        parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        for content in (text, parts):
            body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            with pytest.raises(
                BadRequestError, match=f"^{characters} characters; 50 tokens fit, which are {most} "
            ) as told:
                reader.chat(json.dumps(body).encode())
            assert told.value.param == "messages"
        with pytest.raises(BadRequestError, match=f"{characters} characters"):
            reader.completion(json.dumps({"model": "m", "prompt": ["y", text]}).encode())
    with pytest.raises(BadRequestError, match="a prompt of 51 tokens; no more than 50 fit"):
        reader.completion(json.dumps({"model": "m", "prompt": [1] * 51}).encode())
    with pytest.raises(BadRequestError, match="51 messages; no more than 50 tokens fit"):
        reader.chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": ""}] * 51}).encode())
    assert slow.encoded == []
    reader.completion(json.dumps({"model": "m", "prompt": "x" * most}).encode())
    assert [len(text) for text in slow.encoded] == [most]
