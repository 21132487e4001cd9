"""The highest rates that a machine reaches: the best of many products and of many ways to read memory.

One plain product is no bound: packed weights, other shapes and our own kernels are faster by up to a half. A floor
that some program beats is not a floor, so every candidate counts, and the best one is the peak.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mooncake_lab.engine.backends.onednn import multiplies_bfloat16
from mooncake_lab.engine.reference import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCandidate:
    """One way to keep a machine busy."""

    name: str
    amount: float
    """FLOPs or bytes of one call."""
    work: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest rate of several candidates, and whose it is."""

    name: str
    per_s: float


def peak_of(
    candidates: Sequence[PeakCandidate], repeats: int, device: str = "cpu", clock: Clock = time.perf_counter
) -> Peak:
    """The best of `repeats` calls of each candidate, after one that warms it up.

    Raises:
        ValueError: when there is no candidate.
    """
    if not candidates:
        raise ValueError("a peak of 0 candidates; at least 1 is needed")
    rates = [each.amount / _best_s(each.work, repeats, device, clock) for each in candidates]
    highest = max(rates)
    return Peak(name=candidates[rates.index(highest)].name, per_s=highest)


def products(dtype: torch.dtype, side: int, device: str = "cpu") -> Iterator[PeakCandidate]:
    """Matrix products of several shapes around `side`, plain and as the engine's linear operators compute them.

    In bfloat16 on a CPU without instructions for it only the packed ones: a plain product takes a hundred times as
    long there, which is minutes for all shapes.
    """
    short = str(dtype).removeprefix("torch.")
    for rows, inner, columns in ((side, side, side), (side // 2, side, 4 * side), (2 * side, side, side)):
        left = torch.rand((rows, inner), device=device).to(dtype)
        weight = torch.rand((columns, inner), device=device).to(dtype)
        shape, flops = f"{rows} x {inner} x {columns}", 2.0 * rows * inner * columns
        works: dict[str, Callable[[], object]] = {}
        if device != "cpu" or dtype != torch.bfloat16 or multiplies_bfloat16():
            works["product"] = partial(torch.mm, left, weight.T.contiguous())
            works["linear"] = partial(torch.nn.functional.linear, left, weight)
        if device == "cpu":
            from mooncake_lab.engine.backends.cpu_linear import cpu_linears  # numba: GPU machines may lack it

            works["packed"] = partial(cpu_linears([weight])[0], left)
        for name, work in works.items():
            yield PeakCandidate(name=f"{short} {name} {shape}", amount=flops, work=work)


def streams(size_bytes: int, device: str = "cpu") -> Iterator[PeakCandidate]:
    """Ways to move `size_bytes` of memory: a copy (read and written); on a CPU also sums and small products."""
    array = torch.zeros(size_bytes // 4, device=device)
    moved = float(array.nbytes)
    target = torch.empty_like(array)
    yield PeakCandidate(name="copy", amount=2 * moved, work=partial(target.copy_, array))
    if device != "cpu":
        return
    yield PeakCandidate(name="sum of float32", amount=moved, work=partial(torch.sum, array))
    whole = array.view(torch.int64) if array.numel() % 2 == 0 else array.view(torch.int32)
    yield PeakCandidate(name=f"sum of {str(whole.dtype)[6:]}", amount=moved, work=partial(torch.sum, whole))
    for dtype in (torch.float32, torch.bfloat16):
        yield from _few_rows(dtype, size_bytes)


def _few_rows(dtype: torch.dtype, size_bytes: int) -> Iterator[PeakCandidate]:
    """Products of 1 to 32 rows with weights of `size_bytes`, which read the weights once."""
    from mooncake_lab.engine.backends.cpu_linear import cpu_linears  # likewise

    width = 1024 if size_bytes >= 1 << 22 else 16
    weight = torch.zeros((size_bytes // dtype.itemsize // width, width)).to(dtype)
    moved, short = float(weight.nbytes), str(dtype).removeprefix("torch.")
    (packed,) = cpu_linears([weight])
    for rows in (1, 4, 32):
        inputs = torch.zeros((rows, width), dtype=dtype)
        yield PeakCandidate(name=f"{short} linear of {rows}", amount=moved, work=partial(packed, inputs))
    row = torch.zeros(width, dtype=dtype)
    yield PeakCandidate(name=f"{short} matrix times vector", amount=moved, work=partial(torch.mv, weight, row))


def _best_s(work: Callable[[], object], repeats: int, device: str, clock: Clock) -> float:
    best_s = float("inf")
    for _ in range(repeats + 1):  # the first may have to warm up; being slower, it never counts
        start_s = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, clock() - start_s)
    return best_s
