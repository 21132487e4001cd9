"""Tests of the GPU backend. Collecting them needs nothing that a machine with PyTorch for CUDA lacks.

`tests/test_bare_gpu_machine.py` holds that. Tests marked `gpu` need a device; the others also run in Triton's
interpreter.
"""

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Skip what needs a device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
