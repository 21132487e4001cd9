"""What a runtime does for the coordinator: a method for each command, in simulated and in real time."""

from typing import Protocol, assert_never

from mooncake_lab.cluster import events
from mooncake_lab.cluster.events import Command


class Executor(Protocol):
    """Carries out commands. What follows from a command is reported as events, which the methods name."""

    def set_timer(self, command: events.SetTimer) -> None:
        """Wait; then `TimerFired`."""
        ...

    def prepare_decode(self, command: events.PrepareDecode) -> None:
        """Let a decode instance expect the KVCache of a request; no event follows."""
        ...

    def run_prefill(self, command: events.RunPrefill) -> None:
        """Fetch the prefix, compute the prompt, move its KVCache: all events from `FetchStarted` to `KVArrived`.

        A coupled instance computes the prompt and decodes: all events from `ChunkDone` to `RequestDone`.
        """
        ...

    def start_decode(self, command: events.StartDecode) -> None:
        """Load the KVCache of a request and decode it: all events from `KVLoaded` to `RequestDone`."""
        ...

    def cancel_attempt(self, command: events.CancelAttempt) -> None:
        """Let an instance stop an attempt; `PrefillDropped` follows if the prompt waits there."""
        ...

    def confirm_instances(self, command: events.ConfirmInstances) -> None:
        """Find out of each instance whether it is up: `InstanceConfirmed` or `InstanceDown`."""
        ...

    def reject(self, command: events.Reject) -> None:
        """Tell the client of a request that it is not served; no event follows."""
        ...

    def finish(self, command: events.Finish) -> None:
        """Tell the client of a request that its answer is complete; no event follows."""
        ...


def carry_out(command: Command, executor: Executor) -> None:
    """Let a runtime carry out a command of any kind.

    Raises:
        AssertionError: when the command is of none of the known kinds. A type checker reports a kind that was
            added to `Command` and is missing here.
    """
    if isinstance(command, events.SetTimer):
        executor.set_timer(command)
    elif isinstance(command, events.PrepareDecode):
        executor.prepare_decode(command)
    elif isinstance(command, events.RunPrefill):
        executor.run_prefill(command)
    elif isinstance(command, events.StartDecode):
        executor.start_decode(command)
    elif isinstance(command, events.Finish):
        executor.finish(command)
    elif isinstance(command, events.Reject):
        executor.reject(command)
    elif isinstance(command, events.CancelAttempt):
        executor.cancel_attempt(command)
    elif isinstance(command, events.ConfirmInstances):  # pyright: ignore[reportUnnecessaryIsInstance]
        executor.confirm_instances(command)
    else:
        assert_never(command)
