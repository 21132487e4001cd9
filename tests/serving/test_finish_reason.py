"""The last token of an answer comes with the reason of its end, as from other servers."""

import json

import httpx
import pytest

from mooncake_lab.core import Finished
from mooncake_lab.serving.messages import SamplingParams
from mooncake_lab.serving.openai_api.streaming import Choice, Writer, pieces
from mooncake_lab.serving.openai_api.tokenizer import ByteTokenizer
from mooncake_lab.serving.stream import End, RequestStream

MODEL = "random:lab-tiny"
EXTRA = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def api(open_api):
    with open_api() as opened:
        yield opened


def events(api, path="completions", **body):
    """The events of a stream, without the last word."""
    headers = {"Authorization": f"Bearer {api.token}"}
    asked = {"model": MODEL, "stream": True, "temperature": 0} | EXTRA | body
    text = httpx.post(f"{api.url}/v1/{path}", json=asked, headers=headers, timeout=60).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_the_last_token_has_the_reason(api, usage):
    """As many events as tokens, each with one, and the reason with the last; only the usage comes behind."""
    found = events(api, prompt="hello", max_tokens=8, stream_options=usage)
    if usage:
        closing = found.pop()
        assert (closing["choices"], closing["usage"]["completion_tokens"]) == ([], 8)
    choices = [event["choices"][0] for event in found]
    assert [len(choice["token_ids"]) for choice in choices] == [1] * 8
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["length"]
    finished = [record for record in api.log if isinstance(record, Finished)]
    assert finished[-1].output_tokens == 8
    assert not api.runtime.streams


def test_a_chat_ends_with_its_last_token(api):
    """The same in a chat, with the official client, and the text is that of the whole answer."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    with api.client() as client:
        whole = client.chat.completions.create(**asked, extra_body=EXTRA)
        parts = list(client.chat.completions.create(**asked, stream=True, extra_body=EXTRA))
    assert [part.choices[0].finish_reason for part in parts] == [None] * 5 + ["length"]
    assert "".join(part.choices[0].delta.content for part in parts) == whole.choices[0].message.content


def test_several_prompts_end_each_with_its_last_token(api):
    """The reason of one answer stands with its own last token, and nowhere before."""
    found = events(api, prompt=["a", "bc", [7]], max_tokens=5)
    for index in range(3):
        reasons = [
            choice["finish_reason"] for event in found for choice in event["choices"] if choice["index"] == index
        ]
        assert reasons == [None] * 4 + ["length"]


def answers(tokens, *, end="length", stops=(), most=None, end_tokens=(), least=0):
    """What a client gets of an answer with these tokens: text, tokens and reason of each piece."""
    import asyncio

    class Cluster:
        def end_tokens(self):
            return end_tokens

        def stop(self, stream):
            stream.close(End("stop"))

    async def collect():
        params = SamplingParams(max_new_tokens=most or len(tokens))
        stream = RequestStream(request_id=0, prompt=None, params=params)
        for token in tokens:
            stream.show(token)
        stream.close(End(end))
        choice = Choice(index=0, stream=stream, writer=Writer(ByteTokenizer().stream(), stops, least_tokens=least))
        return [(piece.text, piece.tokens, piece.finish_reason) async for piece in pieces(Cluster(), [choice])]

    return asyncio.run(collect())


def test_text_that_was_held_back_comes_with_the_last_token():
    """What might have become a stop sequence, or a character, is shown with the last token."""
    found = answers(b"abSTO", stops=("STOP",))
    assert found == [
        ("a", (97,), None), ("b", (98,), None), ("", (83,), None), ("", (84,), None), ("STO", (79,), "length"),
    ]  # fmt: skip
    assert answers("aé".encode()[:2]) == [("a", (97,), None), ("\ufffd", (0xC3,), "length")]


def test_a_stop_sequence_ends_with_its_last_token():
    """The token that completes a stop sequence has the reason, also where it is the last there may be."""
    for most in (None, 100):
        assert answers(b"abX", stops=("bX",), most=most) == [
            ("a", (97,), None),
            ("", (98,), None),
            ("", (88,), "stop"),
        ]


def test_an_end_token_has_the_reason():
    """The token with which the model ends its answer has the reason `stop`."""
    assert answers(b"ab", end="end_token", most=9, end_tokens=(98,)) == [("a", (97,), None), ("b", (98,), "stop")]


def test_an_end_that_no_token_tells_is_told_behind():
    """Where an answer ends for another reason, a last piece without a token has it."""
    assert answers(b"a", end="stop", most=9) == [("a", (97,), None), ("", (), "stop")]
