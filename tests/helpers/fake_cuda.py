"""Tensors of a CUDA device on a machine without one: they have shapes, types and devices, and no bytes."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


class _WithoutDriver(TorchFunctionMode):
    """Replaces what asks for a driver: brackets by the operators behind them, pinned memory by memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is torch.Tensor.__getitem__:
            view, indices = _view(*args)
            return aten.index(view, indices) if indices else view
        if func is torch.Tensor.__setitem__:
            tensor, index, value = args
            view, indices = _view(tensor, index)
            value = value if isinstance(value, torch.Tensor) else torch.full_like(view, value)
            return aten.index_put_(view, indices, value) if indices else aten.copy_(view, value)
        if func in _INSTEAD:
            return _INSTEAD[func](args[0])
        return func(*args, **(kwargs or {}))


_INSTEAD = {
    torch.Tensor.contiguous: lambda tensor: torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format),
    torch.Tensor.pin_memory: lambda tensor: tensor,
    torch.Tensor.is_pinned: lambda _: False,
}


def _view(tensor, index):
    """Numbers and slices of an index are applied; its tensors come back, with None for the dimensions between."""
    indices, dimension = [], 0
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, int):
            tensor = torch.select(tensor, dimension, each)
            continue
        if isinstance(each, torch.Tensor):
            indices += [None] * (dimension - len(indices)) + [each]
        else:
            tensor = torch.ops.aten.slice(tensor, dimension, each.start, each.stop, each.step or 1)
        dimension += 1
    return tensor, indices


@contextmanager
def fake_cuda() -> Generator[None]:
    """Tensors made inside have no bytes; operators check what they are given and say what they would give."""
    with FakeTensorMode(), _WithoutDriver():
        yield
