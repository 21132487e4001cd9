"""Where the papers' numbers lie, and how their tables are read.

The search order is: the data that a built package carries beside this module, then `data/paper` of the
checkout that this module belongs to. Nothing is downloaded and nothing is guessed.
"""

import csv
from importlib import resources
from pathlib import Path


def data_dir() -> Path:
    """The directory that holds `index.csv`, `curves/`, `constants.csv`, `claims.csv` and the rest.

    Raises:
        FileNotFoundError: naming the places searched, when none of them holds the data.
    """
    packaged = Path(str(resources.files("mooncake_lab.paper"))) / "data"
    checkout = Path(__file__).resolve().parents[2] / "data" / "paper"
    for place in (packaged, checkout):
        if (place / "index.csv").is_file():
            return place
    raise FileNotFoundError(
        f"the papers' numbers are neither in {packaged} nor in {checkout}; index.csv must be there"
    )


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
