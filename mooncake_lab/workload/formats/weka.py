"""Sessions of coding agents, as in Weka's and AgentX's traces: one object per session, ids local to it.

A session's `requests` are calls of the model (`n` or, streamed, `s`) and sub-agents with calls of their own.
Times are seconds from the session's beginning; when sessions begin is not in the file, so all of them begin
together here. The times of a sub-agent's calls are absolute; files in which they precede the sub-agent count
them from its start.

A call follows the call before it of the same agent. A sub-agent's first call follows the latest call that its
parent made before; the parent's next call follows the sub-agent's last, where the sub-agent had ended by then.
`hash_ids` cover the whole blocks of a prompt, and in some files the rest of it; a rest without an id is a block
of its own, as nothing says what is in it.
"""

from collections.abc import Iterable
from typing import Annotated, Final, Literal, final

import msgspec
from msgspec import Meta

from mooncake_lab.workload.formats.rows import (
    LARGEST_ID,
    LARGEST_LENGTH,
    LENGTH,
    TIME,
    UNIT_NAMES,
    FreshIds,
    JsonRecord,
    LineError,
    Reading,
    Row,
)

_Length = Annotated[int, Meta(ge=1, le=LARGEST_LENGTH)]
_Time = Annotated[float, Meta(ge=0)]
_Id = Annotated[int, Meta(ge=0)]


class WekaCall(msgspec.Struct, tag_field="type", tag="n", gc=False, kw_only=True):
    """A call of the model."""

    t: _Time
    input_length: _Length = msgspec.field(name="in")
    output_length: _Length = msgspec.field(name="out")
    hash_ids: list[_Id]
    api_time: _Time | None = None
    think_time: float | None = None


class WekaStream(WekaCall, tag_field="type", tag="s", gc=False, kw_only=True):
    """A call whose answer is streamed."""


class WekaSubagent(msgspec.Struct, tag_field="type", tag="subagent", kw_only=True):
    """An agent that another one starts."""

    t: _Time
    agent_id: str
    requests: list[WekaCall | WekaStream]


class WekaSession(msgspec.Struct, kw_only=True):
    """A session; what it says of models, tools and totals is not read."""

    id: str
    block_size: _Length
    hash_id_scope: Literal["local", "global"] = "local"
    requests: list[WekaCall | WekaStream | WekaSubagent]


_ALLOWED: Final = {
    "in": LENGTH,
    "out": LENGTH,
    "block_size": LENGTH,
    "hash_ids": "a list of whole numbers from 0",
    "hash_id_scope": "'local' or 'global'",
    "type": "'n', 's' or 'subagent'",
}
_END_S: Final = 1e-6


@final
class WekaReader:
    """Rows of sessions; ids of different sessions are different, unless the caller says that they are not."""

    def __init__(self, reading: Reading) -> None:
        self._block_size_tokens = reading.block_size_tokens
        self._scope = reading.scope
        unit = TIME.format(unit=UNIT_NAMES[reading.unit])
        times = {"t": unit, "api_time": f"{unit}, or null", "think_time": "a number or null"}
        self._records = JsonRecord(WekaSession, _ALLOWED | times)
        self._fresh = FreshIds()
        self._shared: dict[int, int] = {}
        self._names = set[str]()

    def rows(self, record: bytes) -> list[Row]:
        """The calls of a session, with those of its sub-agents."""
        session = self._records.decode(record)
        if session.id in self._names:
            raise LineError("id", repr(session.id), "one that no earlier session has")
        if self._block_size_tokens not in {None, session.block_size}:
            allowed = f"{self._block_size_tokens}, the block size of this trace"
            raise LineError("block_size", str(session.block_size), allowed)
        local = self._scope == "session" and session.hash_id_scope == "local"
        agent = _Agents(session, {} if local else self._shared, self._fresh)
        return agent.rows()

    def kept(self, row: Row) -> None:
        """Remember the session and its block size."""
        self._names.add(str(row.request).partition("\0")[0])
        self._block_size_tokens = row.block_size_tokens

    def finish(self) -> Iterable[Row]:
        """Nothing."""
        return ()


def _by_time(placed: tuple[int, WekaCall | WekaSubagent]) -> float:
    return placed[1].t


class _Agents:
    """The agents of one session."""

    def __init__(self, session: WekaSession, known: dict[int, int], fresh: FreshIds) -> None:
        self._session = session
        self._known = known
        self._fresh = fresh
        self._calls = 0
        self._rows = list[Row]()

    def rows(self) -> list[Row]:
        """All calls in order of time."""
        before: tuple[str, float | None] | None = None
        running = list[tuple[float, str]]()  # sub-agents: when the last call of each ends, and its name
        for place, each in sorted(enumerate(self._session.requests), key=_by_time):
            where = f"requests[{place}]"
            if isinstance(each, WekaSubagent):
                running += self._subagent(each, before, where)
                continue
            ended = [name for end, name in running if end <= each.t + _END_S]
            running = [one for one in running if one[1] not in ended]
            before = self._call(each, each.t, self._session.id, before, ended, where)
        return sorted(self._rows, key=lambda row: row.at)

    def _subagent(
        self, agent: WekaSubagent, parent: tuple[str, float | None] | None, where: str
    ) -> list[tuple[float, str]]:
        """Add a sub-agent's calls: when the last of them ends, and its name; nothing where it has none."""
        before, end = parent, agent.t
        for place, call in sorted(enumerate(agent.requests), key=_by_time):
            at = max(call.t, agent.t) if call.t + _END_S >= agent.t else agent.t + call.t
            inside = f"{where}.requests[{place}]"
            before = self._call(call, at, f"{self._session.id}/{agent.agent_id}", before, [], inside)
            end = max(end, at + (call.api_time or 0.0))
        return [(end, before[0])] if agent.requests and before is not None else []

    def _call(
        self,
        call: WekaCall,
        at: float,
        session: str,
        before: tuple[str, float | None] | None,
        ended: list[str],
        where: str,
    ) -> tuple[str, float | None]:
        """Add a call; its name, and when its answer ended, where that is known."""
        name = f"{self._session.id}\0{self._calls}"
        self._calls += 1
        idle = None if before is None or before[1] is None else max(0.0, at - before[1])
        self._rows.append(
            Row(
                at=at,
                input_tokens=call.input_length,
                output_tokens=call.output_length,
                ids=self._ids(call, where),
                block_size_tokens=self._session.block_size,
                session=session,
                delay=call.think_time if idle is None and call.think_time and call.think_time >= 0 else idle,
                request=name,
                wait_for=() if before is None else (before[0], *(one for one in ended if one != before[0])),
            )
        )
        return name, None if call.api_time is None else at + call.api_time

    def _ids(self, call: WekaCall, where: str) -> list[int]:
        """The ids of a prompt, each of its own in this trace.

        Raises:
            LineError: when they are not one for each block.
        """
        whole, rest = divmod(call.input_length, self._session.block_size)
        if len(call.hash_ids) - whole not in ({0, 1} if rest else {0}):
            allowed = (
                f"{whole} ids, one for each block of {self._session.block_size} of {call.input_length} tokens"
            )
            more = f", or {whole + 1} with the rest" if rest else ""
            raise LineError(f"{where}.hash_ids", f"a list of {len(call.hash_ids)} ids", allowed + more)
        if call.hash_ids and max(call.hash_ids) > LARGEST_ID:
            raise LineError(
                f"{where}.hash_ids", f"a list with {max(call.hash_ids)}", f"numbers up to {LARGEST_ID}"
            )
        known, fresh = self._known, self._fresh
        ids = list[int]()
        for block in call.hash_ids:
            if block not in known:
                known[block] = fresh.take(1)[0]
            ids.append(known[block])
        return ids + fresh.take(1) if len(ids) == whole and rest else ids
