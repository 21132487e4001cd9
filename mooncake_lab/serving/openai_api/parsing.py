"""What a client's request says: OpenAI's JSON, checked. Options that would change the answer are never ignored."""

import contextlib
import re
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.serving.messages import SamplingParams
from mooncake_lab.serving.openai_api.chat_template import Message
from mooncake_lab.serving.openai_api.neutral import HINTS, NEUTRAL, allowed, is_neutral
from mooncake_lab.serving.openai_api.tokenizer import Tokenizer
from mooncake_lab.serving.openai_api.validation import readable

MOST_PROMPTS: Final = 64
MOST_STOPS: Final = 16
MOST_STOP_CHARACTERS: Final = 1024
_MOST: Final = 2**31 - 1
BOUNDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "max_completion_tokens": (1, _MOST), "max_tokens": (1, _MOST), "min_tokens": (0, _MOST),
        "seed": (-(2**63), 2**63 - 1), "temperature": (0, 2), "top_k": (-1, _MOST), "top_p": (0, 1),
    }
)  # fmt: skip
"""The smallest and the largest value of every number that a request may contain."""
_LEAST_TOP_P: Final = 1e-9
"""What `top_p` 0 means: the likeliest token alone."""
_SEEDS: Final = 2**63
_MOST_FIELDS: Final = 256
"""Options of a request, those included that ask for nothing."""
_TEXT: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
"""A string of JSON."""
_LONGEST_NEUTRAL: Final = 1024
"""Bytes of a value that asks for nothing; a longer one is not looked into."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """The usage comes in an event of its own before the end."""
    continuous_usage_stats: bool | None = None
    """vLLM's: the usage so far comes with every event."""
    include_obfuscation: bool | None = None
    """Ignored: no padding is added."""


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share. A field that is null is as one that is not there."""

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """vLLM's: the number of tokens to draw from; 0 and -1 are all."""
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    """Without effect where `stream` is false."""
    max_tokens: int | None = None
    min_tokens: int = 0
    """vLLM's: neither an end token nor a stop sequence ends a shorter answer."""
    ignore_eos: bool = False
    """vLLM's: end tokens do not end the answer."""
    return_token_ids: bool = False
    """vLLM's: each choice also has `token_ids`."""


class Completion(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: msgspec.Raw
    """Text, token ids, or a list of either; decoded when its size is known to be allowed."""


class TextPart(msgspec.Struct, frozen=True, gc=False):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One turn of a conversation. Fields that only answers with tools or sound have may be null, not more."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    """Ignored."""
    refusal: None = None
    annotations: list[Any] | None = None
    """Ignored: OpenAI's client sends back what an answer had."""
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = None
    """Allowed is an empty list, or null; see `_refuse_tool_calls`."""


class Chat(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`; it counts where both are given."""


_Body = TypeVar("_Body", Completion, Chat)


class BadRequestError(ValueError):
    """A request that cannot be served as it is, the parameter it is about, and the HTTP status that says so."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request as the cluster can serve it."""

    prompts: tuple[npt.NDArray[np.int32], ...]
    params: SamplingParams
    """Parameters of all prompts; `max_new_tokens` 0 is no limit but the context length."""
    is_seeded: bool
    """Whether the client chose the seed."""
    stops: tuple[str, ...]
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    is_chat: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads the bodies of requests for one model. It has no state: any thread may use it.

    A prompt that is longer than the context length whatever its tokens are is refused before it is tokenised.
    """

    tokenizer: Tokenizer
    model: str
    """The name by which clients ask for it."""
    most_tokens: int
    """Most tokens of a prompt and its answer together."""

    def completion(self, body: bytes) -> ParsedRequest:
        """What a completion request wants.

        Raises:
            BadRequestError: saying which parameter is wrong, and what is allowed; or it is for another model.
        """
        wish = _decode(body, Completion, self.model)
        prompts = tuple(_array(prompt) for prompt in self._prompts(bytes(wish.prompt), wish.max_tokens or 0))
        return _wanted(wish, prompts, 16 if wish.max_tokens is None else wish.max_tokens, is_chat=False)

    def chat(self, body: bytes) -> ParsedRequest:
        """What a chat completion request wants; for its errors see `completion`."""
        wish = _decode(body, Chat, self.model)
        if len(wish.messages) > self.most_tokens:
            raise BadRequestError(
                f"{len(wish.messages)} messages; no more than {self.most_tokens} tokens fit", "messages"
            )
        turns = [Message(turn.role, _parts(turn.content)) for turn in wish.messages]
        self._check_length(sum(len(turn.text) for turn in turns), "messages")
        try:
            prompt = _array(self.tokenizer.encode_chat(turns), "messages")
        except ValueError as error:
            raise BadRequestError(str(error), "messages") from error
        most = wish.max_tokens if wish.max_completion_tokens is None else wish.max_completion_tokens
        return _wanted(wish, (prompt,), most or 0, is_chat=True)

    def _prompts(self, raw: bytes, most_new: int) -> Iterator[list[int]]:
        """One prompt or several, as text or as token ids: the four forms that OpenAI's API allows.

        The first one that leaves no room for the answer that was asked for is refused, and no further text is
        tokenised. What has too many items is refused before any of them becomes an object: millions do not fit
        into memory fast, and keep the event loop waiting for the interpreter meanwhile.
        """
        most_items = MOST_PROMPTS * self.most_tokens
        if raw.startswith(b"[") and raw.count(b",") >= most_items:
            items = _TEXT.sub(b"", raw, MOST_PROMPTS).count(b",") + 1  # no comma in a text separates items
            if items > most_items:
                says = f"a list of {items} items; {most_items} tokens fit into all prompts"
                raise BadRequestError(says, "prompt")
        with _readable("a prompt is text, or a list of token ids, or a list of either", "prompt"):
            found = msgspec.json.decode(raw, type=str | list[int | str | list[int]])
        is_one = isinstance(found, str) or (found and all(isinstance(item, int) for item in found))
        prompts: Any = [found] if is_one else found
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise BadRequestError(f"{len(prompts)} prompts; allowed are 1 to {MOST_PROMPTS}", "prompt")
        for prompt in prompts:  # all of them, before the first is tokenised
            if isinstance(prompt, str):
                self._check_length(len(prompt), "prompt")
            elif isinstance(prompt, int):
                raise BadRequestError(
                    f"the token id {prompt} stands beside whole prompts; put it into a list of token ids", "prompt"
                )
            else:
                self._check_room(len(prompt), most_new)
        for prompt in prompts:
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if len(prompts) > 1:  # a single one is checked when it is submitted
                self._check_room(len(tokens), most_new)
            yield tokens

    def _check_room(self, tokens: int, most_new: int) -> None:
        if tokens > self.most_tokens:
            raise BadRequestError(f"a prompt of {tokens} tokens; no more than {self.most_tokens} fit", "prompt")
        if tokens + most_new > self.most_tokens:
            says = f"{tokens} prompt tokens and {most_new} new ones are too many; together they may be"
            raise BadRequestError(f"{says} {self.most_tokens}", "prompt")

    def _check_length(self, characters: int, name: str) -> None:
        most = self.most_tokens * self.tokenizer.most_characters_a_token
        if characters > most:
            raise BadRequestError(
                f"{characters} characters; {self.most_tokens} tokens fit, which are {most} characters at most",
                name,
            )


def _wanted(
    wish: Completion | Chat, prompts: tuple[npt.NDArray[np.int32], ...], most: int, *, is_chat: bool
) -> ParsedRequest:
    options = wish.stream_options
    # draws depend on seed and place alone, so that a request placed again goes on as it was
    seed = secrets.randbits(62) if wish.seed is None else wish.seed % _SEEDS
    return ParsedRequest(
        prompts=prompts,
        params=SamplingParams(
            max_new_tokens=most,
            min_new_tokens=wish.min_tokens,
            temperature=wish.temperature,
            top_p=max(wish.top_p, _LEAST_TOP_P),
            top_k=wish.top_k if wish.top_k > 0 else None,
            seed=seed,
            end_tokens=() if wish.ignore_eos else None,
        ),
        is_seeded=wish.seed is not None,
        stops=_stops(wish.stop),
        is_stream=wish.stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=wish.return_token_ids,
        is_chat=is_chat,
    )


def _decode(body: bytes, kind: type[_Body], model: str) -> _Body:
    """The options that this server has, within their bounds, of a request for this model."""
    with _readable("the body is no such request"):
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if len(fields) > _MOST_FIELDS:
            raise BadRequestError(f"the body has {len(fields)} options; allowed are {_MOST_FIELDS}")
        if "messages" in fields:
            _refuse_tool_calls(bytes(fields["messages"]))
        wish = msgspec.json.decode(msgspec.json.encode(_offered(fields)), type=kind)
    if wish.model != model:
        says = f"the model {wish.model!r} does not exist; this cluster serves {model!r}"
        raise BadRequestError(says, "model", status=404)
    for name, (least, most) in BOUNDS.items():
        value = getattr(wish, name, None)
        if value is not None and not least <= value <= most:
            raise BadRequestError(f"{name} is {value}; allowed are {least} to {most}", name)
    _stops(wish.stop)  # before a text is tokenised
    return wish


def _offered(fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The fields without those that ask for nothing.

    Raises:
        BadRequestError: when one asks for what is not there.
    """
    found: dict[str, msgspec.Raw] = {}
    for name, raw in fields.items():
        if bytes(raw) == b"null" or name in HINTS:
            continue
        if name not in NEUTRAL:
            found[name] = raw
            continue
        if len(bytes(raw)) > _LONGEST_NEUTRAL or not is_neutral(name, msgspec.json.decode(raw)):
            said = f"{name} is {_short(raw)}, which this server does not offer; allowed is {allowed(name)}"
            raise BadRequestError(said, name)
    return found


class _ToolCalls(msgspec.Struct, frozen=True, gc=False):
    """What of a turn asks for tools."""

    tool_calls: msgspec.Raw = msgspec.Raw(b"null")


def _refuse_tool_calls(messages: bytes) -> None:
    """Refuse turns that called tools; their `content` is often null, which is not the reason.

    Raises:
        BadRequestError: naming the first.
    """
    if b"tool_calls" not in messages:
        return
    with contextlib.suppress(msgspec.MsgspecError):  # the whole body is looked at behind this
        for place, turn in enumerate(msgspec.json.decode(messages, type=list[_ToolCalls])):
            if msgspec.json.decode(turn.tool_calls):
                name = f"messages[{place}].tool_calls"
                says = f"{name} is {_short(turn.tool_calls)}; this server offers no tools: allowed is [] or null"
                raise BadRequestError(says, name)


def _short(raw: bytes) -> str:
    text = bytes(raw)[:80].decode(errors="replace")
    return text if len(bytes(raw)) <= 80 else f"{text[:77]}..."


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given)
    if len(stops) > MOST_STOPS or not all(stops):
        raise BadRequestError(f"{len(stops)} stop sequences; allowed are up to {MOST_STOPS}, none empty", "stop")
    longest = max(map(len, stops), default=0)
    if longest > MOST_STOP_CHARACTERS:
        raise BadRequestError(
            f"a stop sequence of {longest} characters; allowed are {MOST_STOP_CHARACTERS}", "stop"
        )
    return stops


@contextlib.contextmanager
def _readable(says: str, param: str | None = None) -> Generator[None]:
    """What cannot be decoded inside is an error of the client.

    Raises:
        BadRequestError: beginning with `says`, or naming what is wrong with the encoding.
    """
    try:
        yield
    except msgspec.ValidationError as error:
        sentence, place = readable(str(error), param)
        raise BadRequestError(f"{says}: {sentence}" if param else sentence, place or None) from error
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"{says}: {error}", param) from error
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise BadRequestError("the body nests lists or objects too deep") from error


def _array(tokens: list[int], name: str = "prompt") -> npt.NDArray[np.int32]:
    if not tokens:
        raise BadRequestError("the prompt has no tokens; at least 1 is needed", name)
    if not (min(tokens) >= 0 and max(tokens) <= _MOST):
        raise BadRequestError(
            f"the prompt has token ids from {min(tokens)} to {max(tokens)}; allowed are 0 to {_MOST}", name
        )
    return np.asarray(tokens, dtype=np.int32)


def _parts(content: str | list[TextPart]) -> tuple[str, ...]:
    return (content,) if isinstance(content, str) else tuple(part.text for part in content)
