"""Token ids and texts are those of transformers, whole and streamed, without transformers being imported."""

import json
import random
import subprocess
import sys

import pytest
from tokenizer_kinds import KINDS, PIECES, save, texts
from transformers import AutoTokenizer

from mooncake_lab.serving.openai_api.streaming import Writer
from mooncake_lab.serving.openai_api.text_stream import text_of
from mooncake_lab.serving.openai_api.tokenizer import HuggingFaceTokenizer, tokenizer_of

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def made(directory, kind, settings=SETTINGS, **files):
    """Our tokenizer and that of transformers for a directory of a kind."""
    save(KINDS[kind](), directory)
    files = {"config.json": {"model_type": "llama"}, "tokenizer_config.json": settings} | files
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return HuggingFaceTokenizer(directory), AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp(request.param), request.param)


def decoded(theirs, tokens):
    return theirs.decode(tokens, skip_special_tokens=True)


class TestTexts:
    def test_texts_are_those_of_decode(self, pair):
        """2,000 texts have transformers' ids, and their streams' pieces, joined, are what `decode` gives.

        So have answers that begin behind a prompt, and those that begin or end in the middle of a character.
        """
        ours, theirs = pair
        draw = random.Random(1)
        for text in texts(2000):
            tokens = ours.encode(text)
            assert tokens == theirs.encode(text)
            at, to = sorted(draw.choices(range(len(tokens) + 1), k=2))
            for part in (tokens, tokens[at:to]):
                assert text_of(ours.stream(), part) == decoded(theirs, part)

    def test_any_tokens_have_the_text_of_decode(self, pair):
        """So have answers that no text would give: bytes in any order, special tokens, ids that do not exist."""
        ours, theirs = pair
        draw = random.Random(2)
        for length in [1, 2, 3, 5, 40] * 40:
            tokens = [draw.randrange(len(theirs) + 3) for _ in range(length)]
            assert text_of(ours.stream(), tokens) == decoded(theirs, tokens)

    def test_long_texts_of_one_kind(self, pair):
        """Texts of hundreds of characters of one script keep their text, however long their runs of bytes."""
        ours, theirs = pair
        for piece in PIECES:
            tokens = ours.encode(piece * 30)
            assert text_of(ours.stream(), tokens) == decoded(theirs, tokens)

    def test_what_is_shown_stays(self, pair):
        """After each token, what was shown is the beginning of the whole text, and little of it is held back."""
        ours, theirs = pair
        tokens = ours.encode("hello 你好世界 สวัสดี " * 20)
        whole, stream, shown = decoded(theirs, tokens), ours.stream(), ""
        for done, token in enumerate(tokens, 1):
            shown += stream.push(token)
            assert whole.startswith(shown)
            assert len(decoded(theirs, tokens[:done])) - len(shown) <= 140

    @pytest.mark.parametrize("kind", ["byte_fallback", "unigram_bytes", "byte_level"])
    def test_bytes_that_form_no_character(self, tmp_path, kind, monkeypatch):
        """Each is shown as U+FFFD as it comes, and costs the decoding of a few tokens, however many came."""
        ours, _ = made(tmp_path, kind)
        name = "\x80".encode().decode("latin-1") if kind == "byte_level" else "<0x80>"
        token = ours.encode("\u0080")[-1] if kind == "byte_level" else ours._tokenizer.token_to_id(name)
        stream, cost = ours.stream(), []
        text = stream._of.text
        monkeypatch.setattr(stream._of, "text", lambda tokens: cost.append(len(tokens)) or text(tokens))
        pieces = [stream.push(token) for _ in range(4000)]
        assert all(len("".join(pieces[:done])) >= done - 1 for done in range(1, 4001))
        assert "".join(pieces) + stream.finish() == "\ufffd" * 4000
        assert sum(cost) <= 4000 * 40

    def test_a_character_of_bytes_ends_with_a_word(self, tmp_path):
        """A run of bytes is shown when a word follows; a longer one than 128 bytes is shown as it grows."""
        ours, _ = made(tmp_path, "byte_fallback")
        stream = ours.stream()
        assert [stream.push(token) for token in ours.encode("你好 h")[2:]] == [
            "",
            "",
            "",
            "",
            "",
            "",
            "你好 ",
            "h",
        ]
        stream = ours.stream()
        tokens = ours.encode("ส" * 100)[2:]
        shown = "".join(stream.push(token) for token in tokens)
        assert shown == "ส" * 100

    @pytest.mark.parametrize("kind", KINDS)
    def test_stop_sequences_match(self, tmp_path, kind):
        """A stop sequence of any script ends the text before it."""
        ours, theirs = made(tmp_path, kind)
        for stop in ("道", "很好", "ชื่อ", "👦", "wor"):
            tokens = ours.encode(f"hello 中国我的说{stop}中国")
            whole = decoded(theirs, tokens)
            writer = Writer(ours.stream(), (stop,))
            shown = "".join(writer.push(token) for token in tokens if not writer.is_stopped) + writer.finish()
            assert shown == whole.partition(stop)[0]
            assert writer.is_stopped == (stop in whole)


LLAMA2 = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
ADDED = {str(place): {"content": text, **FLAGS} for place, text in enumerate(["<unk>", "<s>", "</s>"])}
NEW = {"__type": "AddedToken", "content": "<|end|>"}


@pytest.mark.parametrize(
    ("kind", "settings", "files"),
    [
        ("byte_fallback", LLAMA2, {}),
        ("byte_fallback", LLAMA2 | {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, {}),
        ("byte_fallback", LLAMA2 | {"add_prefix_space": False, "added_tokens_decoder": ADDED}, {}),
        ("byte_fallback", LLAMA2 | {"add_bos_token": False, "add_eos_token": True}, {}),
        ("byte_fallback", LLAMA2 | {"tokenizer_class": "CodeLlamaTokenizer", "legacy": True}, {}),
        ("byte_fallback", LLAMA2 | {"tokenizer_class": "CodeLlamaTokenizerFast", "add_prefix_space": False}, {}),
        ("byte_fallback", {"tokenizer_class": "CodeLlamaTokenizer", "prefix_token": "hello"}, {}),
        ("byte_level", LLAMA2 | {"tokenizer_class": "LlamaTokenizerFast"}, {}),
        ("byte_level", {"eos_token": NEW, "additional_special_tokens": ["hello"]}, {}),
        ("byte_level", {}, {"special_tokens_map.json": {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}}),
        ("byte_level", {"eos_token": "he"}, {}),
        ("byte_level", SETTINGS | {"model_max_length": 4, "truncation_side": "left"}, {}),
        ("word_pieces", SETTINGS | {"clean_up_tokenization_spaces": True}, {}),
    ],
)
def test_settings_are_those_of_transformers(tmp_path, kind, settings, files):
    """Ids, texts and the end token follow the other files of the directory as they do in transformers."""
    ours, theirs = made(tmp_path, kind, settings, **files)
    for text in texts(200, seed=3):
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        assert text_of(ours.stream(), tokens) == decoded(theirs, tokens)
    expected = [] if theirs.eos_token is None else [theirs.convert_tokens_to_ids(theirs.eos_token)]
    assert list(ours.end_tokens) == expected


def test_truncation_and_padding_in_the_file_change_no_prompt(tmp_path):
    """A `tokenizer.json` saved with truncation and padding gives whole prompts."""
    tokenizer = KINDS["byte_level"]()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    save(tokenizer, tmp_path)
    plain = KINDS["byte_level"]()
    assert HuggingFaceTokenizer(tmp_path).encode("hello world " * 9) == plain.encode("hello world " * 9).ids


def test_transformers_is_not_imported(tmp_path):
    """A directory with `tokenizer.json` costs no import of transformers, also for chats."""
    save(KINDS["byte_fallback"](), tmp_path)
    settings = LLAMA2 | {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    program = (
        "import sys\n"
        "from mooncake_lab.serving.openai_api.server import tokenizer_of\n"
        "from mooncake_lab.serving.openai_api.chat_template import Message\n"
        f"found = tokenizer_of({str(tmp_path)!r})\n"
        "found.encode_chat([Message('user', ('hi',))])\n"
        "print('transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer_config.json": "{}"}, "has tokenizer_config.json but no tokenizer"),
        ({"special_tokens_map.json": "{}"}, "has special_tokens_map.json but no tokenizer"),
        ({"vocab.json": "{}"}, "has vocab.json but no tokenizer"),
        ({"tokenizer.model": "\n\x0e\n\x05<unk>"}, "needs the package sentencepiece, which is not installed"),
        ({"tokenizer.model": "IQ== 0\nIg== 1\n"}, "needs the package tiktoken, which is not installed"),
        ({"tokenizer.model": ""}, r"tokenizer\.model is empty"),
        ({"tokenizer.json": ""}, r"tokenizer\.json is empty"),
        ({"tokenizer.json": '{"version": "1.0", "model": {"ty'}, r"tokenizer\.json: .* no JSON"),
        ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1"}, r"json is a pointer of Git LFS"),
        ({"tokenizer.json": "<!DOCTYPE html>"}, r"tokenizer\.json: .* no JSON"),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json is no tokenizer"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'}, "knows no tokens"),
    ],
)  # fmt: skip
def test_what_is_no_tokenizer_is_refused(tmp_path, files, says, monkeypatch):
    """A directory whose tokenizer cannot be used is an error of one sentence that names file or package."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=says) as raised:
        tokenizer_of(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
