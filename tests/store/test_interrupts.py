"""Ctrl-C at any line of the store: what was under way is finished or undone, and nothing stays pinned."""

import contextlib
import linecache
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from tier_blocks import LAYERS, PAGE, content, put, read

import mooncake_lab.store
from mooncake_lab.store.backends import DramBackend, StorageError
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

ROOT = str(Path(mooncake_lab.store.__file__).parent)
HELD = [b"held %d" % number for number in range(4)]

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="Python handles signals in the main thread"
)


@pytest.fixture(autouse=True)
def _ctrl_c_raises():
    """SIGINT raises KeyboardInterrupt, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupt:
    """Sends SIGINT when the store is about to run its n-th line; counts lines without one. Mutable: it counts."""

    def __init__(self, line=None):
        self.line = line
        self.lines = 0

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_error):
        sys.settrace(None)

    def _call(self, frame, _event, _argument):
        return self._line if frame.f_code.co_filename.startswith(ROOT) else None

    def _line(self, frame, event, _argument):
        # `with lock:` is a line once more at its end, where real signals are not handled
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not re.match(r"\s*with self\._?lock\b", text):
            self.lines += 1
            if self.lines == self.line:
                signal.raise_signal(signal.SIGINT)
        return self._line


@contextlib.contextmanager
def full_store():
    """A small store of two tiers, the upper one full."""
    dram, below = DramBackend(8 * PAGE, name="dram"), DramBackend(64 * PAGE, name="below")
    with TieredStore([TierSettings(medium=dram, queue_bytes=2 * PAGE), TierSettings(medium=below)]) as store:
        put(store, *HELD)
        yield store
    dram.close()
    below.close()


def open_and_commit(store):
    """A block whose layers come one by one, given up by its writer when it is interrupted."""
    block = store.open(b"new", LAYERS)
    try:
        for layer, data in enumerate(content(b"new")):
            block.write([data], first_layer=layer)
        block.commit()
    finally:
        try:
            block.abandon()
        except KeyboardInterrupt:  # before it began
            block.abandon()
            raise


ACTIONS = {
    "put": lambda store: store.put(b"new", content(b"new")),
    "open": open_and_commit,
    "read": lambda store: read(store, HELD[-1]),
    "rise": lambda store: read(store, HELD[0]),
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_ctrl_c_at_any_line(action):
    """At each line that a call runs: no pin is left, all blocks can be written and evicted, nothing is lost."""
    with full_store() as store, Interrupt() as counted:
        action(store)
    interrupted = 0
    for line in range(1, counted.lines + 1):
        with full_store() as store:
            try:
                with Interrupt(line):
                    action(store)
            except KeyboardInterrupt:
                interrupted += 1
            assert_well(store)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted > 0.9 * counted.lines > 90


def assert_well(store):
    """Nothing is pinned or leaked, the block of the call can be stored and evicted, and all others are there."""
    store.flush()
    store.check()
    assert store.leaked_bytes() == 0
    assert not any(tier.blocks.pins for tier in store._stack.tiers)
    put(store, b"new")
    assert read(store, b"new") == "dram"
    put(store, *(b"more %d" % number for number in range(4)))
    assert store.tier_of(b"new") == "below"
    for key in (*HELD, b"new"):
        assert read(store, key) is not None
        store.flush()


def test_the_second_signal_does_not_wait():
    """A second Ctrl-C ends a call at once, and with it the store, which refuses all other calls but the last."""
    with full_store() as store:
        tier = store._tiers[0]
        plain, done = tier.backend.write, []

        def write(*given, **named):
            signal.raise_signal(signal.SIGINT)
            done.append("the first waits")
            signal.raise_signal(signal.SIGINT)
            plain(*given, **named)

        tier.backend.write = write
        with pytest.raises(KeyboardInterrupt):
            store.put(b"new", content(b"new"))
        assert done == ["the first waits"]
        with pytest.raises(StorageError, match="interrupted twice; open it in a new process"):
            store.put(b"new", content(b"new"))


def test_two_stores_share_the_handler():
    """Whichever store is closed first, Ctrl-C waits for calls of the other and is handled as before at the end."""
    for order in (0, 1):
        stores = [contextlib.ExitStack(), contextlib.ExitStack()]
        opened = [stack.enter_context(full_store()) for stack in stores]
        stores[order].close()
        with Interrupt(10), pytest.raises(KeyboardInterrupt):
            opened[1 - order].put(b"new", content(b"new"))
        assert_well(opened[1 - order])
        stores[1 - order].close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
