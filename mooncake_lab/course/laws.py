"""What the contracts share. A law is one rule of a contract; a report lists which laws a policy breaks."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Subject = TypeVar("Subject")


def require(holds: bool, message: str) -> None:
    """Break a law with a sentence.

    Raises:
        AssertionError: unless it holds.
    """
    if not holds:
        raise AssertionError(message)


def said(error: Exception) -> str:
    """The text of an error in a report: the sentence of the broken law, or the type and text of another error."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def broken_laws(laws: Mapping[str, Callable[[Subject], None]], subject: Subject) -> dict[str, str]:
    """The laws that a policy breaks, by name, and what went wrong."""
    broken: dict[str, str] = {}
    for name, law in laws.items():
        try:
            law(subject)
        except Exception as error:  # noqa: BLE001  # whatever a student's code raises is a finding, not our failure
            broken[name] = said(error)
    return broken


def law_lines(laws: Mapping[str, object], broken: Mapping[str, str]) -> list[str]:
    """A line for each law: ok, or FAILED with the reason."""
    return [
        f"{'FAILED' if name in broken else 'ok    '}  {name}" + (f": {broken[name]}" if name in broken else "")
        for name in laws
    ]
