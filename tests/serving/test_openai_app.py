"""The API, as the official client sees it."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest

import mooncake_lab.serving.openai_api.app
from mooncake_lab.calibrate.settings import learn_settings, read_metrics
from mooncake_lab.conductor import AdmitAll, Rejection, WithinSLO
from mooncake_lab.core import SLO
from mooncake_lab.perf import DecodeLatency
from mooncake_lab.serving import Pacer
from mooncake_lab.serving.openai_api.app import MOST_BODY_BYTES
from mooncake_lab.serving.openai_api.streaming import Writer
from mooncake_lab.serving.openai_api.tokenizer import ByteTokenizer

MODEL = "random:lab-tiny"


@pytest.fixture(scope="module")
def api(open_api):
    with open_api() as opened:
        yield opened


@pytest.fixture(scope="module")
def client(api):
    with api.client() as one:
        yield one


EXTRA = {"return_token_ids": True, "ignore_eos": True}


def test_completion(client, reference):
    """A completion has the reference engine's tokens, for text, for token ids, and for several prompts."""
    one, two = reference([list(b"hello"), [1, 2, 3]], 8)
    made = client.completions.create(model=MODEL, prompt="hello", max_tokens=8, temperature=0, extra_body=EXTRA)
    assert made.choices[0].token_ids == list(one)
    assert made.choices[0].finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 8)
    both = client.completions.create(
        model=MODEL, prompt=[list(b"hello"), [1, 2, 3]], max_tokens=8, temperature=0, extra_body=EXTRA
    )
    assert [choice.token_ids for choice in both.choices] == [list(one), list(two)]


def test_streaming(client, reference):
    """A stream has the same text and tokens as the whole answer, and says its usage if asked."""
    whole = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=0)
    parts = list(
        client.completions.create(
            model=MODEL, prompt="hello", max_tokens=20, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body=EXTRA,
        )
    )  # fmt: skip
    choices = [choice for part in parts for choice in part.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [t for choice in choices for t in choice.token_ids] == list(reference([list(b"hello")], 20)[0])
    assert parts[-1].usage.completion_tokens == 20


def test_chat(client):
    """A conversation is answered, whole and streamed, with a seed equally each time."""
    ask = {
        "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 7,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == "length"


def ended(api, how):
    """How many requests ended so, as Prometheus is told."""
    page = httpx.get(f"{api.url}/metrics", headers={"Authorization": f"Bearer {api.token}"}).text
    counts = [line.split()[-1] for line in page.splitlines() if f'requests_ended_total{{how="{how}"}}' in line]
    return float(counts[0]) if counts else 0.0


def test_stop_sequence(api, client):
    """Nothing is shown from a stop sequence on, the reason says so, and the request counts as finished."""
    text = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=0).choices[0].text
    stop = text[3:5]
    left = ended(api, "client")
    finished = ended(api, "finished")
    made = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=0, stop=stop)
    assert made.choices[0].text == text[: text.find(stop)]
    assert made.choices[0].finish_reason == "stop"
    assert ended(api, "client") == left
    assert ended(api, "finished") == finished + 1
    assert not api.runtime.streams


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": []}, "prompts"),
        ({"prompt": [1, 999]}, "999"),
        ({"max_tokens": 10**6}, "too many"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_bad_requests(client, changes, says):
    """What cannot be served is refused with 400 and the offending value."""
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(**({"model": MODEL, "prompt": "x", "max_tokens": 2} | changes))


def test_a_prompt_and_its_answer_fill_the_model_len(open_api):
    """The limit is for both together: an answer ends there, and one token more is refused."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    with open_api(device_tokens=64) as api, api.client() as one:

        def tokens(prompt_tokens, **limit):
            made = one.completions.create(
                model=MODEL, prompt=[1] * prompt_tokens, temperature=0, extra_body=extra, **limit
            )
            return len(made.choices[0].token_ids)

        assert tokens(40, max_tokens=24) == 24
        assert tokens(63, max_tokens=1) == 1
        for prompt_tokens, most in ((40, 25), (64, 1)):
            with pytest.raises(openai.BadRequestError, match="together they may be 64"):
                tokens(prompt_tokens, max_tokens=most)
        chat = one.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=0, extra_body=extra
        )
        assert chat.usage.total_tokens == 64


def test_strangers(api):
    """Without the token nobody gets in, but health is everybody's; an unknown model is not found."""
    with api.client("wrong") as stranger, pytest.raises(openai.AuthenticationError, match="token"):
        stranger.models.list()
    assert httpx.get(f"{api.url}/health").json()["status"] == "ok"
    with api.client() as friend, pytest.raises(openai.NotFoundError, match="serves"):
        friend.completions.create(model="gpt-4", prompt="x")


def test_disconnect_cancels(api):
    """When a client goes away in the middle of a stream, its request is withdrawn from the cluster."""
    with api.client() as one:
        stream = one.completions.create(model=MODEL, prompt="hello", max_tokens=4000, stream=True, temperature=0)
        next(iter(stream))
        assert len(api.runtime.streams) == 1
        stream.close()
    deadline_s = time.monotonic() + 20
    while api.runtime.streams and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not api.runtime.streams
    assert all(not worker.decode.contexts for worker in api.runtime.workers)


def test_rejection(open_api):
    """What would miss its SLO is refused with 429 and Retry-After."""
    with open_api(admission=WithinSLO(), slo=SLO(ttft_s=1e-6)) as api, api.client() as one:
        with pytest.raises(openai.RateLimitError, match="expected TTFT") as raised:
            one.completions.create(model=MODEL, prompt="x")
        assert int(raised.value.response.headers["retry-after"]) >= 1


class RefuseLate(AdmitAll):
    """A policy that lets every prompt be computed and nothing be decoded."""

    def double_check(self, request, decode, *, estimate, slo):
        """No."""
        del decode, estimate, slo
        return Rejection(request_id=request.id, stage="decode", reason="refused late")


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_rejection_is_429_too(open_api, stream):
    """A request that is refused after its prefill has not begun for its client, streamed or not."""
    with open_api(admission=RefuseLate()) as api, api.client() as one:
        with pytest.raises(openai.RateLimitError, match="refused late") as raised:
            one.completions.create(model=MODEL, prompt="x", stream=stream)
        assert int(raised.value.response.headers["retry-after"]) >= 1
        assert not api.runtime.streams


def test_a_disconnect_before_the_first_token_cancels(api):
    """A client that goes away while its prompt waits is noticed, streamed or not."""
    for stream in (True, False):
        body = {"model": MODEL, "prompt": [1] * 4000, "max_tokens": 4000, "stream": stream}
        headers = {"Authorization": f"Bearer {api.token}"}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{api.url}/v1/completions", json=body, headers=headers, timeout=0.01)
        deadline_s = time.monotonic() + 20
        while api.runtime.streams and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not api.runtime.streams


def test_what_is_too_much_is_refused(open_api):
    """One request more than allowed is 429 with Retry-After; those under way are not disturbed."""
    with open_api(max_inflight_requests=1) as api, api.client() as one:
        with one.completions.create(
            model=MODEL, prompt="x", max_tokens=3000, stream=True, extra_body=EXTRA
        ) as first:
            news = iter(first)
            next(news)
            with pytest.raises(openai.RateLimitError, match="1 requests are in flight; allowed are 1") as raised:
                one.completions.create(model=MODEL, prompt="y", max_tokens=1)
            assert int(raised.value.response.headers["retry-after"]) >= 1
            assert next(news).choices[0].token_ids
        deadline_s = time.monotonic() + 20
        while api.runtime.streams and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert one.completions.create(model=MODEL, prompt="y", max_tokens=1).usage.completion_tokens == 1


def test_memory_is_bounded_by_tokens(open_api, believed):
    """What may come to more KVCache than a few engines full is refused; alone, anything that fits is served."""
    pace = Pacer.of(replace(believed, decode=DecodeLatency(2e-2, 0.0, 0.0)))  # two must still run at the third
    with open_api(device_tokens=256, max_kv_oversubscription=2.0, pacer=pace) as api, api.client() as one:
        asked = {"model": MODEL, "prompt": [1] * 50, "max_tokens": 150, "stream": True, "extra_body": EXTRA}
        with contextlib.ExitStack() as streams:
            for _ in range(2):
                next(iter(streams.enter_context(one.completions.create(**asked))))
            with pytest.raises(
                openai.RateLimitError, match="need 400 tokens of KVCache, and this one 200; allowed are 512"
            ):
                one.completions.create(**asked | {"stream": False})


def test_nobody_is_let_in_after_the_last_call(open_api):
    """A request that comes when all others have been dismissed is 503, not begun and cut off."""
    with open_api() as closing, closing.client() as one:
        closing.runtime.shut()
        with pytest.raises(openai.InternalServerError, match="the cluster is shut down") as raised:
            one.completions.create(model=MODEL, prompt="x")
        assert raised.value.status_code == 503


def post(api, body, timeout=30):
    """A completion asked for with these bytes."""
    headers = {"Authorization": f"Bearer {api.token}", "Content-Type": "application/json"}
    return httpx.post(f"{api.url}/v1/completions", content=body, headers=headers, timeout=timeout)


def test_a_body_is_bounded(api, client, monkeypatch):
    """One that is too large is 413, too many at once are 429: both in JSON."""
    answer = post(api, b" " * (MOST_BODY_BYTES + 1))
    assert (answer.status_code, str(MOST_BODY_BYTES) in answer.json()["error"]["message"]) == (413, True)

    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as peer:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.token}\r\n"
        peer.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {MOST_BODY_BYTES + 1}\r\n\r\n".encode())
        assert peer.recv(2**12).startswith(b"HTTP/1.1 413 "), "it is refused before it is sent"

    monkeypatch.setattr(mooncake_lab.serving.openai_api.app, "MOST_RECEIVED_BYTES", 8)
    answer = post(api, b'{"model": 1}')
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "12 bytes are being received; allowed are 8" in answer.json()["error"]["message"]
    assert httpx.get(f"{api.url}/health").status_code == 200  # who watches the server is always let in
    monkeypatch.undo()
    assert client.completions.create(model=MODEL, prompt="y", max_tokens=1).usage.completion_tokens == 1


def test_a_body_counts_until_it_is_read(open_api, monkeypatch):
    """Bodies that wait for a thread that reads them count among those that are being received."""
    begun, going = threading.Event(), threading.Event()
    encode = ByteTokenizer.encode

    def wait(self, text):
        begun.set()
        assert going.wait(60)
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", wait)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    monkeypatch.setattr(mooncake_lab.serving.openai_api.app, "MOST_RECEIVED_BYTES", len(body))
    with open_api() as api, ThreadPoolExecutor(1) as executor:
        first = executor.submit(post, api, body)
        assert begun.wait(60)
        second = post(api, body)
        going.set()
        assert second.status_code == 429
        assert f"{2 * len(body)} bytes are being received" in second.json()["error"]["message"]
        assert first.result().status_code == 200
        assert post(api, body).status_code == 200


def test_what_does_not_end_in_time_is_told(open_api):
    """At shutdown a stream may go on for a while; then it ends with an error event, not in the middle."""
    with open_api() as api:
        api.server._drain_s = 0.3
        headers = {"Authorization": f"Bearer {api.token}"}
        asked = {"model": MODEL, "prompt": [1], "max_tokens": 8000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{api.url}/v1/completions", json=asked, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            api.server.should_exit = True
            said = [line for line in lines if line]
    assert len(said) > 1
    assert "the cluster is shut down" in said[-1]
    assert api.endings == [1]  # the operator is told how many are waited for
    assert not api.runtime.streams


def test_writer_never_shows_part_of_a_stop():
    """Whatever the cuts, the shown text ends where the first stop sequence begins."""
    text = "abcabdé stop here"
    for stops in (("abd",), ("é", "zz"), ("stop", "here"), ("never",)):
        writer = Writer(ByteTokenizer().stream(), stops)
        shown = ""
        for byte in text.encode():
            shown += writer.push(byte)
            if writer.is_stopped:
                break
        shown += writer.finish()
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        assert shown == text[: min(ends, default=len(text))]


def test_the_server_says_what_a_simulator_has_to_know(api):
    """/v1/models has the longest request by vLLM's name, and /metrics the settings of the workers."""
    headers = {"Authorization": f"Bearer {api.token}"}
    described = httpx.get(f"{api.url}/v1/models", headers=headers).json()["data"][0]
    assert described["max_model_len"] == api.runtime.max_model_len()
    settings, read = learn_settings(
        {}, read_metrics(httpx.get(f"{api.url}/metrics", headers=headers).text), described
    )
    assert settings.scheduler == "disaggregated"
    assert settings.kv_tokens == api.runtime.spec.pools[1].device_tokens
    assert settings.assumed == ()
    assert "max_num_seqs" in read


def test_a_reset_empties_the_prefix_cache(api):
    """POST /reset_prefix_cache: a prompt that was found is computed again; without the key it is refused."""
    headers = {"Authorization": f"Bearer {api.token}"}
    ask = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 1}

    def cached():
        usage = httpx.post(f"{api.url}/v1/completions", headers=headers, json=ask).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() == 63
    assert httpx.post(f"{api.url}/reset_prefix_cache").status_code == 401
    assert httpx.post(f"{api.url}/reset_prefix_cache", headers=headers).status_code == 200
    assert cached() == 0
