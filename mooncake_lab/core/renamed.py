"""Fields of settings that had another name in an earlier release."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

_Class = TypeVar("_Class")
_OLD_NAMES: Final[dict[type[Any], Mapping[str, str]]] = {}
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


def renamed_fields(**new_names: str) -> Callable[[type[_Class]], type[_Class]]:
    """Let a class refuse the old names of its fields with the new ones.

    Args:
        **new_names: the new name of each field by its old name.
    """

    def refuse_old(kind: type[_Class]) -> type[_Class]:
        make: Callable[..., None] = kind.__init__

        @functools.wraps(make)
        def checked(self: object, *values: Any, **settings: Any) -> None:
            for old, new in new_names.items():
                if old in settings:
                    raise TypeError(f"{kind.__name__} has no field {old}: its name is {new}")
            make(self, *values, **settings)

        setattr(kind, "__init__", checked)  # noqa: B010  # a type checker would look for `__init__` of this class
        _OLD_NAMES[kind] = new_names
        return kind

    return refuse_old


def old_names(kind: type[Any]) -> Mapping[str, str]:
    """The new name of each renamed field of a class, by its old name."""
    return _OLD_NAMES.get(kind, _NONE)
