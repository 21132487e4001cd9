"""Mooncake's own wheel on a machine that cannot load it."""

import importlib
import os

import pytest

from mooncake_lab.net.mooncake_wheel import MooncakeError, load_wheel


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "libibverbs.so.1.*apt-get install -y libibv",
        ),
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install '\.\[mooncake\]'"),
    ],
)
def test_what_is_missing_is_said_with_how_to_install_it(monkeypatch, error, said):
    """A system library and the wheel itself: the sentence names what to install."""

    def refuse(_name):
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setitem(os.environ, "MC_LOG_LEVEL", "ERROR")
    with pytest.raises(MooncakeError, match=said):
        load_wheel()
