"""The machine this runs on: what it is, and the peaks it reaches when nothing is in the way.

A vendor's peak says little of a virtual machine with two of its cores. So the roof over measurements is
measured in the same run: the best of the candidates of `peaks`.
"""

import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from mooncake_lab.bench.peaks import peak_of, products, streams
from mooncake_lab.core import GIB, MIB
from mooncake_lab.engine.reference import Clock
from mooncake_lab.perf import Hardware

_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Who measured, and when."""

    processor: str
    device: str
    """`cpu` or `cuda`."""
    cores: int
    threads: int
    """Threads torch computes with."""
    torch_version: str
    date: str
    """Year, month and day, UTC."""

    def __str__(self) -> str:
        plural = "" if self.threads == 1 else "s"
        share = f", {self.threads} thread{plural} on {self.cores} cores" if self.device == "cpu" else ""
        return f"{self.processor}{share}, torch {self.torch_version}, {self.date}"


def describe_machine(device: str = "cpu") -> Machine:
    """What this machine is, today."""
    return Machine(
        processor=torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        device=device,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        date=datetime.now(UTC).date().isoformat(),
    )


def processor_name(cpu_info: Path = _CPU_INFO) -> str:
    """The CPU's name as the kernel tells it, else as Python does."""
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def measure_peaks(
    device: str = "cpu",
    *,
    side: int | None = None,
    copy_bytes: int | None = None,
    repeats: int = 5,
    clock: Clock = time.perf_counter,
) -> Hardware:
    """This machine as hardware: the best rates of the candidates of `peaks`, FLOP/s and bytes/s.

    Args:
        device: `cpu` or `cuda`.
        side: rows and columns of the matrices; large enough for the device by default.
        copy_bytes: size of the array read or copied; by default larger than any cache.
        repeats: calls of each candidate, of which the best counts.
        clock: source of seconds.
    """
    side = side or (8192 if device == "cuda" else 1024)
    copy_bytes = copy_bytes or (GIB if device == "cuda" else 64 * MIB)
    single, half = (
        peak_of(list(products(dtype, side, device)), repeats, device, clock)
        for dtype in (torch.float32, torch.bfloat16)
    )
    memory = peak_of(list(streams(copy_bytes, device)), repeats, device, clock)
    return Hardware(
        name="this-gpu" if device == "cuda" else "this-cpu",
        devices=1,
        bfloat16_flops_per_s=half.per_s,
        float32_flops_per_s=single.per_s,
        device_memory_bytes=memory_bytes(device),
        device_memory_bytes_per_s=memory.per_s,
        source=(
            f"measured here, the best of {repeats} calls of several programs each: {single.name}; {half.name};"
            f" {memory.name} of {copy_bytes // MIB} MiB"
        ),
    )


def memory_bytes(device: str = "cpu") -> float:
    """Physical memory of the device."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
