"""A small product that keeps all its sums in registers, written as LLVM instructions.

numba's own loops store a sum to memory and load it again, or use more registers than a processor has. Here each
sum is a vector that the compiler keeps in registers: `multiply_tile` is the microkernel of matrix products (GEMM)
as BLIS describes it. It exists in compiled code only.
"""

# numba's decorators and intrinsics are untyped
# pyright: basic

from typing import Any, Final

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Neighbouring outputs of a product that are computed at once: two registers of AVX2, one of AVX-512."""
ROWS: Final = 8 if torch.cpu.get_capabilities().get("avx512_f") else 6
"""Most input rows at once. AVX2 has 16 registers: six rows of sums take twelve, the weights two more."""
SET: Final = False
ADD: Final = True
"""Whether products replace what is in the output, or are added to it."""

_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


@intrinsic
def multiply_tile(  # compiled code has no objects
    _: Any, inputs: Any, row: Any, first: Any, rows: Any, depth: Any, weights: Any, start: Any, stride: Any,
    ahead: Any, out: Any, out_row: Any, column: Any, add: Any,
) -> Any:  # fmt: skip
    """`out[out_row : out_row + rows, column : column + LANES]`: rows of inputs times `depth` vectors of weights.

    All arrays are contiguous. All `LANES` columns are written, so `out` must have them.

    Args:
        inputs: float32 (rows, inputs).
        row: first row of the inputs.
        first: first column of the inputs.
        rows: how many, 1 to `ROWS`.
        depth: how many columns of the inputs, at least 1.
        weights: an array of any shape, float32, or bfloat16 as uint16.
        start: where in its memory the first vector of `LANES` weights begins.
        stride: from one vector to the next.
        ahead: how far before their use weights are prefetched; 0 for weights that are in the cache.
        out: float32 (rows, outputs).
        out_row: first row of the output.
        column: first column of the output.
        add: `SET` or `ADD`.
    """

    def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args
        source, weight, result = (target.make_array(kinds[i])(target, builder, values[i]) for i in (0, 5, 9))
        whole = {i: target.cast(builder, values[i], kinds[i], types.intp) for i in (1, 2, 3, 4, 6, 7, 8, 10, 11)}
        adds = target.cast(builder, values[12], kinds[12], types.boolean)
        source_width, result_width = (builder.extract_value(array.shape, 1) for array in (source, result))
        left = builder.gep(source.data, [builder.add(builder.mul(whole[1], source_width), whole[2])])
        right = builder.gep(weight.data, [whole[6]])
        corner = builder.gep(result.data, [builder.add(builder.mul(whole[10], result_width), whole[11])])
        end = builder.append_basic_block("end")
        choice = builder.switch(whole[3], end)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            choice.add_case(_INT64(count), block)
            builder.position_at_end(block)
            lines = [builder.gep(left, [builder.mul(_INT64(row), source_width)]) for row in range(count)]
            sums = _products(builder, lines, right, depth=whole[4], stride=whole[7], ahead=whole[8])
            for number, total in enumerate(sums):
                place = builder.gep(corner, [builder.mul(_INT64(number), result_width)])
                place = builder.bitcast(place, _vector(LANES).as_pointer())
                before = builder.load(place, align=4)
                builder.store(builder.select(adds, builder.fadd(before, total), total), place, align=4)
            builder.branch(end)
        builder.position_at_end(end)
        return target.get_dummy_value()

    return types.void(
        inputs, row, first, rows, depth, weights, start, stride, ahead, out, out_row, column, add
    ), generate


def _products(builder: Any, lines: list[Any], right: Any, *, depth: Any, stride: Any, ahead: Any) -> list[Any]:
    """The loop: each vector of weights is loaded once and multiplied with one number of every line."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, weights = builder.phi(_INT64), builder.phi(right.type)
    sums = [builder.phi(_vector(LANES)) for _ in lines]
    _prefetch(builder, builder.gep(weights, [ahead]))
    wide = _load(builder, weights, LANES)
    inputs = [_spread(builder, builder.load(builder.gep(line, [index]))) for line in lines]
    added = [_multiply_add(builder, wide, number, total) for number, total in zip(inputs, sums, strict=True)]
    following = builder.add(index, _INT64(1))
    zeros = [_zero(LANES)] * len(sums)
    for phi, start, then in (
        (index, _INT64(0), following),
        (weights, right, builder.gep(weights, [stride])),
        *zip(sums, zeros, added, strict=True),
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
    builder.position_at_end(done)
    return added


def _vector(lanes: int, kind: Any = _FLOAT) -> Any:
    return ir.VectorType(kind, lanes)


def _zero(lanes: int) -> Any:
    return ir.Constant(_vector(lanes), [0.0] * lanes)


def _load(builder: Any, place: Any, lanes: int) -> Any:
    """Neighbouring numbers as float32; bfloat16 is the upper half of one."""
    if place.type.pointee == _FLOAT:
        return builder.load(builder.bitcast(place, _vector(lanes).as_pointer()), align=4)
    bits = builder.load(builder.bitcast(place, _vector(lanes, _INT16).as_pointer()), align=2)
    upper = builder.shl(
        builder.zext(bits, _vector(lanes, _INT32)), ir.Constant(_vector(lanes, _INT32), [16] * lanes)
    )
    return builder.bitcast(upper, _vector(lanes))


def _spread(builder: Any, number: Any) -> Any:
    """The same number in all lanes."""
    alone = builder.insert_element(ir.Constant(_vector(LANES), ir.Undefined), number, _INT32(0))
    return _shuffle(builder, alone, alone, (0,) * LANES)


def _shuffle(builder: Any, left: Any, right: Any, places: tuple[int, ...]) -> Any:
    return builder.shuffle_vector(left, right, ir.Constant(_vector(len(places), _INT32), list(places)))


def _multiply_add(builder: Any, left: Any, right: Any, total: Any) -> Any:
    kind = total.type
    called = ir.FunctionType(kind, [kind] * 3)
    fused = cgutils.get_or_insert_function(builder.module, called, f"llvm.fma.v{kind.count}f32")
    return builder.call(fused, [left, right, total])


def _prefetch(builder: Any, place: Any) -> None:
    byte = ir.IntType(8).as_pointer()
    called = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
    ask = cgutils.get_or_insert_function(builder.module, called, "llvm.prefetch.p0")
    to_read, into_all_levels, data = _INT32(0), _INT32(3), _INT32(1)
    builder.call(ask, [builder.bitcast(place, byte), to_read, into_all_levels, data])
