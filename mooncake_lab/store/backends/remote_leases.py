"""The pool: the blocks of one backend that several clients of a server use at once, and which of them leave."""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from typing import final

from mooncake_lab.store.backends import remote_messages as messages
from mooncake_lab.store.backends.base import BlockNotFoundError, Reservation, StorageBackend, StorageFullError


@final
class Leases:
    """The blocks of a backend by name; none is freed while its bytes are read or written. Mutable.

    When the backend is full, the least recently used blocks leave: the clients do not know what the others use.
    """

    def __init__(self, backend: StorageBackend, patience_s: float) -> None:
        self.backend = backend
        self._patience_s = patience_s
        self._blocks = {messages.name_of(block): block for block in backend.blocks()}
        self._sums: dict[messages.Name, dict[int, int]] = {}  # by layer, as their writers sent them
        self._used = OrderedDict[messages.Name, None].fromkeys(
            self._blocks
        )  # committed; least recently used first
        self._users: Counter[messages.Name] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lease(self, name: messages.Name) -> Generator[Reservation]:
        """The reservation, which is not freed meanwhile."""
        with self._changed:
            block = self._blocks.get(name)
            if block is None:
                raise BlockNotFoundError(
                    f"{self.backend.name} has no block {name.key.hex()} of sequence {name.sequence}"
                )
            self._users[name] += 1
            self._use(name)
        try:
            yield block
        finally:
            with self._changed:
                self._users[name] -= 1
                self._changed.notify_all()

    def reserve(self, key: bytes, layer_bytes: tuple[int, ...], position: int) -> Reservation:
        """Reserve in the backend, which evicts if it is full; for its errors see `StorageBackend.reserve`."""
        with self._changed:
            while True:
                try:
                    block = self.backend.reserve(key, layer_bytes, position=position)
                except StorageFullError:
                    if sum(layer_bytes) > self.backend.capacity_bytes or not self._evict_one():
                        raise
                else:
                    self._blocks[messages.name_of(block)] = block
                    return block

    def find(self, keys: Sequence[bytes]) -> list[Reservation]:
        """The committed blocks that have one of these keys, each now used once more."""
        with self._changed:
            found = self.backend.find(keys)
            for block in reversed(found):  # the first blocks of a prompt are the last to leave
                self._use(messages.name_of(block))
            return found

    def free(self, names: Sequence[messages.Name]) -> None:
        """Free blocks when no client reads or writes them."""
        with self._changed:
            is_idle = self._changed.wait_for(
                lambda: not any(self._users[name] for name in names), self._patience_s
            )
            missing = [name for name, count in Counter(names).items() if name not in self._blocks or count > 1]
            if missing:
                raise BlockNotFoundError(f"{self.backend.name} has no block {missing[0].key.hex()}, or not twice")
            if not is_idle:
                raise TimeoutError(f"{len(names)} blocks are still being read or written")
            for name in names:  # one by one: what the backend does not free is still held
                self._free(name)

    def commit(self, names: Sequence[messages.Name]) -> None:
        """Commit in the backend; for its errors see `StorageBackend.commit`."""
        with contextlib.ExitStack() as leases:
            self.backend.commit(*[leases.enter_context(self.lease(name)) for name in names])
            with self._changed:
                self._used.update(dict.fromkeys(names))

    def wrote(self, question: messages.Write, sums: Sequence[int]) -> None:
        """Keep the checksums of layers, as their writer sent them."""
        with self._changed:
            self._sums.setdefault(question.name, {}).update(enumerate(sums, question.first_layer))

    def sums(self, question: messages.Read) -> tuple[int, ...] | None:
        """The checksums of layers as their writer sent them, where all are known."""
        known = self._sums.get(question.name, {})
        layers = range(question.first_layer, question.first_layer + question.layers)
        return tuple(known[layer] for layer in layers) if all(layer in known for layer in layers) else None

    def _use(self, name: messages.Name) -> None:
        if name in self._used:
            self._used.move_to_end(name)

    def _evict_one(self) -> bool:
        """Free the least recently used block that no client reads; false where there is none."""
        name = next((name for name in self._used if not self._users[name]), None)
        if name is not None:
            self._free(name)
        return name is not None

    def _free(self, name: messages.Name) -> None:
        self.backend.free(self._blocks[name])
        del self._blocks[name], self._users[name]
        self._used.pop(name, None)
        self._sums.pop(name, None)
