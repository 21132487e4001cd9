"""A model's chat template: conversations to text, as transformers renders them, and none of it lost on the way."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, Final, final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

_REMEMBERED: Final = 256
"""Shapes of conversations whose forms are remembered."""
_MARK: Final = re.compile(r"zq(\d{6})qz")
"""Stands for the text of a message."""
_LAST_WORD: Final = re.compile(r"(\w{1,40})\W*\Z")
_REASONING_END: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    parts: tuple[str, ...]
    """Pieces of its text."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a template takes conversations of one shape."""

    roles: tuple[str, ...]
    as_parts: tuple[bool, ...]
    """Which messages it takes as lists of parts, not as strings."""


@final
class ChatTemplate:
    """Renders conversations. Immutable, and safe to use from several threads.

    The text of each message reaches the model, or the conversation is refused. So each shape of a conversation
    (roles, and which messages are empty) is rendered once with marks in the place of its texts. Where marks are
    missing the messages are handed over as lists of parts, and `developer` as `system`.

    Args:
        source: the template, in Jinja's language.
        special: names of special tokens, such as `bos_token`, and their texts.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source = source
        self._special = dict(special)
        self._form = lru_cache(_REMEMBERED)(self._find_form)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation, up to where the model's answer begins.

        Raises:
            ValueError: when the template refuses the conversation, or would lose a part of it.
        """
        form = self._form(
            tuple(each.role for each in messages), tuple(bool(each.text.strip()) for each in messages)
        )
        try:
            prompt = self._rendered(form, [each.parts for each in messages])
        except Exception as error:
            raise _refused(error) from error
        place, folded = 0, prompt.casefold()
        for index, message in enumerate(messages):
            word = _LAST_WORD.search(next((part for part in reversed(message.parts) if part.strip()), ""))
            if word is None or _REASONING_END in message.text:  # templates drop how former answers were found
                continue
            place = max(folded.find(word[1].casefold(), place), folded.find(word[1].casefold()))
            if place < 0:
                raise _lost(index, message.role)
        return prompt

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        names = {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict()}
        return environment.from_string(self._source, globals={**names, "namespace": _Namespace})

    def _find_form(self, roles: tuple[str, ...], filled: tuple[bool, ...]) -> _Form:
        """The first form in which every text that is not empty reaches the prompt.

        Raises:
            ValueError: when no form does that.
        """
        problems: list[ValueError] = []
        as_system = tuple("system" if role == "developer" else role for role in roles)
        strings, lists = (False,) * len(roles), (True,) * len(roles)
        for known in dict.fromkeys((roles, as_system)):
            lost = set[int]()
            for as_parts in (strings, None, lists):  # None: as parts what was lost as strings
                form = _Form(known, as_parts or tuple(index in lost for index in range(len(roles))))
                try:
                    lost = self._lost(form, filled)
                except Exception as error:  # noqa: BLE001  # the template's own, of any kind
                    problems.append(_refused(error))
                    continue
                if not lost:
                    return form
                problems.append(_lost(min(lost), roles[min(lost)]))
        raise problems[0]

    def _lost(self, form: _Form, filled: tuple[bool, ...]) -> set[int]:
        """The messages whose text is not in the prompt; all, where a list is printed as Python prints it."""
        marks = [(f"zq{index:06d}qz" if is_filled else "",) for index, is_filled in enumerate(filled)]
        prompt = self._rendered(form, marks)
        wanted = {index for index, is_filled in enumerate(filled) if is_filled}
        if any(form.as_parts) and re.search(r"['\"]type['\"]: *['\"]text['\"]", prompt):
            return wanted
        return wanted - {int(mark) for mark in _MARK.findall(prompt.casefold())}

    def _rendered(self, form: _Form, texts: Sequence[tuple[str, ...]]) -> str:
        messages: list[dict[str, Any]] = [
            {
                "role": role,
                "content": [{"type": "text", "text": part} for part in parts] if split else "".join(parts),
            }
            for role, split, parts in zip(form.roles, form.as_parts, texts, strict=True)
        ]
        return self._compiled.render(
            **self._special
            | {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        )


def _refused(error: Exception) -> ValueError:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return ValueError(f"the model's chat template is not valid Jinja: line {error.lineno}: {error.message}")
    return ValueError(f"the model's chat template refuses this conversation: {error}")


def _lost(index: int, role: str) -> ValueError:
    return ValueError(
        f"the model's chat template drops text of message {index} (role {role}); the model would not see it"
    )


@final
class _Generation(jinja2.ext.Extension):
    """The block `generation`, which marks what the model wrote for training. Here it is only what it contains."""

    tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call of what it contains, which has a scope of its own for that."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("contents"), [], [], body).set_lineno(line)

    def contents(self, caller: jinja2.runtime.Macro) -> str:
        """What the block contains."""
        return str(caller())


@final
class _Dict:
    """What templates may do with the name `dict`."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """A dict with these keys, as in Python."""
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names by which a template could reach the interpreter."""

    def __init__(*args: Any, **fields: Any) -> None:  # a field may be called `self`
        self, *rest = args
        found = dict(*rest, **fields)
        for name in found:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no field {name!r}; none may begin with _")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # templates pass it by place
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(wanted: str) -> str:
    return datetime.now().strftime(wanted)  # noqa: DTZ005  # the local time, as in transformers
