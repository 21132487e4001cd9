"""What a client's request says: OpenAI's JSON, checked, and every option we do not have refused by name."""

import secrets
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.serving.door.tokenizer import Message, Tokenizer
from mooncake_lab.serving.messages import Generation

MOST_PROMPTS: Final = 64
MOST_STOPS: Final = 16
_MOST_SEED: Final = 2**63 - 1


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Not OpenAI's: draw among so many tokens."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Not OpenAI's: end tokens do not end the answer."""
    return_token_ids: bool = False
    """Not OpenAI's: each choice also has `token_ids`."""
    user: str | None = None
    metadata: dict[str, str] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class Completion(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class Chat(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None


_Body = TypeVar("_Body", Completion, Chat)


class BadRequestError(ValueError):
    """A request that cannot be served as it is (HTTP 400), and the parameter it is about."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request as the cluster can serve it."""

    prompts: tuple[npt.NDArray[np.int32], ...]
    asked: Generation
    """The same for all prompts; where no limit is given, `max_new_tokens` is 0 and the window is the limit."""
    stops: tuple[str, ...]
    is_stream: bool
    include_usage: bool
    return_token_ids: bool
    is_chat: bool


def read_completion(body: bytes, tokenizer: Tokenizer, model: str) -> Wanted:
    """What a completion request wants.

    Raises:
        BadRequestError: saying which parameter is wrong, and what is allowed.
        LookupError: when it is for another model.
    """
    wish = _decode(body, Completion)
    _check_shared(wish, model)
    _refuse(best_of=(wish.best_of, (None, 1)), echo=(wish.echo, (None, False)), suffix=(wish.suffix, (None, "")))
    _refuse(logprobs=(wish.logprobs, (None,)))
    most = 16 if wish.max_tokens is None else _positive("max_tokens", wish.max_tokens)
    prompts = tuple(_array(prompt) for prompt in _prompts(wish.prompt, tokenizer))
    return _wanted(wish, prompts, most, is_chat=False)


def read_chat(body: bytes, tokenizer: Tokenizer, model: str) -> Wanted:
    """What a chat completion request wants; for its errors see `read_completion`."""
    wish = _decode(body, Chat)
    _check_shared(wish, model)
    _refuse(logprobs=(wish.logprobs, (None, False)), top_logprobs=(wish.top_logprobs, (None, 0)))
    _refuse(tools=(wish.tools, (None, [])), response_format=(wish.response_format, (None, {"type": "text"})))
    if not wish.messages:
        raise BadRequestError("there are no messages; at least one is needed", "messages")
    turns: list[Message] = [{"role": turn.role, "content": _text(turn.content)} for turn in wish.messages]
    try:
        prompt = _array(tokenizer.encode_chat(turns))
    except ValueError as error:
        raise BadRequestError(str(error), "messages") from error
    name = "max_tokens" if wish.max_completion_tokens is None else "max_completion_tokens"
    given = wish.max_completion_tokens if wish.max_completion_tokens is not None else wish.max_tokens
    most = 0 if given is None else _positive(name, given)
    return _wanted(wish, (prompt,), most, is_chat=True)


def _wanted(
    wish: Completion | Chat, prompts: tuple[npt.NDArray[np.int32], ...], most: int, *, is_chat: bool
) -> Wanted:
    stops = [] if wish.stop is None else [wish.stop] if isinstance(wish.stop, str) else wish.stop
    if len(stops) > MOST_STOPS or not all(stops):
        raise BadRequestError(f"{len(stops)} stop sequences; allowed are up to {MOST_STOPS}, none empty", "stop")
    options = wish.stream_options
    return Wanted(
        prompts=prompts,
        asked=Generation(
            prompt=b"",
            max_new_tokens=most,
            temperature=_between("temperature", wish.temperature, 1.0, 0.0, 2.0),
            top_p=_between("top_p", wish.top_p, 1.0, 1e-6, 1.0),
            top_k=None if wish.top_k is None else _positive("top_k", wish.top_k),
            # draws depend on seed and place alone, so that a request placed again goes on as it was
            seed=secrets.randbits(62) if wish.seed is None else _seed(wish.seed),
            end_tokens=() if wish.ignore_eos else None,
        ),
        stops=tuple(stops),
        is_stream=bool(wish.stream),
        include_usage=options is not None and options.include_usage,
        return_token_ids=wish.return_token_ids,
        is_chat=is_chat,
    )


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"the body is no such request: {error}") from error


def _check_shared(wish: Completion | Chat, model: str) -> None:
    if wish.model != model:
        raise LookupError(f"the model {wish.model!r} does not exist; this cluster serves {model!r}")
    _refuse(n=(wish.n, (None, 1)), logit_bias=(wish.logit_bias, (None, {})))
    _refuse(
        presence_penalty=(wish.presence_penalty, (None, 0)), frequency_penalty=(wish.frequency_penalty, (None, 0))
    )


def _refuse(**options: tuple[object, tuple[object, ...]]) -> None:
    """Refuse options that are asked for and not there, instead of ignoring them."""
    for name, (value, allowed) in options.items():
        if value not in allowed:
            raise BadRequestError(f"{name} is {value!r}, which this server does not offer; leave it out", name)


def _prompts(prompt: str | list[Any], tokenizer: Tokenizer) -> list[list[int]]:
    """One prompt or several, as text or as token ids: the four forms that OpenAI's API allows."""
    several: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not 1 <= len(several) <= MOST_PROMPTS:
        raise BadRequestError(f"{len(several)} prompts; allowed are 1 to {MOST_PROMPTS}", "prompt")
    found: list[list[int]] = []
    for one in several:
        if isinstance(one, str):
            found.append(tokenizer.encode(one))
        elif _is_ids(one):
            found.append(one)
        else:
            raise BadRequestError("a prompt is text, or a list of token ids, or a list of either", "prompt")
    return found


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _array(tokens: list[int]) -> npt.NDArray[np.int32]:
    if not tokens:
        raise BadRequestError("the prompt has no tokens; at least 1 is needed", "prompt")
    if not (min(tokens) >= 0 and max(tokens) < 2**31):
        raise BadRequestError(f"the prompt holds token ids {min(tokens)} to {max(tokens)}", "prompt")
    return np.asarray(tokens, dtype=np.int32)


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise BadRequestError(f"{name} is {value}; at least 1 is needed", name)
    return value


def _seed(value: int) -> int:
    if not 0 <= value <= _MOST_SEED:
        raise BadRequestError(f"seed is {value}; allowed are 0 to {_MOST_SEED}", "seed")
    return value


def _between(name: str, value: float | None, default: float, least: float, most: float) -> float:
    if value is None:
        return default
    if not least <= value <= most:
        raise BadRequestError(f"{name} is {value}; allowed are {least:g} to {most:g}", name)
    return value
