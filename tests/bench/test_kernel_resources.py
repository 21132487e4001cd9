"""The GPU kernels compiled for GPUs that are not here: they fit, and no register is spilled.

Triton is no dependency: `make test-kernels` installs it beside the environment.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` installs it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kernel_resources import SHARED_BYTES, _compiling_for, compiled_resources  # after the guards

from mooncake_lab.engine.backends import triton_kernels as kernels
from mooncake_lab.engine.backends.cuda import stretches
from mooncake_lab.perf import model_shape

KERNELS = {"add_norm", "rotate_and_store", "silu_and_multiply", "decode_stretch", "join_stretches"}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["llama3-8b", "llama3-70b"])
def test_every_kernel_fits(shape, dtype, capability):
    """On A100, H100 and B200 a block of each kernel fits into registers and shared memory, without spills."""
    found = list(compiled_resources(model_shape(shape), dtype, capability))
    assert {each.kernel for each in found} == KERNELS
    assert [each for each in found if not each.fits] == []


def test_decode_attention_is_compiled_for_every_number_of_parts():
    """No batch cuts its contexts into another number of parts; the kernel that joins them has it compiled in."""
    found = list(compiled_resources(model_shape("llama3-8b"), torch.bfloat16, 90))
    for kernel in ("decode_stretch", "join_stretches"):
        cases = [each.case for each in found if each.kernel == kernel]
        assert cases == [f"decode attention in {parts} parts" for parts in (1, 2, 4, 8, 16, 32, 64)]
    assert {stretches(rows, 8) for rows in range(1, 257)} == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("tile", kernels.DECODE_TILES, ids=str)
def test_every_tile_that_is_worth_measuring_fits(tile, monkeypatch):
    """On H100, decode attention of heads of 128 runs with each tile, without spills."""
    monkeypatch.setattr(kernels, "DECODE_TILE", tile)
    found = list(compiled_resources(model_shape("llama3-8b"), torch.bfloat16, 90))
    assert {each.threads for each in found if each.kernel == "decode_stretch"} == {32 * tile.warps}
    assert [each for each in found if not each.fits] == []


def test_the_width_of_block_tables_compiles_nothing_anew():
    """Tables of 1, 7, 8 and 16 blocks share one kernel, so that a server never stops for a longer request."""
    query, cache = torch.zeros(2, 8, 64), torch.zeros(4, 2, 16, 64)
    with _compiling_for(90) as launched:
        for width in (1, 7, 8, 16):
            tables, lengths = torch.zeros(2, width, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
            kernels.paged_decode(query, cache, cache, tables, lengths, query.clone(), 1)
    compiled = [each.compiled.hash for each in launched if each.name == "_decode_stretch"]
    assert len(compiled) == 4
    assert len(set(compiled)) == 1


def test_a_block_that_needs_too_much_does_not_fit(monkeypatch):
    """With less shared memory than the tiles of decode attention need, it does not fit."""
    monkeypatch.setitem(SHARED_BYTES, 90, 32 * 1024)
    found = compiled_resources(model_shape("llama3-8b"), torch.bfloat16, 90)
    assert {each.kernel for each in found if not each.fits} == {"decode_stretch"}
