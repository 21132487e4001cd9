"""Layers of KVCache as the payload of a frame, with the checksum of each behind them."""

import socket
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from mooncake_lab.core.checksums import checksums, layer_runs
from mooncake_lab.net import wire
from mooncake_lab.net.wire import Bytes

_SUM_BYTES: Final = 8
_RUN_BYTES: Final = 128 * 1024
"""Layers that are hashed at once: they stay in the processor's own cache meanwhile."""


def send_layers(
    peer: socket.socket,
    body: msgspec.Struct,
    layers: Sequence[Bytes],
    timeout_s: float,
    *,
    seed: int,
    known: Sequence[int] | None = None,
) -> None:
    """Send a frame with layers, followed by the checksum of each, which may be known already.

    Checksums come last, so that each run is hashed and then sent while it is in the processor's cache, and while
    the peer takes the run before. For its errors see `wire.send_frame`.
    """
    sizes = [layer.nbytes for layer in layers]
    size = layers_bytes(sizes)
    head = wire.frame_head(body, size)
    frame = wire.Frame(peer, socket.SO_SNDTIMEO, len(head) + size, timeout_s)
    waiting: list[bytes | Bytes] = [head]
    sums: list[int] = []
    for run in layer_runs(sizes, _RUN_BYTES if known is None else size):
        sums += checksums(layers[run], seed) if known is None else known[run]
        waiting += layers[run]
        if len(sums) < len(layers):
            frame.send(waiting)
            waiting = []
    frame.send([*waiting, struct.pack(f"<{len(sums)}Q", *sums)])


def receive_layers(
    peer: socket.socket, layers: Sequence[Bytes], seed: int, timeout_s: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fill layers with what comes next; their checksums as they came, and as the peer sent them.

    A run is hashed while it is in the processor's cache, and while the peer sends the next one. For its errors see
    `receive_into`; the allowed time is one for all layers.
    """
    sizes = [layer.nbytes for layer in layers]
    frame = wire.Frame(peer, socket.SO_RCVTIMEO, layers_bytes(sizes), timeout_s)
    came: list[int] = []
    sent = bytearray(_SUM_BYTES * len(layers))
    for run in layer_runs(sizes, _RUN_BYTES):
        parts = [layer.data for layer in layers[run]]
        frame.receive(parts if run.stop < len(layers) else [*parts, memoryview(sent)])
        came += checksums(layers[run], seed)
    return tuple(came), struct.unpack(f"<{len(layers)}Q", sent)


def layers_bytes(sizes: Sequence[int]) -> int:
    """The payload of layers of these sizes: their bytes, and the checksum of each."""
    return sum(sizes) + _SUM_BYTES * len(sizes)
