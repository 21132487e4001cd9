"""Text to token ids and back: a model's own tokenizer, or bytes for models that have none."""

import importlib.util
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, final

from mooncake_lab.engine.config import read_json, refuse_partial
from mooncake_lab.serving.openai_api.chat_template import ChatTemplate, Message
from mooncake_lab.serving.openai_api.text_stream import ByteStream, Detokenizer, TokenStream

if TYPE_CHECKING:
    import tokenizers

_LOG: Final = logging.getLogger(__name__)
_NAMED: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_SIGNS: Final = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "merges.txt",
)  # fmt: skip
"""Files that only models with a tokenizer have."""
_LLAMA: Final[Mapping[str, Any]] = MappingProxyType(
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
)
_LLAMA_TOKENS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "LlamaTokenizer": dict(_LLAMA),
        "CodeLlamaTokenizer": {
            **_LLAMA, "prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>",
            "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>",
        },
    }
)  # fmt: skip
"""The special tokens of classes of tokenizers, where their settings name no others."""


@final
class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; any higher id, which a random model may emit, reads as U+FFFD.

    `encode` and `encode_chat` of a tokenizer run on another thread than its streams.
    """

    most_characters_a_token = 1
    """The length of its longest token: a text of more characters than this times `n` has over `n` tokens."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end an answer in addition to those of the model's config."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """`role: content` lines."""
        turns = "".join(f"{message.role}: {message.text}\n" for message in messages)
        return self.encode(turns + "assistant:")

    def stream(self) -> ByteStream:
        """A stream that holds back unfinished characters."""
        return ByteStream()


@final
class HuggingFaceTokenizer:
    """The tokenizer of a model directory, with its chat template.

    It gives the ids and the text of `transformers.AutoTokenizer`, which takes seconds to import and is used only
    for directories without `tokenizer.json`.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when the directory has no tokenizer that can be used, with the reason.
    """

    def __init__(self, directory: Path) -> None:
        is_new = (directory / "tokenizer.json").is_file()
        found = _from_json(directory) if is_new else _from_transformers(directory)
        self._tokenizer = found.tokenizer
        if not self._tokenizer.get_vocab_size(with_added_tokens=False):
            raise ValueError(f"{directory}: its tokenizer knows no tokens; was the directory downloaded whole?")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._detokenizer = Detokenizer(self._tokenizer, cleans=found.cleans)
        self._template = None if found.template is None else ChatTemplate(found.template, found.special)
        end = self._tokenizer.token_to_id(found.special.get("eos_token", ""))
        self.end_tokens: tuple[int, ...] = () if end is None else (end,)
        self.most_characters_a_token = max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        """The token ids of a text, with what the tokenizer puts around a prompt."""
        # a batch of one: other threads go on meanwhile
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, by the chat template.

        Raises:
            ValueError: when the model has no chat template, or it refuses the conversation or loses a part of it.
        """
        if not messages:
            raise ValueError("there are no messages; at least one is needed")
        if self._template is None:
            raise ValueError("the model has no chat template; it serves /v1/completions")
        return self.encode(self._template.render(messages), adds_special=False)

    def stream(self) -> TokenStream:
        """A stream that holds back unfinished characters."""
        return TokenStream(self._detokenizer)


Tokenizer: TypeAlias = ByteTokenizer | HuggingFaceTokenizer


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model directory, or bytes where it has none, as random models.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when the directory has no tokenizer that can be used, with the reason.
    """
    directory = Path(model)
    if not directory.is_dir():
        return ByteTokenizer()
    if any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", *_SIGNS)):
        return HuggingFaceTokenizer(directory)
    _LOG.warning(
        "%s has no tokenizer: tokens 0 to 255 are bytes of UTF-8, and other tokens have no text", directory
    )
    return ByteTokenizer()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a directory says about its tokenizer."""

    tokenizer: "tokenizers.Tokenizer"
    special: Mapping[str, str]
    """Special tokens by their names, such as `eos_token`."""
    template: str | None
    cleans: bool
    """Whether spaces before punctuation are removed from texts."""


def _from_json(directory: Path) -> _Found:
    """The tokenizer in `tokenizer.json`, with what `tokenizer_config.json` adds to it."""
    import tokenizers

    path, settings = directory / "tokenizer.json", _settings(directory)
    described = read_json(path)
    name = _llama_class(directory, settings, described)
    if name is not None:
        settings = _LLAMA_TOKENS[name] | settings
        described = _as_llama(described, settings, is_code=name == "CodeLlamaTokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library has no class of its own
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    added = settings.get("added_tokens_decoder")
    special = _special(settings)
    _add(tokenizer, added if isinstance(added, dict) else {}, [*special.values(), *_extra(settings)])
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return _Found(
        tokenizer=tokenizer,
        special=special,
        template=_template(directory, settings),
        cleans=bool(settings.get("clean_up_tokenization_spaces"))
        and not isinstance(tokenizer.model, tokenizers.models.BPE),
    )


def _settings(directory: Path) -> dict[str, Any]:
    """The fields of `tokenizer_config.json`, and of older files where it is of that time too."""
    found = read_json(path) if (path := directory / "tokenizer_config.json").is_file() else {}
    if "added_tokens_decoder" in found:
        return found
    if (path := directory / "special_tokens_map.json").is_file():
        found |= read_json(path)
    if (path := directory / "added_tokens.json").is_file():
        special = {*_special(found).values(), *_extra(found)}
        flags = {text: {"normalized": text not in special, "special": text in special} for text in read_json(path)}
        found["added_tokens_decoder"] = {
            place: {"content": text, **flags[text]} for text, place in read_json(path).items()
        }
    return found


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by their names, those of this model's own included."""
    own = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= own if isinstance(own, dict) else {}
    texts = {name: _text(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None and (name in _NAMED or text)}


def _extra(settings: Mapping[str, Any]) -> list[str]:
    """Special tokens without a name."""
    found = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    texts = map(_text, cast("list[object]", found) if isinstance(found, list) else ())
    return [text for text in texts if text is not None]


def _text(token: object) -> str | None:
    """The text of a token, which files describe by the text or by an object."""
    token = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _add(tokenizer: "tokenizers.Tokenizer", described: Mapping[str, Any], special: Sequence[str]) -> None:
    """Add the tokens that the settings describe, and special ones, if the tokenizer lacks them."""
    import tokenizers

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, each in sorted(described.items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(each["content"], **{name: each[name] for name in flags if name in each})
        if repr(token) not in map(repr, tokenizer.get_added_tokens_decoder().values()):
            tokenizer.add_tokens([token])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(special):
        if text and text not in known:
            tokenizer.add_tokens([tokenizers.AddedToken(text, special=True)])


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own counts more than a field; of several the default one."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {str(each["name"]): each["template"] for each in cast("list[dict[str, object]]", found)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _llama_class(directory: Path, settings: Mapping[str, Any], described: Mapping[str, Any]) -> str | None:
    """The class of a tokenizer of Llama 1, 2 or Code Llama, whose steps transformers knows better than the file.

    None for other tokenizers.
    """
    name = settings.get("tokenizer_class")
    if name is None and (path := directory / "config.json").is_file():
        name = read_json(path).get("tokenizer_class")
    model = described.get("model")
    is_bpe = isinstance(model, dict) and cast("dict[str, object]", model).get("type", "BPE") == "BPE"
    steps = json.dumps([described.get("pre_tokenizer"), described.get("decoder")])
    name = str(name).removesuffix("Fast")
    return name if name in _LLAMA_TOKENS and is_bpe and '"ByteLevel"' not in steps else None


def _as_llama(described: Mapping[str, Any], settings: Mapping[str, Any], *, is_code: bool) -> dict[str, Any]:
    """The same vocabulary with the steps of Llama 1 and 2: `▁` for spaces, bytes for unknown characters."""
    puts_space = settings.get("add_prefix_space") in {None, True}
    is_legacy = bool(settings.get("legacy")) and not is_code
    scheme = "never" if not puts_space else "always" if is_legacy else "first"
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders: list[dict[str, Any]] = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if puts_space or is_code:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _text(settings["unk_token"]) if is_code else None
    model = {"type": "BPE", "dropout": None, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    kept = {name: described["model"].get(name) for name in ("vocab", "merges")}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return {
        **described,
        "model": model | kept,
        "normalizer": None,
        "pre_tokenizer": spaces,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _from_transformers(directory: Path) -> _Found:
    """The tokenizer of a directory without `tokenizer.json`."""
    if (path := directory / "tokenizer.model").is_file():
        with path.open("rb") as file:
            begin = file.read(256)
        refuse_partial(path, begin)
        package = "tiktoken" if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", begin) else "sentencepiece"
        if importlib.util.find_spec(package) is None:
            says = f"reading {path} needs the package {package}, which is not installed"
            raise ValueError(f"{says}; a tokenizer.json beside it needs none")
    elif not (directory / "vocab.json").is_file() or not (directory / "merges.txt").is_file():
        there = [name for name in _SIGNS if (directory / name).is_file()]
        says = f"has {there[0]} but no tokenizer: neither tokenizer.json nor tokenizer.model is there"
        raise ValueError(f"{directory} {says}; was it downloaded whole?")
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        template = found.chat_template
        return _Found(
            tokenizer=found.backend_tokenizer,
            special=found.special_tokens_map,
            template=template.get("default") if isinstance(template, dict) else template,
            cleans=False,
        )
    except Exception as error:  # whatever transformers or a package that it needs raises
        says = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{directory}: its tokenizer cannot be read: {says}") from error
