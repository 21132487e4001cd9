"""A notebook file as data, read without Jupyter: fast enough to ask of every chapter at every build."""

from pathlib import Path
from typing import Any

import msgspec


class Cell(msgspec.Struct, frozen=True):
    """One cell: its kind, its text, its tags, and what papermill wrote beside it."""

    cell_type: str
    source: str | list[str] = ""
    metadata: dict[str, Any] = {}
    outputs: list[Any] = []

    @property
    def text(self) -> str:
        """The source as one string; the file may hold a list of lines."""
        return joined(self.source)

    @property
    def tags(self) -> list[str]:
        """The cell's tags."""
        return self.metadata.get("tags", [])

    @property
    def has_begun(self) -> bool:
        """Whether papermill began to execute the cell; where a kernel dies it calls those behind finished, too."""
        return self.metadata.get("papermill", {}).get("start_time") is not None


class Notebook(msgspec.Struct, frozen=True):
    """The cells of a notebook and its metadata."""

    cells: list[Cell]
    metadata: dict[str, Any] = {}

    def computed(self) -> bytes:
        """What an execution depends on: the code and how it is shown; prose and captions are put in afterwards."""
        parts = [
            (cell.text, {name: value for name, value in cell.metadata.items() if name != "mystnb"})
            for cell in self.cells
            if cell.cell_type == "code"
        ]
        return msgspec.json.encode([parts, self.metadata], order="sorted")

    def code(self) -> str:
        """The code of all cells, as one text."""
        return "\n".join(cell.text for cell in self.cells if cell.cell_type == "code")

    def tagged(self, tag: str) -> list[Cell]:
        """The cells that carry a tag, in order."""
        return [cell for cell in self.cells if tag in cell.tags]


def read_notebook(path: Path) -> Notebook:
    """Read a notebook file (nbformat 4).

    Raises:
        ValueError: when the file is not a notebook; it says which and where it breaks.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Notebook)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a Jupyter notebook: {error}") from error


def joined(text: str | list[str]) -> str:
    """A text of a notebook, which may be stored as one string or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)
