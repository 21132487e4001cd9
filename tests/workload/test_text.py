"""Files with texts: what a tokenizer makes of ShareGPT, chat messages, and the prompts of benchmark programs."""

import json

import pytest

from mooncake_lab.workload import TraceError, read_trace

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer that has a token for each of ten words, and one for all others."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {word: i for i, word in enumerate(["other", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="other"))  # noqa: S106  # no password
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def read(tmp_path, tokenizer):
    """A function from records, as lines or one array, to the trace of their file."""

    def reading(*records, array=False, **options):
        path = tmp_path / "texts"
        path.write_text(json.dumps(records, indent=2) if array else "".join(json.dumps(r) + "\n" for r in records))
        return read_trace(path, **{"tokenizer": str(tokenizer), "block_size_tokens": 2, **options})

    return reading


def keys(trace):
    return [traced.request.block_keys for traced in trace.requests()]


def said(*texts, names=("human", "gpt")):
    return [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize("array", [False, True])
def test_sharegpt_conversations_are_sessions(read, array):
    """The prompt of each turn is all that came before, with the answers; what texts share is shared."""
    first = {"id": "a", "conversations": said("one two", "three four five", "six", "seven")}
    second = {"id": "b", "conversations": said("one two", "three", "six")}
    trace = read(first, second, array=array)
    assert (trace.format, trace.ids) == ("text", "hashed")
    assert trace.input_tokens.tolist() == [2, 6, 2]
    assert trace.output_tokens.tolist() == [3, 1, 1]
    assert trace.wait_for == ((), (0,), ())
    assert len({*trace.sessions}) == 2
    one, two, other = keys(trace)
    assert one == two[:1] == other


def test_a_key_stands_for_the_tokens_before_it(read):
    """Equal words in another place, or after other words, are other blocks."""
    one, two, three = keys(
        read(
            {"prompt": "one two three four", "output_tokens": 1},
            {"prompt": "three four three four", "output_tokens": 1},
            {"prompt": "one two three four five", "output_tokens": 1},
        )
    )
    assert one == three[:2]
    assert not {*one} & {*two}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "one two three", "completion": "four five"},
        {"prompt": "one two three", "output_tokens": 2},
        {"text": "one two three", "output_length": 2},
        {"texts": ["one two", "three"], "output_length": 2},
        {"text_input": "one two three", "output_length": 2, "timestamp": 5.5},
        {
            "messages": [{"role": "system", "content": "one"}, {"role": "user", "content": "two three"}],
            "max_tokens": 2,
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "one two three"}]}],
            "output_length": 2,
        },
        {
            "messages": [
                {"role": "user", "content": "one two three"},
                {"role": "assistant", "content": "four five"},
            ]
        },
        {"payload": {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 2}},
        {"prompt": "one two three"},
    ],
)
def test_prompts_of_benchmark_files(read, record):
    """vLLM's, AIPerf's and OpenAI's names mean the same; --output-tokens is for answers that are not stated."""
    trace = read(record, output_tokens=2)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([3], [2])
    (other,) = keys(read({"prompt": "one two three", "output_tokens": 2}))
    assert keys(trace) == [other]


def test_turns_without_answers(read):
    """AIPerf's turns go on from answers of the stated lengths, which no other session shares."""
    turns = [{"text": "one two", "output_length": 2}, {"text": "three", "output_length": 1, "delay": 1500}]
    trace = read({"session_id": "a", "turns": turns}, {"session_id": "b", "turns": turns})
    assert sorted(zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), strict=True)) == [
        (0.0, 2),
        (0.0, 2),
        (1.5, 5),
        (1.5, 5),
    ]
    assert {(traced.request.session, traced.request.delay_s) for traced in trace.requests()} == {
        ("a", None),
        ("a", 1.5),
        ("b", None),
        ("b", 1.5),
    }
    assert trace.wait_for == ((), (), (0,), (1,))
    a, b = keys(trace)[2:]
    assert (a[0], a[1] == b[1]) == (b[0], False)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "one"}, ":2: field 'output_length' is missing"),
        ({"prompt": "", "output_length": 1}, ":2: field 'prompt' is a text without a token"),
        ({"prompt": "one", "text": "one", "output_length": 1}, ":2: the line is a record prompt and text"),
        ({"output_length": 1}, ":2: the line is a record without a prompt"),
        ({"prompt": 5, "output_length": 1}, ":2: field 'prompt' is 5; allowed is a string or null"),
        (
            {"prompt": "one", "output_length": 0},
            ":2: field 'output_length' is 0; allowed is a whole number from 1",
        ),
        ({"conversations": said("one")}, ":2: field 'conversations' is a list without an answer"),
        (
            {"turns": [{"text": "one", "output_length": 1, "timestamp": t} for t in (5, 3)]},
            ":2: field 'turns[1].timestamp' is 3; allowed is at least 5, that of an earlier turn",
        ),
        ({"turns": [{"text": "one"}]}, ":2: field 'turns[0].output_length' is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "output_length": 1},
            ":2: field 'messages[0].content[0].type' is 'image_url'; allowed is 'text'",
        ),
    ],
)
def test_refused(read, record, says):
    """A bad record is named with line and field; lenient reading counts it."""
    good = {"prompt": "one two", "output_length": 1}
    with pytest.raises(TraceError) as refusal:
        read(good, record)
    assert says in str(refusal.value)
    assert (len(read(good, record, lenient=True)), read(good, record, lenient=True).skipped) == (1, 1)


def test_without_a_tokenizer(read, tmp_path):
    """The refusal says what is missing, or what is no tokenizer."""
    good = {"prompt": "one two", "output_length": 1}
    (tmp_path / "no.json").write_text("{}")
    for path, says in (
        (None, "name a tokenizer"),
        ("nowhere", "is no file"),
        (tmp_path / "no.json", "no tokenizer"),
    ):
        with pytest.raises(ValueError, match=says):
            read(good, tokenizer=path and str(path))
