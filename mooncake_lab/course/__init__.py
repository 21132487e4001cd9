"""The classroom: the contracts of policies as laws, reports on which laws a policy breaks, and grading."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

Subject = TypeVar("Subject")


def require(holds: bool, message: str) -> None:
    """Break a law with a sentence.

    Raises:
        AssertionError: unless it holds.
    """
    if not holds:
        raise AssertionError(message)


def contract(*laws: Callable[[Subject], None]) -> Mapping[str, Callable[[Subject], None]]:
    """Laws by name, the words of their functions: one law per rule.

    Each raises `AssertionError` with what went wrong when a policy breaks it.
    """
    return MappingProxyType({law.__name__.replace("_", " "): law for law in laws})


def examine(
    laws: Mapping[str, Callable[[Subject], None]], subject: Subject, score: Callable[[], float], blamed: str
) -> tuple[Mapping[str, str], float | None]:
    """Hold a policy to a contract; a bad policy is a finding, not an exception.

    Args:
        laws: the contract.
        subject: the policy, or what makes it.
        score: how good it is.
        blamed: the law that a policy has also broken whose score cannot be computed.

    Returns:
        The broken laws by name with what went wrong, and the score; None where it cannot be computed.
    """
    broken: dict[str, str] = {}
    for name, law in laws.items():
        try:
            law(subject)
        except Exception as error:  # noqa: BLE001  # whatever a student's code raises is a finding, not our failure
            broken[name] = _told(error)
    try:
        return MappingProxyType(broken), score()
    except Exception as error:  # noqa: BLE001  # likewise
        broken.setdefault(blamed, _told(error))
    return MappingProxyType(broken), None


def _told(error: Exception) -> str:
    """The sentence of a broken law, or the type and text of another error."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFindings:
    """What a check found; print it to read it. Each contract has a report of its own."""

    broken: Mapping[str, str]
    """Name of each broken law, and what went wrong."""

    @property
    def passed(self) -> bool:
        """Whether every law holds."""
        return not self.broken

    def told(self, laws: Mapping[str, object], comparison: str) -> str:
        """A line for each law: ok, or FAILED with the reason; then how the policy compares with ours."""
        lines = [f"FAILED  {law}: {self.broken[law]}" if law in self.broken else f"ok      {law}" for law in laws]
        return "\n".join([*lines, comparison])
