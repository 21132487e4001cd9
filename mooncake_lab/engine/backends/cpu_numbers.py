"""What CPU kernels are made of: numbers as they are stored, and memory that is asked for ahead of its use.

Numbers are float32, or bfloat16 as uint16 (its upper half), widened on load and rounded on store. Numba's cache
looks at the kernels' own files only: after an edit here, touch `cpu_kernels.py` and `cpu_step_kernels.py`.
"""

# numba's decorators and overloads are untyped
# pyright: basic

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Stored: TypeAlias = npt.NDArray[Any]
"""Numbers of the model's type, bfloat16 as uint16."""
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.integer]
LINE_BYTES: Final = 64
"""Bytes of a cache line; where lines are longer, some are asked for twice."""


def widen(number: Any) -> Any:
    """A stored number as float32; exists in compiled code only, as `_widen`."""
    raise NotImplementedError(number)


def narrow(number: Any, like: Any) -> Any:
    """A float32 as it is stored in an array whose elements are `like`; compiled code only, as `_narrow`."""
    raise NotImplementedError(number, like)


@overload(widen, inline="always")
def _widen(number):  # noqa: ANN001, ANN202  # numba wants this signature and that below to be equal
    if isinstance(number, types.Float):
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


@overload(narrow, inline="always")
def _narrow(number, like):  # noqa: ANN001, ANN202, ARG001  # likewise
    if isinstance(like, types.Float):
        return lambda number, like: number  # noqa: ARG005  # numba needs the same names

    def rounded(number, like):  # noqa: ANN001, ANN202, ARG001  # likewise
        bits = np.float32(number).view(np.uint32)  # to the nearest, ties to even
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return rounded


@intrinsic
def fetch(context: Any, array: Any, place: Any, lines: Any) -> Any:  # noqa: ARG001  # numba's own
    """Prefetch `lines` cache lines from `array[place]` on; compiled code only.

    The processor prefetches within a page of memory, but blocks of a paged cache begin in different pages. It
    stalls when more lines are requested than it can have in flight: request a few at a time, between other work.
    """

    def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, place_kind, _ = signature.args
        numbers = zip(cgutils.unpack_tuple(builder, values[1]), place_kind, strict=True)
        at = [target.cast(builder, *each, types.intp) for each in numbers]
        stored = target.make_array(kind)(target, builder, values[0])
        line = cgutils.get_item_pointer(target, builder, kind, stored, at, wraparound=False)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        called = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        ask = cgutils.get_or_insert_function(builder.module, called, "llvm.prefetch.p0")
        to_read, into_all_levels, data = word(0), word(3), word(1)
        start, line_bytes = builder.bitcast(line, byte), ir.Constant(values[2].type, LINE_BYTES)
        with cgutils.for_range(builder, values[2]) as loop:
            there = builder.gep(start, [builder.mul(loop.index, line_bytes)])
            builder.call(ask, [there, to_read, into_all_levels, data])
        return target.get_dummy_value()

    return types.void(array, place, types.intp), generate
