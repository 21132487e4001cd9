"""The extras of the package: what each brings, and the one sentence where a library of one is missing.

Plain `pip install mooncake-lab` brings the simulator, the replay of caches, and traces. All else needs an extra.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "stats": ("numpy", "pandas"),
        "figures": ("matplotlib", "seaborn"),
        "engine": ("numba", "safetensors", "torch", "transformers"),
        "serve": ("jinja2", "prometheus_client", "starlette", "tokenizers", "uvicorn"),
        "book": ("jupyter_book", "latex2mathml", "nbconvert", "nbformat", "papermill"),
        "cluster": ("dask", "distributed"),
        "classroom": ("IPython", "nbformat", "nbgrader"),
    }
)
"""Each extra, and the modules that it brings beside those of the extras that it contains."""

CONTAINED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "figures": ("stats",),
        "engine": ("stats",),
        "serve": ("engine",),
        "book": ("engine", "figures"),
        "cluster": ("stats",),
        "classroom": ("stats",),
    }
)
"""The extras that an extra contains."""


class MissingExtraError(ModuleNotFoundError):
    """A library that an extra brings is not installed; the message names the extra."""


def _brings(extra: str, module: str) -> bool:
    return module in EXTRAS[extra] or any(_brings(each, module) for each in CONTAINED.get(extra, ()))


def missing_extra(error: ModuleNotFoundError, extra: str | None = None) -> MissingExtraError | None:
    """What to say of a module that could not be imported; None where no extra of ours brings it.

    Args:
        error: of the import.
        extra: the one that what was asked for needs, which is named if it brings the module.
    """
    module = (error.name or "").partition(".")[0]
    if extra is None or not _brings(extra, module):
        if isinstance(error, MissingExtraError):
            return error
        extra = next((name for name, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    sentence = f"{module} is not installed; this needs it: pip install 'mooncake-lab[{extra}]'"
    return MissingExtraError(sentence, name=error.name, path=error.path)


@contextmanager
def naming_extra(extra: str | None = None) -> Generator[None]:
    """Let imports in this block name the extra that is missing.

    Raises:
        MissingExtraError: when a library of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        sentence = missing_extra(error, extra)
        if sentence is None:
            raise
        raise sentence from error


def need(extra: str) -> None:
    """Check that the libraries of an extra are there, without importing them.

    Raises:
        MissingExtraError: naming the extra.
    """
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise missing_extra(ModuleNotFoundError(name=module), extra) or AssertionError(module)
