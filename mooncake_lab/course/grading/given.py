"""What a submission gets of this package: types, views and the estimator, but none of the answers.

The process of a submission imports the package through `install`. The modules of `GIVEN` are loaded. A package
such as `mooncake_lab.store` is not executed, because it would load every policy: it becomes a module whose names
come from those modules. Every other module and name of `mooncake_lab` is withheld: it can be imported and stand
in a type hint, and any other use raises `WithheldError`. When the cells run, nothing withheld is in the memory of
their process, and Landlock keeps the files of the package from being read (`confine.py`).

Of the standard library only, because it comes before the package.
"""

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

_ROOT: Final = "mooncake_lab"
GIVEN: Final = tuple(
    f"{_ROOT}.{name}"
    for name in (
        "batching.instance",
        "batching.plan",
        "batching.replay",
        "conductor.decide",
        "conductor.estimator",
        "conductor.history",
        "conductor.view",
        "core.files",
        "core.log",
        "core.project",
        "core.request",
        "core.units",
        "course.grading.candidate",
        "course.grading.confine",
        "course.grading.messages",
        "course.round_estimates",
        "net.frames",
        "perf.cpp",
        "perf.latency",
        "perf.roofline",
        "perf.specs",
        "store.eviction.policy",
    )
)
"""The modules that a submission gets. No registered policy is defined in one of them; a test holds it."""
_EXECUTED: Final = (_ROOT, f"{_ROOT}.course", f"{_ROOT}.course.grading")
"""Packages that import nothing."""
_TOOLS: Final = f"{_ROOT}.course."
"""The checks that a notebook runs for the student. In the grader they do nothing, quietly."""


class WithheldError(RuntimeError):
    """A submission used what it must write itself."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not available to a submission: use what the given cells import, and write the rest"
        )


class Withheld:
    """Stands for a name that is withheld: good for a type hint and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __or__(self, other: object) -> object:
        return self

    __ror__ = __or__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise WithheldError(self._name)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise WithheldError(self._name)

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _refuse
    __getitem__ = __iter__ = __len__ = __contains__ = __enter__ = _refuse


class Quiet:
    """Stands for a check of the notebook and for all that comes of it: false, empty and zero where asked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _given(self, *_: object, **__: object) -> "Quiet":
        return self

    __call__ = __getitem__ = _given

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __str__(self) -> str:
        return "not computed while a submission is graded"

    def __format__(self, _: str) -> str:
        return str(self)

    def _itself(self, _: object) -> "Quiet":
        return self

    def _always(self, _: object) -> bool:
        return True

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _itself
    __lt__ = __le__ = __gt__ = __ge__ = _always


class _Package(ModuleType):
    """A package that is not executed; its names come from modules that are given, or are withheld."""

    def __init__(self, name: str, finder: "_Finder") -> None:
        super().__init__(name)
        self.__path__ = []
        self.__all__ = sorted(finder.names.get(name, {}))
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        if whole in self._finder.modules:
            return importlib.import_module(whole)
        home = self._finder.home(self.__name__, name)
        found = getattr(importlib.import_module(home), name) if home else _withheld(whole)
        setattr(self, name, found)
        return found


def _withheld(name: str) -> Any:
    return Quiet() if name.startswith(_TOOLS) else Withheld(name)


class _Finder(MetaPathFinder, Loader):
    """Finds every module of the package, given or withheld, and nothing else."""

    def __init__(self, package: Path) -> None:
        self._package = package
        files = [path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py")]
        self.modules = frozenset(".".join(path.parts).removesuffix(".__init__") for path in files)
        folders = {name.rpartition(".")[0] for name in GIVEN} - {*_EXECUTED}
        self.names = MappingProxyType({name: self._imported(name) for name in self._above(folders)})
        """Of each package, the names that it imports, and from where."""
        self._homes = MappingProxyType(
            {name: home for names in self.names.values() for name, home in names.items() if home in GIVEN}
        )

    def home(self, module: str, name: str) -> str:
        """The given module in which a name of another module is defined; empty where the name is withheld.

        A module that is withheld has the given names, too, because it may import them.
        """
        if module not in self.names:
            return self._homes.get(name, "")
        home = self.names[module].get(name, "")
        return self.home(home, name) if home in self.names else home if home in GIVEN else ""

    @staticmethod
    def _above(folders: set[str]) -> list[str]:
        parts = [name.split(".") for name in folders]
        return sorted({".".join(each[:end]) for each in parts for end in range(2, len(each) + 1)})

    def _imported(self, name: str) -> dict[str, str]:
        """The names that a package imports from modules of this package, and which module each comes from."""
        text = self._package.parent.joinpath(*name.split("."), "__init__.py").read_text(encoding="utf-8")
        return {
            alias.asname or alias.name: statement.module
            for statement in ast.parse(text).body
            if isinstance(statement, ast.ImportFrom) and statement.module
            for alias in statement.names
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A given module from its file, every other one from here."""
        del path, target
        if fullname not in self.modules:
            return None
        if fullname in {*GIVEN, *_EXECUTED}:
            folder = self._package.parent.joinpath(*fullname.split(".")[:-1])
            return PathFinder.find_spec(fullname, [str(folder)])
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A package whose names are looked up when they are asked for."""
        return _Package(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed."""


def install(package: Path) -> None:
    """Load what is given of the package in this folder; from now on it is imported as a submission gets it."""
    sys.meta_path.insert(0, _Finder(package))
    for name in GIVEN:
        importlib.import_module(name)
