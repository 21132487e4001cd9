"""Where the papers' numbers lie, and how their tables are read."""

import csv
from pathlib import Path

from mooncake_lab.core import carried_folder


def data_dir() -> Path:
    """The directory that holds `index.csv`, `curves/`, `constants.csv`, `claims.csv` and the rest.

    Raises:
        FileNotFoundError: naming the places searched, when none of them holds the data.
    """
    return carried_folder("paper")


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of one CSV file below `data_dir()`, as text by column.

    Raises:
        ValueError: naming file and line, when a row has more or fewer fields than the header.
    """
    path = data_dir() / name
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader)
        rows: list[dict[str, str]] = []
        for fields in reader:
            if len(fields) != len(header):
                raise ValueError(
                    f"{path}:{reader.line_num}: {len(fields)} fields where the header names {len(header)}"
                )
            rows.append(dict(zip(header, fields, strict=True)))
    return rows
