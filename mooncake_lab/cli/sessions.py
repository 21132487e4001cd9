"""The options of clients that wait for their answers, for `simulate` and `replay`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import typer

from mooncake_lab.cli.options import at_least, bad_usage_if
from mooncake_lab.core import TracedRequest
from mooncake_lab.workload.sessions import ClientRules, RequestOutcome

Sessions = Annotated[
    bool,
    typer.Option(
        "--sessions",
        help="A closed loop: each turn of a session is sent `delay` after the answers that it waits for"
        " (`wait_for`, or the turn before it); without a `delay` at its recorded time, if its answers are there.",
    ),
]
Concurrency = Annotated[
    int | None,
    at_least(1, "So many sessions at once instead of their recorded beginnings: the next begins when one ends."),
]
Retries = Annotated[
    int, at_least(0, "How often a client sends a request again that was refused for load, after Retry-After.")
]
FirstTokenPatience = Annotated[
    float | None, at_least(1e-3, "A client without its first token after so long leaves (s).")
]
AnswerPatience = Annotated[
    float | None, at_least(1e-3, "A client without its whole answer after so long leaves (s).")
]
KeepAnswers = Annotated[
    bool,
    typer.Option(
        "--keep-answers",
        help="Decode nodes send the KVCache of answers back, so that the next turn does not prefill them.",
    ),
]


def rules_of(said: dict[str, Any]) -> ClientRules:
    """How clients behave by the options of a command; options that need `--sessions` are refused without it."""
    names = ("concurrency", "retries", "first_token_patience", "answer_patience")
    lone = [name for name in names if said[name] and not said["sessions"]]
    bad_usage_if(*((True, f"--{name.replace('_', '-')} is for --sessions") for name in lone))
    patience = {
        f"{name}_s": said[name] for name in ("first_token_patience", "answer_patience") if said[name] is not None
    }
    return ClientRules(retries=said["retries"], **patience)


class Played(Protocol):
    """The clients of either runtime, after their sessions have ended."""

    @property
    def sent(self) -> Sequence[TracedRequest]:
        """Each request."""
        ...

    @property
    def served(self) -> Mapping[int, RequestOutcome]:
        """How each turn ended."""
        ...

    @property
    def not_sent(self) -> int:
        """Turns whose answers did not come."""
        ...


def numbers_of(clients: Played | None) -> dict[str, int]:
    """What became of sessions; nothing where requests did not come from clients."""
    if clients is None:
        return {}
    answered = len([served for served in clients.served.values() if served.is_answered])
    retried = len([traced for traced in clients.sent if traced.request.retry_of is not None])
    turns = len(clients.served) + clients.not_sent
    return {
        "turns": turns,
        "turns_answered": answered,
        "turns_not_sent": clients.not_sent,
        "retries_sent": retried,
    }
