"""Which statements were written for the twin of a trace that this build found as it was released.

The pages are those of a run with the released traces of `BOOK_TRACES` and twins of all others. A statement rests
on another trace where its expressions name the trace, or read a table with rows of it and name no trace at all.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pandas as pd

from mooncake_lab.book.rendering.expressions import Records, unknown_names
from mooncake_lab.book.rendering.plan import topic_of
from mooncake_lab.book.rendering.provenance import BOOK_TRACES, Provenance
from mooncake_lab.book.rendering.statement_files import read_statements
from mooncake_lab.workload import RELEASES

_WORD: Final = re.compile(r"\w+")
_ELSEWHERE: Final = re.compile(r"record\('(\w+)'\)\.(\w+)")


def found_besides(provenance: Provenance) -> tuple[str, ...]:
    """The released traces of a run that the pages were not written for."""
    return tuple(name for name, sha in provenance.traces.items() if sha is not None and name not in BOOK_TRACES)


def written_for_twins(statements: Path, records: Records, traces: Iterable[str]) -> dict[str, list[str]]:
    """The fragments that rest on some traces, by the stem of their page.

    Args:
        statements: the folder of the statements' files.
        records: what the chapters put on record.
        traces: workloads, such as those of `found_besides`.
    """
    wanted = {*traces}
    found: dict[str, list[str]] = {}
    for path in sorted(statements.glob("*.toml")):
        let, each_of_page = read_statements(path)
        topic = topic_of(path)
        for each in each_of_page:
            expressions = [*_expanded((*each.values.values(), *each.holds), let)]  # noqa: PD011 - no table
            named = {word for text in expressions for word in _WORD.findall(text)} & RELEASES.keys()
            rows = {trace for text in expressions for trace in _rows_of(text, topic, records)}
            if (named or rows) & wanted:
                found.setdefault(path.stem, []).append(each.text)
    return found


def _expanded(expressions: Iterable[str], let: Mapping[str, str]) -> Iterator[str]:
    """Expressions, and those of the names that they use."""
    waiting, seen = [*expressions], set[str]()
    while waiting:
        text = waiting.pop()
        yield text
        used = (unknown_names(text) & let.keys()) - seen
        seen |= used
        waiting += [let[name] for name in used]


def _rows_of(expression: str, topic: str, records: Records) -> set[str]:
    """The traces of the rows of all tables that an expression reads."""
    read = [(topic, name) for name in unknown_names(expression)] + _ELSEWHERE.findall(expression)
    there = records.topics()
    tables = [getattr(records.of(where), name, None) for where, name in read if where in there]
    columns = [table["workload"] for table in tables if isinstance(table, pd.DataFrame) and "workload" in table]
    return {str(trace) for column in columns for trace in column.unique()}
