"""The traces of Alibaba Cloud's Bailian (Qwen): ids of 16-token blocks, and turns that name their parents.

`parent_chat_id` names the turn before, -1 the first of a conversation; where the parent is not in the file,
which begins in the middle of conversations, the turn begins a session here. What a turn's prompt has of the
answer before is less than that answer: the application leaves the thinking out. The id of the last block covers
padding.
"""

from collections.abc import Iterable
from typing import Annotated, Final, final

import msgspec
from msgspec import Meta

from mooncake_lab.workload.formats.rows import (
    LARGEST_LENGTH,
    LENGTH,
    TIME,
    UNIT_NAMES,
    JsonRecord,
    Reading,
    Row,
)

_Length = Annotated[int, Meta(ge=1, le=LARGEST_LENGTH)]


class BailianLine(msgspec.Struct, gc=False):
    """The fields that are read; `type` and `turn` are not."""

    chat_id: int
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[int]
    parent_chat_id: int = -1


_ALLOWED: Final = {
    "chat_id": "a whole number",
    "parent_chat_id": "the chat_id of an earlier turn, or -1",
    "input_length": LENGTH,
    "output_length": LENGTH,
    "hash_ids": "a list of whole numbers",
}


@final
class BailianReader:
    """Rows of Bailian's lines; it remembers the conversation and the time of each turn."""

    def __init__(self, reading: Reading) -> None:
        words = _ALLOWED | {"timestamp": TIME.format(unit=UNIT_NAMES[reading.unit])}
        self._records = JsonRecord(BailianLine, words)
        self._root: dict[int, int] = {}

    def rows(self, record: bytes) -> list[Row]:
        """One row."""
        line = self._records.decode(record)
        parent = line.parent_chat_id
        known = parent in self._root
        return [
            Row(
                at=line.timestamp,
                input_tokens=line.input_length,
                output_tokens=line.output_length,
                ids=line.hash_ids,
                session=str(self._root[parent] if known else line.chat_id),
                request=line.chat_id,
                wait_for=(parent,) if known else (),
            )
        ]

    def kept(self, row: Row) -> None:
        """Remember the conversation of a turn."""
        if isinstance(row.request, int) and row.session is not None:
            self._root[row.request] = int(row.session)

    def finish(self) -> Iterable[Row]:
        """Nothing."""
        return ()
