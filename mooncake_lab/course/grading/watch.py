"""What a running submission costs, as the kernel tells it: time asleep while it is waited for, and page tables."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooncake_lab.core import MIB

LOOK_S: Final = 0.25
"""Between two looks at a process that is waited for."""
SLEEPER_S: Final = 30.0
"""How long a submission is waited for before it is judged whether it sleeps."""
SLEEPER_SHARE: Final = 0.1
"""Of a core; whoever uses less sleeps."""
MOST_TABLE_BYTES: Final = 64 * MIB
"""Limit for page tables. 2 GiB of memory in one piece need 4 MiB; 65,530 pieces of a page each need 1 GiB."""
_BUSY_STATES: Final = frozenset("RD")
"""Running or waiting for a core; waiting for a disk."""


@dataclass(slots=True)
class Wait:
    """How long a submission was waited for, and how much of that it was busy; over all its processes. Mutable."""

    waited_s: float = 0.0
    busy_s: float = 0.0

    def sleeps(self) -> bool:
        """Whether it was asleep for nearly all of the last `SLEEPER_S` seconds; then the next ones are judged."""
        if self.waited_s < SLEEPER_S:
            return False
        sleeps = self.busy_s < SLEEPER_SHARE * self.waited_s
        self.waited_s = self.busy_s = 0.0
        return sleeps


class Watch:
    """Looks at one process; mutable because time passes.

    A submission that waits for a core, because the machine is overloaded, does not sleep: the time in the queue of
    the scheduler counts like the time on a core. Nor does one that has answered a grader that waits for a core
    itself: its time in the queue is no time in which it waits for the submission.
    """

    def __init__(self, pid: int, wait: Wait) -> None:
        self._folder = Path("/proc", str(pid))
        self._wait = wait
        self._unseen_s = self._queued_s = self._busy_s = 0.0
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this kernel does not count
            self._queued_s, self._busy_s = self._queued_so_far_s(), self._busy_so_far_s()

    def waited(self, seconds: float, *, silent: bool) -> str:
        """Count a wait, and look now and then.

        Args:
            seconds: how long; of a long one only the first second counts, because the grader itself was stopped.
            silent: whether no answer came.

        Returns:
            Why the submission has to end; empty when it may go on.
        """
        self._unseen_s += min(seconds, 1.0)
        if self._unseen_s < LOOK_S:
            return ""
        try:
            return self._look(silent=silent)
        except (OSError, ValueError, IndexError):
            return ""  # the process has just ended

    def _look(self, *, silent: bool) -> str:
        queued_s, self._queued_s = self._queued_s, self._queued_so_far_s()
        unseen_s, self._unseen_s = max(self._unseen_s - max(self._queued_s - queued_s, 0.0), 0.0), 0.0
        before_s, self._busy_s = self._busy_s, self._busy_so_far_s()
        held_up = silent and self._state() in _BUSY_STATES
        self._wait.waited_s += unseen_s
        self._wait.busy_s += unseen_s if held_up else min(self._busy_s - before_s, unseen_s)
        if (tables := self._table_bytes()) > MOST_TABLE_BYTES:
            most = MOST_TABLE_BYTES // MIB
            return f"its memory is in too many pieces: page tables of {tables // MIB} MiB; allowed are {most}"
        if self._wait.sleeps():
            return f"it used less than {SLEEPER_SHARE:.0%} of a core for {SLEEPER_S:g} s; does it sleep?"
        return ""

    def _busy_so_far_s(self) -> float:
        """Time on a core and in the queue for one."""
        on_core, queued, _ = map(int, (self._folder / "schedstat").read_text(encoding="ascii").split())
        return (on_core + queued) / 1e9

    def _queued_so_far_s(self) -> float:
        """Time of this thread of the grader in the queue for a core."""
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9

    def _state(self) -> str:
        return (self._folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]

    def _table_bytes(self) -> int:
        lines = (self._folder / "status").read_text(encoding="ascii", errors="replace").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmPTE:")), 0)
