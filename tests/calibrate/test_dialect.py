"""How a server is asked is learnt from its answers; what is no answer is one sentence."""

import pytest
from openai_double import opened

from mooncake_lab.calibrate import CalibrationError, HttpServer, Inquiry
from mooncake_lab.calibrate.dialect import spread_times
from mooncake_lab.calibrate.observations import random_tokens


def ask(double, tokens=100, output_tokens=6, **settings):
    """One request to a server whose dialect was learnt."""
    server = HttpServer(double.url, **settings)
    ((reply,),) = server.replies([[Inquiry(random_tokens(tokens, 1), output_tokens)]], lambda _: None)
    return server, reply


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_token_ids_are_sent_as_they_are(path):
    """A server that takes token ids gets them, with every option; a URL may end in /v1."""
    with opened() as double:
        double.url += path
        server, reply = ask(double)
        assert server.dialect.form == "token ids"
        assert double.bodies[-1]["prompt"] == random_tokens(100, 1).tolist()
        assert (double.bodies[-1]["min_tokens"], double.bodies[-1]["ignore_eos"]) == (6, True)
    assert (reply.prompt_tokens, len(reply.times_s), reply.spread_tokens) == (100, 6, 0)
    assert list(reply.times_s) == sorted(reply.times_s)
    assert 0 <= reply.sent_s < reply.times_s[0]


@pytest.mark.parametrize(("forms", "form"), [(("text", "chat"), "text"), (("chat",), "chat")])
def test_lengths_of_text_are_learnt(forms, form):
    """A server that takes only text gets one of about as many tokens; how many they are it says itself."""
    with opened(forms=forms, tokens_a_word=3) as double:
        server, reply = ask(double)
        assert server.dialect.form == form
        assert (server.dialect.tokens_per_word, server.dialect.base_tokens) == (3, 1)
    assert reply.prompt_tokens == pytest.approx(100, abs=3)


def test_prompts_that_begin_alike_do_so_as_texts():
    """Of two prompts with a common beginning the texts have it too."""
    with opened(forms=("text",), tokens_a_word=3) as double:
        server = HttpServer(double.url)
        one, other = random_tokens(120, 1), random_tokens(120, 2)
        other[:60] = one[:60]
        texts = [server.dialect._text(Inquiry(tokens, 1)).split() for tokens in (one, other)]
    assert texts[0][:20] == texts[1][:20]
    assert texts[0][21:] != texts[1][21:]


@pytest.mark.parametrize("options", [(), ("stream_options",), ("min_tokens", "ignore_eos")])
def test_options_that_a_server_refuses_are_left_out(options):
    """What it does not know is not sent again."""
    with opened(options=options) as double:
        ask(double)
        sent = set(double.bodies[-1]) - {"model", "prompt", "max_tokens", "temperature", "stream"}
    assert sent == set(options)


def test_several_tokens_of_an_event_are_spread_and_marked():
    """Of three tokens an event, the first comes with the first event, and the rest at even distances."""
    with opened(tokens_an_event=3) as double:
        _, reply = ask(double, output_tokens=9)
    assert (len(reply.times_s), reply.spread_tokens) == (9, 9)
    times_s, spread = spread_times([1.0, 2.0, 5.0], [2, 1, 3])
    assert times_s == pytest.approx((1.0, 1.5, 2.0, 3.0, 4.0, 5.0))
    assert spread == 6


def test_without_usage_token_ids_have_known_lengths():
    """A server that counts nothing can be calibrated if it takes token ids; each event is a token."""
    with opened(says_usage=False, options=()) as double:
        _, reply = ask(double)
    assert (reply.prompt_tokens, len(reply.times_s)) == (100, 6)


def test_tokens_without_a_text_came_with_the_last_event():
    """An answer of special tokens or of parts of a character is as long as its usage says."""
    with opened(says_text=False, options=("stream_options",)) as double:
        _, reply = ask(double)
    assert (len(reply.times_s), reply.spread_tokens) == (6, 6)


def test_a_connection_that_the_server_has_closed_is_opened_again():
    """A server that closes a connection after each answer, without saying so, gets each request once."""
    with opened(keeps_connections=False) as double:
        server = HttpServer(double.url)
        asked = len(double.bodies)
        lane = [Inquiry(random_tokens(20, k), 3) for k in range(5)]
        (replies,) = server.replies([lane], lambda _: None)
        assert len(double.bodies) == asked + len(lane)
    assert [(reply.failure, len(reply.times_s)) for reply in replies] == [(None, 3)] * len(lane)


FAULTS = {
    "garbage": "cannot be talked to",
    "no json": "no JSON",
    "list": "an object with choices is needed",
    "500": "status 500 .*Internal Server Error",
    "stall": "sent nothing for 1 s",
    "drip": "did not end an answer within 2 s",
    "nothing": "without any token",
    "error": "out of memory",
    "html": "text/event-stream is needed",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("faults_from", [0, 1])
def test_what_is_no_answer_is_one_sentence(fault, faults_from):
    """Whether the first completion goes wrong or a later one: the sentence names the server and what it did."""
    with opened(fault=fault, faults_from=faults_from) as double:
        says = FAULTS[fault]
        patience = {"stall": {"timeout_s": 1.0}, "drip": {"most_s": 2.0}}.get(fault, {})
        if fault == "500" and faults_from:
            _, reply = ask(double, **patience)
            assert "status 500" in reply.failure
            return
        with pytest.raises(CalibrationError, match=says) as raised:
            ask(double, **patience)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_server_that_lists_nothing_is_asked_for_the_named_model():
    """`transformers serve` lists a model only once it was loaded."""
    with opened(lists=()) as double:
        assert HttpServer(double.url, model="double").dialect.model == "double"
        with pytest.raises(CalibrationError, match="serves no model None"):
            HttpServer(double.url)
