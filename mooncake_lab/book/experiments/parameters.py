"""The parameters of a chapter, checked before it computes for minutes: papermill hands on whatever was typed."""

import os
from pathlib import Path
from typing import Final, NoReturn

from mooncake_lab.core import SCALES
from mooncake_lab.workload.releases import RELEASES, check_workload

LARGEST_SEED: Final = 2**32 - 1


def check_parameters(
    scale: object, seed: object, out_dir: object, *, trace: object = "conversation", node: object = "a800-node"
) -> None:
    """Check the parameters of a chapter.

    Args:
        scale: how much it computes.
        seed: of everything random.
        out_dir: where its numbers go; made if needed.
        trace: what a chapter replays that can replay any trace.
        node: on which kind of node; whether it exists is known where it is used.

    Raises:
        ValueError: naming the parameter, its value, and what is allowed.
    """
    if scale not in SCALES:
        _refuse("scale", scale, f"one of {', '.join(SCALES)}")
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        _refuse("seed", seed, f"a whole number from 0 to {LARGEST_SEED}")
    if not isinstance(out_dir, str | Path) or not str(out_dir) or not _can_be_made(Path(out_dir)):
        _refuse("out_dir", out_dir, "a folder that exists or can be made, and that can be written to")
    if not isinstance(trace, str):
        _refuse("trace", trace, f"the path of a trace, or one of {', '.join(RELEASES)}")
    check_workload(trace)
    if not isinstance(node, str):
        _refuse("node", node, "the name of a node, such as a800-node")


def _can_be_made(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(f"the parameter {name} is {value!r}; allowed is {allowed}")
