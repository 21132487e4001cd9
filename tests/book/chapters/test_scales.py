"""Every chapter can run at every scale."""

import importlib
import pkgutil

from mooncake_lab.book import chapters
from mooncake_lab.core import SCALES


def test_every_table_by_scale_has_every_scale():
    """A notebook that is asked for a scale must not end in a KeyError."""
    tables = 0
    for module in pkgutil.walk_packages(chapters.__path__, "mooncake_lab.book.chapters."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, dict) and {"smoke", "classroom"} <= value.keys():
                assert value.keys() == set(SCALES), f"{module.name}.{name}"
                tables += 1
    assert tables > 10
