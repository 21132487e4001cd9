"""Bodies that load generators and client libraries send, as recorded, are accepted and served."""

import json
import tracemalloc

import httpx
import pytest

from mooncake_lab.serving.openai_api.neutral import HINTS, NEUTRAL
from mooncake_lab.serving.openai_api.parsing import BOUNDS, BadRequestError, Reader
from mooncake_lab.serving.openai_api.streaming import begin
from mooncake_lab.serving.openai_api.tokenizer import ByteTokenizer
from mooncake_lab.serving.stream import RejectedError, RequestStream

MODEL = "random:lab-tiny"
READER = Reader(tokenizer=ByteTokenizer(), model=MODEL, most_tokens=100)

COMPLETIONS = {
    # vllm bench serve --backend vllm, with and without --ignore-eos
    "vllm_bench": {
        "model": MODEL, "prompt": "abc", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 4,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
    },
    # AIPerf --extra-inputs min_tokens:4 --per-chunk-usage
    "aiperf": {
        "model": MODEL, "prompt": "abc", "max_tokens": 4, "min_tokens": 4, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    # evaluation harnesses, with everything switched off
    "harness": {
        "model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "n": 1, "echo": False, "suffix": None, "seed": -1,
        "logit_bias": {}, "top_k": -1, "top_p": 1, "min_p": 0.0, "stop": [], "user": "u", "stream": False,
    },
}  # fmt: skip
CHATS = {
    # vllm bench serve --backend openai-chat
    "vllm_bench_chat": {
        "model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}],
        "max_completion_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
    },
    # an agent framework's client with all defaults written out, and an answer of ours sent back
    "framework": {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "abc", "name": "me"},
            {
                "role": "assistant", "content": "d", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None,
            },
            {"role": "user", "content": "e"},
        ],
        "max_tokens": 4, "n": 1, "tools": None, "tool_choice": "none", "parallel_tool_calls": True, "store": False,
        "service_tier": "auto", "prompt_cache_key": "k", "reasoning_effort": "low", "metadata": {"a": "b"},
        "logprobs": False, "top_logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {},
        "response_format": {"type": "text"}, "functions": [], "modalities": ["text"], "stream": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def api(open_api):
    with open_api() as opened:
        yield opened


def ask(api, path, body):
    headers = {"Authorization": f"Bearer {api.token}"}
    return httpx.post(f"{api.url}/v1/{path}", json=body, headers=headers, timeout=60)


def events(answer):
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", body) for body in COMPLETIONS.values()]
    + [("chat/completions", body) for body in CHATS.values()],
    ids=[*COMPLETIONS, *CHATS],
)
def test_recorded_bodies_are_served(api, path, body):
    """Each recorded body has its answer, with as many tokens as were asked for, and its usage where asked for."""
    answer = ask(api, path, body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        assert answer.json()["usage"]["completion_tokens"] == 4
        return
    parts = events(answer)
    options = body.get("stream_options", {})
    if options.get("include_usage"):
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"]["completion_tokens"] == 4
    if options.get("continuous_usage_stats"):
        made = [part["usage"]["completion_tokens"] for part in parts]
        assert made == sorted(made)
        assert made[0] == 1
    elif options.get("include_usage"):
        assert [part["usage"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    else:
        assert not any("usage" in part for part in parts)


def chat(**fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]} | fields
    return READER.chat(json.dumps(body).encode())


def test_neutral_values_change_nothing():
    """Every neutral value and null of every option gives the request that leaves the option out."""
    plain = chat(seed=1)
    for name, values in NEUTRAL.items():
        for value in (None, *values):
            found = chat(seed=1, **{name: value})
            assert (found.params, found.stops) == (plain.params, plain.stops), name
    for name in HINTS:
        assert chat(seed=1, **{name: {"any": ["thing"]}}).params == plain.params


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_other_values_are_refused(name):
    """A value that asks for something says its option, the value and what is allowed."""
    with pytest.raises(BadRequestError, match=f'^{name} is "something", which .* allowed is .*null') as raised:
        chat(**{name: "something"})
    assert raised.value.param == name


def test_a_number_is_no_answer_to_a_question():
    """`logprobs: 0` asks for log probabilities although 0 equals false in Python, and `n: true` is no number."""
    for name, value in (("logprobs", 0), ("n", True), ("top_logprobs", False)):
        with pytest.raises(BadRequestError, match=f"{name} is"):
            chat(**{name: value})


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_numbers_are_bounded(name):
    """Both bounds are accepted; beyond them, and where a number is no number, the parameter is named."""
    for value in BOUNDS[name]:
        chat(**{name: value} | ({"max_tokens": 2**31 - 1} if name == "min_tokens" else {}))
    least, most = BOUNDS[name]
    for value in (least - 1, most + 1, 2**64):
        with pytest.raises(BadRequestError, match=f"^{name} is .+; allowed are {least} to {most}$") as raised:
            chat(**{name: value})
        assert raised.value.param == name
    with pytest.raises(BadRequestError, match=name):
        chat(**{name: "7"})


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "\xff\xfe", "prompt": "x"}',
        b'{"model": "m", "prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model": "m", "tools": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model": "random:lab-tiny", "user": "\xff", "prompt": 1}',
        b'{"model": "m", "temperature": 1e999}',
        b'{"model": "m", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "\\ud800", "prompt": "x"}',
        b"[1, 2]",
        b"\xff",
        b"",
    ],
)
def test_no_body_is_an_error_of_the_server(api, body):
    """What is no UTF-8, no JSON or nested too deep is 400, with a reason."""
    headers = {"Authorization": f"Bearer {api.token}"}
    for path in ("completions", "chat/completions"):
        answer = httpx.post(f"{api.url}/v1/{path}", content=body, headers=headers, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (b'"prompt": [' + b"1," * 400_000 + b"1]", "a list of 400001 items; 6400 tokens fit into all prompts"),
        (b'"prompt": [' + b"1," * 100 + b"1]", "a prompt of 101 tokens; no more than 100 fit"),
        (b'"prompt": [' + b"[1]," * 200 + b"[1]]", "201 prompts; allowed are 1 to 64"),
        (b'"prompt": [[1], 2]', "the token id 2 stands beside whole prompts; put it into a list of token ids"),
        (b'"prompt": "a", "tools": [' + b"[]," * 250_000 + b"[]]", "tools is"),
    ],
)
def test_what_has_too_many_items_is_refused_unread(fields, says):
    """A body of millions of items is refused before they are objects: all that is held are copies of its bytes."""
    body = b'{"model": "%s", %s}' % (MODEL.encode(), fields)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequestError, match=says):
            READER.completion(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 * len(body) + 50_000


def test_commas_in_texts_are_no_items():
    """Prompts of nothing but commas and escaped quotation marks are as long as other prompts."""
    prompts = [',"' * 50] * 64
    body = {"model": MODEL, "prompt": prompts}
    assert [len(prompt) for prompt in READER.completion(json.dumps(body).encode()).prompts] == [100] * 64
    with pytest.raises(BadRequestError, match="a list of 6465 items; 6400 tokens"):
        READER.completion(json.dumps(body | {"prompt": prompts + [1] * 6401}).encode())


def test_the_number_of_options_is_bounded():
    """A body has as many options as there could be, not millions."""
    with pytest.raises(BadRequestError, match=r"^the body has 302 options; allowed are 256$"):
        chat(**{f"option_{i}": None for i in range(300)})


def test_tools_that_were_called_are_not_ignored():
    """A conversation with tool calls would be answered as if there were none: it is refused."""
    with pytest.raises(BadRequestError, match="tool_calls"):
        chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}])


def test_least_more_than_most(api):
    """`min_tokens` above what the answer may have names both numbers."""
    answer = ask(api, "completions", {"model": MODEL, "prompt": "x", "max_tokens": 4, "min_tokens": 5})
    assert answer.status_code == 400
    assert "min_tokens is 5; this answer may have 0 to 4 tokens" in answer.json()["error"]["message"]


class Taking:
    """Takes the place of a cluster's runtime: takes so many prompts, and refuses the next."""

    def __init__(self, most=100):
        self.most, self.seeds, self.cancelled = most, [], []

    def max_model_len(self):
        return 100

    def submit(self, prompt, params, completion_id, **_):
        if len(self.seeds) == self.most:
            raise RejectedError("frontdoor", f"no room for {completion_id}", 1)
        self.seeds.append(params.seed)
        return RequestStream(request_id=len(self.seeds), prompt=prompt, params=params)

    def cancel(self, stream, reason):
        self.cancelled.append((stream.request_id, reason))


@pytest.mark.parametrize(("seed", "different"), [(None, 4), (7, 1)])
def test_equal_prompts_are_different_draws_unless_seeded(seed, different):
    """Several answers to one prompt are asked for as several prompts; a seed of the client's holds for each."""
    body = {"model": MODEL, "prompt": ["Once"] * 4, "temperature": 1.0, "seed": seed}
    runtime = Taking()
    begin(runtime, READER.completion(json.dumps(body).encode()), ByteTokenizer(), "id")
    assert len(set(runtime.seeds)) == different


def test_prompts_end_with_a_sibling_that_is_refused():
    """The log must not say that their client went away."""
    body = {"model": MODEL, "prompt": ["a", "b"]}
    runtime = Taking(most=1)
    with pytest.raises(RejectedError):
        begin(runtime, READER.completion(json.dumps(body).encode()), ByteTokenizer(), "id")
    assert runtime.cancelled == [(1, "another prompt of the request could not be served")]


def test_a_token_id_that_is_none_is_refused_with_those_that_are():
    """The message has the smallest and the largest of the prompt, and the range."""
    body = b'{"model": "%s", "prompt": [5, -3, 9]}' % MODEL.encode()
    with pytest.raises(BadRequestError, match="token ids from -3 to 9; allowed are 0 to 2147483647"):
        READER.completion(body)
