"""What an engine may use: its KVCache, the width of its iterations, its device."""

import os
from dataclasses import dataclass

import torch

from mooncake_lab.engine.config import LlamaConfig

_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85
"""Part of the free memory a KVCache takes if its size is not set; the rest is for activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The limits of one engine.

    Raises:
        ValueError: when one of them is below 1.
    """

    block_size_tokens: int = 16
    cache_blocks: int | None = None
    """Blocks of the KVCache; None takes a share of the free memory, but no more than could ever be used."""
    max_batch_tokens: int = 2048
    """Most tokens of an iteration."""
    max_requests: int = 256
    """Most requests that run at once."""
    prefix_reuse: bool = True
    """Whether requests find the blocks of earlier ones that began with the same tokens."""
    max_request_tokens: int | None = None
    """Longest context; None takes the model's window."""
    keep_log: bool = True
    """Whether iterations are kept, for charts."""

    def __post_init__(self) -> None:
        limits = (self.block_size_tokens, self.cache_blocks, self.max_batch_tokens, self.max_requests)
        if any(limit is not None and limit < 1 for limit in (*limits, self.max_request_tokens)):
            raise ValueError(f"{self} has a limit below 1")


def cache_blocks(settings: EngineSettings, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> int:
    """How many blocks an engine's KVCache has.

    Raises:
        MemoryError: when there is no room for one block.
    """
    if settings.cache_blocks is not None:
        return settings.cache_blocks
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * settings.block_size_tokens
    longest = -(-(settings.max_request_tokens or config.max_positions) // settings.block_size_tokens)
    blocks = min(_free_bytes(device) // block_bytes, longest * settings.max_requests)
    if blocks < 1:
        raise MemoryError(f"no room on {device} for one KVCache block of {block_bytes} bytes")
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
