"""A recording of served traffic is a trace with the same prefixes, and says nothing of what they contain."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mooncake_lab.serving.recording
from mooncake_lab.cluster import events
from mooncake_lab.core import Finished, Prefilled, Rejected, Request, block_keys
from mooncake_lab.serving.openai_api.server import _recording
from mooncake_lab.serving.recording import TraceRecorder
from mooncake_lab.store.replay import replay
from mooncake_lab.workload import read_trace

BLOCK = 4
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12)


def arrived(number, tokens, *, at_s=0.0, session=None):
    """A request of these tokens."""
    keys = tuple(block_keys(np.array(tokens, np.int32), BLOCK))
    request = Request(
        id=number, arrival_s=at_s, input_tokens=len(tokens), block_keys=keys, block_size_tokens=BLOCK,
        session=session,
    )  # fmt: skip
    return events.RequestArrived(at_s=at_s, request=request)


def recorded(requests):
    """The lines of a recording of these events, each of which is answered at once with two tokens."""
    lines = []
    recorder = TraceRecorder(lines.append, lambda _: 0)
    for event in requests:
        recorder.note_event(event, event.at_s)
        recorder.note(Finished(at_s=event.at_s + 1, request_id=event.request.id, output_tokens=2))
    recorder.close()
    return lines


@given(PROMPTS)
def test_a_recording_has_the_prefixes_of_its_requests(prompts):
    """A cache finds as many blocks of each recorded prompt as of the prompt itself."""
    requests = [arrived(number, tokens) for number, tokens in enumerate(prompts)]
    lines = recorded(requests)
    assert [line["input_length"] for line in lines] == [len(tokens) for tokens in prompts]
    for capacity in (None, 3):
        found = replay([line["hash_ids"] for line in lines], "lru", capacity).prefix_hits_by_request
        asked = [event.request.block_keys for event in requests]
        assert found == replay(asked, "lru", capacity).prefix_hits_by_request


@given(PROMPTS)
def test_two_recordings_cannot_be_joined(prompts):
    """Equal requests have other block ids and other names of sessions in another recording."""
    requests = [arrived(number, tokens, session="one") for number, tokens in enumerate(prompts)]
    first, second = recorded(requests), recorded(requests)
    ids = [{key for line in lines for key in line["hash_ids"]} for lines in (first, second)]
    names = [{line["session_id"] for line in lines} for lines in (first, second)]
    assert not ids[0] & ids[1]
    assert not names[0] & names[1]
    assert [len(each) for each in names] == [1, 1]


def test_a_line_waits_for_those_before_it():
    """Lines come in order of arrival, whichever answer ends first; times begin at the first request."""
    lines = []
    recorder = TraceRecorder(lines.append, lambda _: 0)
    for number in range(3):
        recorder.note_event(arrived(number, [number] * 5, at_s=7 + number / 10), 0)
    recorder.note(Finished(at_s=8, request_id=2, output_tokens=5))
    recorder.note(Finished(at_s=8, request_id=1, output_tokens=4))
    assert lines == []
    recorder.note(Finished(at_s=9, request_id=0, output_tokens=3))
    assert [(line["timestamp"], line["output_length"]) for line in lines] == [(0, 3), (100, 4), (200, 5)]


def test_a_turn_waits_after_the_answer_before_it():
    """The delay of a turn is the time since the answer to the turn before; overlapping turns have none."""
    requests = [(0, "a", 1.0), (1, "b", 2.0), (2, "a", 5.0), (3, "a", 5.1)]
    lines = []
    recorder = TraceRecorder(lines.append, lambda _: 0)
    recorder.note_event(arrived(0, [1], at_s=1.0, session="a"), 0)
    recorder.note(Finished(at_s=3.5, request_id=0, output_tokens=1))
    for number, session, at_s in requests[1:]:
        recorder.note_event(arrived(number, [1], at_s=at_s, session=session), 0)
    for number in range(1, 4):
        recorder.note(Finished(at_s=9, request_id=number, output_tokens=1))
    assert [line.get("delay") for line in lines] == [None, None, 1500, None]
    assert len({line["session_id"] for line in lines}) == 2


def test_sessions_that_were_quiet_for_long_are_forgotten(monkeypatch):
    """Only so many sessions are remembered, the latest; a turn of another has no delay."""
    monkeypatch.setattr(mooncake_lab.serving.recording, "_MOST_SESSIONS", 2)
    lines = []
    recorder = TraceRecorder(lines.append, lambda _: 0)
    for number, session in enumerate("abacba"):
        recorder.note_event(arrived(number, [1], at_s=number, session=session), 0)
        recorder.note(Finished(at_s=number + 0.5, request_id=number, output_tokens=1))
    assert [line.get("delay") for line in lines] == [None, None, 1500, None, None, None]


def test_what_had_no_answer_has_no_line():
    """A refused request has no line; one whose client left, or that never ended, keeps its tokens."""
    lines = []
    shown = {1: 6, 2: 3}
    recorder = TraceRecorder(lines.append, lambda number: shown.get(number, 0))
    for number in range(4):
        recorder.note_event(arrived(number, [1], at_s=number), 0)
    recorder.note(Rejected(at_s=4, request_id=0, stage="admission", reason="full"))
    recorder.note(Rejected(at_s=4, request_id=1, stage="client", reason="the client went away"))
    recorder.close()
    assert [line["output_length"] for line in lines] == [6, 3]
    assert recorder.without_answer == 2
    recorder.note_event(arrived(9, [1]), 0)
    recorder.note(Finished(at_s=9, request_id=9, output_tokens=1))
    assert len(lines) == 2


@pytest.fixture(scope="module")
def served(open_api, tmp_path_factory):
    """A recording of three conversations of three turns on a live server, its text, and the tokens it reused."""
    path = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    texts = []
    told = []
    with open_api() as server, path.open("w") as file:
        server.watch = lambda record: [tell(record) for tell in told]

        def write(line):
            file.write(json.dumps(line) + "\n")

        with _recording(server.runtime, write, told):
            client = server.client()
            for name in ("alice", "bobby", "carol"):
                prompt = "system prompt that all of them share. " * 3 + f"I am {name}. "
                for turn in range(3):
                    answer = client.completions.create(
                        model=server.runtime.options.model, prompt=prompt, max_tokens=9,
                        extra_headers={"X-Session-ID": f"session-of-{name}"},
                    )  # fmt: skip
                    texts += [prompt, answer.choices[0].text, f"session-of-{name}", answer.id]
                    prompt += answer.choices[0].text + f" Turn {turn} of {name}."
            reused = [record.reused_tokens for record in server.log if isinstance(record, Prefilled)]
    return path, texts, reused


def test_no_text_is_in_a_recording(served):
    """Neither a word of a prompt or an answer, nor the name of a session or the id of an answer is in the file."""
    path, texts, _ = served
    content = path.read_text()
    words = {word.strip(".") for text in texts for word in text.split() if word.isascii() and len(word) > 3}
    assert {"alice", "system", "prompt", "them", "Turn"} <= words
    fields = {"timestamp", "input_length", "output_length", "hash_ids", "trace_block_size", "session_id", "delay"}
    assert {name for line in content.splitlines() for name in json.loads(line)} == fields
    for word in words:
        assert word not in content


def test_replaying_a_recording_gives_its_hit_rate(served, open_cluster):
    """A cluster that replays the recording reuses as many tokens of each request as the server did."""
    path, _, reused = served
    trace = read_trace(path)
    assert trace.sessions is not None
    assert sum(reused) > 0
    with open_cluster() as live:
        log = live.run(trace.requests())
    assert [record.reused_tokens for record in log if isinstance(record, Prefilled)] == reused
