"""What the GPU kernels need of a GPU, compiled for it on any machine: registers, spills and shared memory.

    python benchmarks/kernel_resources.py --shape llama3-70b
    python benchmarks/kernel_resources.py --json

Without the CUDA build of PyTorch, `make test-kernels` puts Triton into build/triton; PYTHONPATH has to name that
folder.
Triton and the assembler in its package compile down to machine code without a GPU. Each kernel is launched through
the functions that the engine calls, so it is compiled for the sizes and types that it has there.
"""  # noqa: INP001  # scripts, not a package

# triton comes with torch on GPU machines only, and is untyped
# pyright: basic, reportMissingImports=false

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mooncake_lab.engine.backends import triton_kernels as kernels
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.perf import ModelShape, model_shape

REGISTERS_PER_BLOCK: Final = 65_536
REGISTERS_PER_THREAD: Final = 255
SHARED_BYTES: Final = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The most shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, table 27)."""

_BLOCK_TOKENS: Final = 16
_STRETCHES: Final = tuple(2**power for power in range(7))
"""All numbers of parts that the engine cuts contexts into."""
_WARP: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """One kernel, compiled for one compute capability."""

    kernel: str
    shape: str
    dtype: str
    capability: int
    """80 for A100 and A800, 90 for H100 and H200, 100 for B200."""
    case: str
    """What the kernel was launched on."""
    threads: int
    registers_per_thread: int
    stack_bytes: int
    """Local memory of a thread: registers that did not fit."""
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """Whether a block can run, without registers spilled to memory."""
        return (
            self.registers_per_thread <= REGISTERS_PER_THREAD
            and self.registers_per_thread * self.threads <= REGISTERS_PER_BLOCK
            and self.stack_bytes == 0
            and self.shared_bytes <= SHARED_BYTES[self.capability]
        )


class _Launched(NamedTuple):
    name: str
    compiled: Any


class _NoDriver:
    """Stands for a GPU of some compute capability, as far as compiling asks."""

    utils = None

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, _WARP)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def _compiling_for(capability: int) -> Iterator[list[_Launched]]:
    """Compile what is launched meanwhile, and do not run it."""
    launched: list[_Launched] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        compiled = run(self, *args, **(options | {"warmup": True}))
        launched.append(_Launched(self.fn.__name__, compiled))
        return compiled

    driver.set_active(_NoDriver(capability))
    JITFunction.run = compile_only
    try:
        yield launched
    finally:
        JITFunction.run = run
        if torch.cuda.is_available():
            driver.reset_active()


def compiled_resources(shape: ModelShape, dtype: torch.dtype, capability: int) -> Iterator[KernelResources]:
    """Every kernel that prefill and decode of a model launch, and for decode attention every number of parts."""
    heads, kv_heads, width = shape.query_heads, shape.kv_heads, shape.head_width
    rows = 2
    hidden = torch.zeros(rows, shape.width, dtype=dtype)
    gate_up = torch.zeros(rows, 2 * shape.ffn_width, dtype=dtype)
    query = torch.zeros(rows, heads, width, dtype=dtype)
    cache = torch.zeros(4, kv_heads, _BLOCK_TOKENS, width, dtype=dtype)
    qkv = torch.zeros(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    angles = torch.zeros(16, width // 2)
    ids, lengths = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
    tables = torch.zeros(rows, 8, dtype=torch.int32)
    cases = {
        "first norm": lambda: kernels.add_norm(hidden, None, hidden[0], 1e-5, hidden.clone()),
        "norm with residual": lambda: kernels.add_norm(hidden, hidden, hidden[0], 1e-5, hidden.clone()),
        "rotation": lambda: kernels.rotate_and_store(qkv, angles, angles, ids, ids, cache, cache, query),
        "feed-forward": lambda: kernels.silu_and_multiply(gate_up, gate_up[:, : shape.ffn_width].contiguous()),
    } | {
        f"decode attention in {parts} parts": lambda parts=parts: kernels.paged_decode(
            query, cache, cache, tables, lengths, query.clone(), parts
        )
        for parts in _STRETCHES
    }
    about = {"shape": shape.name, "dtype": str(dtype).removeprefix("torch."), "capability": capability}
    for case, launch in cases.items():
        with _compiling_for(capability) as launched:
            launch()
        for name, compiled in launched:
            used = _resource_usage(compiled.asm["cubin"])
            yield KernelResources(
                **about,
                kernel=name.lstrip("_"),
                case=case,
                threads=compiled.metadata.num_warps * _WARP,
                registers_per_thread=used["REG"],
                stack_bytes=used["STACK"] + used["LOCAL"],
                shared_bytes=max(used["SHARED"], compiled.metadata.shared),
            )


@cache  # contexts in any number of parts share one kernel
def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What the machine code says of itself, by the tool that comes with Triton."""
    tool = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  # Triton's own tool
    _, _, function = printed.partition("Function ")
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", function)}


def main() -> int:
    """The command line: print what each kernel needs; 1 if one does not fit."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/kernel_resources.py",
        description="Compile the GPU kernels and print registers, spills and shared memory.",
        epilog="Example: python benchmarks/kernel_resources.py --shape llama3-70b --capability 90",
    )
    parser.add_argument("--shape", action="append", help="model shape; llama3-8b and llama3-70b by default")
    parser.add_argument("--capability", type=int, action="append", choices=SHARED_BYTES, help="all by default")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    told = parser.parse_args()
    found = [
        each
        for name in told.shape or ("llama3-8b", "llama3-70b")
        for capability in told.capability or SHARED_BYTES
        for each in compiled_resources(model_shape(name), DTYPES[told.dtype], capability)
    ]
    if told.json:
        sys.stdout.write(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    else:
        sys.stdout.write(_table(found))
    return 0 if all(each.fits for each in found) else 1


def _table(found: list[KernelResources]) -> str:
    head = "| shape | capability | kernel | case | threads | registers | stack (B) | shared (B) |\n" + "|---" * 8
    rows = [
        f"| {each.shape} | {each.capability} | {each.kernel} | {each.case} | {each.threads}"
        f" | {each.registers_per_thread} | {each.stack_bytes} | {each.shared_bytes} |"
        for each in found
    ]
    return "\n".join([f"{head}|", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
