"""Gloo, which torch.distributed uses between CPUs, as a way to move bytes; run as a script, it is the receiver."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import distributed

from mooncake_lab.bench.transfer_peer import answer_orders, pieces_of, say
from mooncake_lab.bench.transfer_ways import Area, Route, receiver

_PATIENCE: Final = timedelta(seconds=120)


@contextlib.contextmanager
def gloo(area: Area) -> Generator[Route]:
    """Each piece is a tensor, and all are under way at once.

    Raises:
        TransferError: when the receiver ends, or the two do not meet.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        with receiver([__file__, str(area.nbytes), str(meeting)]) as (process, _):
            _meet(str(meeting), rank=0)
            try:
                yield Route(process, area, lambda size: _move(area, size, receives=False))
            finally:
                distributed.destroy_process_group()


def _meet(meeting: str, *, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=_PATIENCE
    )


def _move(area: Area, size: int, *, receives: bool) -> None:
    begin = distributed.irecv if receives else distributed.isend
    other = 0 if receives else 1
    waits = [begin(torch.from_numpy(area[piece]), other, tag=tag) for tag, piece in enumerate(pieces_of(size))]
    for wait in waits:
        assert wait is not None  # noqa: S101  # both are of this group
        wait.wait()


def _receive(room_bytes: int, meeting: str) -> None:
    area = np.zeros(room_bytes, np.uint8)
    say(None)
    _meet(meeting, rank=1)
    answer_orders(area, lambda size: _move(area, size, receives=True))


if __name__ == "__main__":
    _receive(int(sys.argv[1]), sys.argv[2])
