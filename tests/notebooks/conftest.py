"""The chapters, one test each."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_generate_tests(metafunc):
    """Parametrise by glob: a new notebook is tested from its first commit."""
    if "chapter" in metafunc.fixturenames:
        chapters = sorted((ROOT / "notebooks").glob("*.ipynb"))
        metafunc.parametrize("chapter", chapters, ids=[path.stem for path in chapters])


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
