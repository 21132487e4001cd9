"""A small repository of notebooks to execute, so that no test waits for a chapter."""

from pathlib import Path

import msgspec
import pytest

PARAMETERS = 'scale: str = "classroom"  # how much work\nseed: int = 0  # of all\nout_dir: str = "out"  # numbers'


def _write_notebook(path: Path, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    """A notebook of code cells behind a parameters cell, on disk."""
    sources = [(source, []) for source in cells]
    if parameters is not None:
        sources.insert(0, (parameters, ["parameters"]))
    content = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell-{number}",
                "metadata": {"tags": tags} if tags else {},
                "source": source,
                "outputs": [],
                "execution_count": None,
            }
            for number, (source, tags) in enumerate(sources)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(content))
    return path


@pytest.fixture
def repository(tmp_path):
    """A folder with two quick notebooks that record a number, some data, and pinned requirements."""
    record = (
        "from pathlib import Path\n\nPath(out_dir).mkdir(exist_ok=True, parents=True)\n"
        'Path(out_dir, \'{}.json\').write_text(f\'{{{{"scale": "{{scale}}", "seed": {{seed}}}}}}\')'
    )
    _write_notebook(tmp_path / "notebooks" / "01_alpha.ipynb", record.format("alpha"), "2 + 2")
    _write_notebook(tmp_path / "notebooks" / "02_beta.ipynb", "21 * 2")
    (tmp_path / "data" / "paper").mkdir(parents=True)
    (tmp_path / "data" / "paper" / "facts.csv").write_text("a,1\n")
    (tmp_path / "requirements.lock").write_text("numpy==1\n")
    return tmp_path


@pytest.fixture
def write_notebook():
    """A function that writes a notebook of code cells behind a parameters cell."""
    return _write_notebook
