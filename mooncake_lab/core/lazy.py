"""Names of a package that are imported when they are first used, because their modules need numpy.

The simulator must run where there is no numpy, and starts faster without it.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], object]:
    """A module-level `__getattr__` for a package.

    Args:
        package: the name of the package.
        modules: names by the submodule that defines them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def getattr_lazily(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{module_of[name]}")
        for each in modules[module_of[name]]:  # a module may have the name of what it defines
            setattr(sys.modules[package], each, getattr(module, each))
        return getattr(module, name)

    return getattr_lazily
