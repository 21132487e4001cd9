"""Tables of `data/paper` whose rows go by a name: the models and the machines."""

import csv
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec

from mooncake_lab.core import carried_folder

Row = TypeVar("Row")


def named_rows(file_name: str, kind: type[Row]) -> Mapping[str, Row]:
    """The rows of a CSV file by their column `name`, as values of a dataclass; an empty field has its default."""
    with (carried_folder("paper") / file_name).open(encoding="utf-8", newline="") as file:
        rows = [{column: text for column, text in row.items() if text} for row in csv.DictReader(file)]
    return MappingProxyType({row["name"]: msgspec.convert(row, kind, strict=False) for row in rows})
