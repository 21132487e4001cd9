"""What msgspec finds wrong with a request, in a sentence that names the parameter."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_PLACED: Final = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_ENUM: Final = re.compile(r"Invalid enum value '(?P<value>.*)'", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*)`")
_TYPES: Final = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")
_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
        "object": "an object", "null": "null",
    }
)  # fmt: skip
_NOT_OFFERED: Final[Mapping[str, str]] = MappingProxyType(
    {"tool": "tools", "function": "tools", "tool_calls": "tools", "function_call": "tools", "audio": "sound"}
)
"""What a role, or a field of a message, would need."""


def readable(error: str, param: str | None = None) -> tuple[str, str]:
    """A sentence about an error of validation, and the parameter that it is about (empty: the whole body).

    Args:
        error: as msgspec words it.
        param: what was decoded, where it was not the whole body.
    """
    found = _PLACED.fullmatch(error)
    what, path = (found["what"], found["path"] or "") if found else (error, "")
    place = f"{param or ''}{path}".removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(what):
        place = _joined(place, unknown["field"])
        return f"{place} is no option of this server; leave it out", place
    if missing := _MISSING.fullmatch(what):
        place = _joined(place, missing["field"])
        return f"{place} is missing", place
    if value := _ENUM.fullmatch(what):
        return _wrong_value(value["value"], place), place
    if types := _TYPES.fullmatch(what):
        return _wrong_type(types["wanted"].split(" | "), types["got"], place), place
    return f"{place or 'the body'} cannot be used: {what}", place


def _wrong_value(value: str, place: str) -> str:
    short = repr(value[:80])
    if place.endswith(".type"):
        return f"{place} is {short}; this server reads text only, and the allowed type is 'text'"
    allowed = "allowed are 'system', 'developer', 'user' and 'assistant'"
    if value in _NOT_OFFERED:
        return f"{place} is {short}; this server offers no {_NOT_OFFERED[value]}: {allowed}"
    return f"{place} is {short}; {allowed}"


def _wrong_type(wanted: list[str], got: str, place: str) -> str:
    said = f"{place or 'the body'} is {_WORDS.get(got, got)}"
    field = place.rpartition(".")[2]
    if wanted == ["null"] and field in _NOT_OFFERED:
        return f"{said}; this server offers no {_NOT_OFFERED[field]}: allowed is null"
    return f"{said}; allowed is {' or '.join(_WORDS.get(one, one) for one in wanted)}"


def _joined(place: str, field: str) -> str:
    return f"{place}.{field[:80]}" if place else field[:80]
