"""What `bench_gpu` measures of KVCache on its way: out of a device and into it, alone and beside computation."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from mooncake_lab.bench.gpu_lab import Lab, Rows
from mooncake_lab.bench.layerwise import compare_media
from mooncake_lab.store.backends.dram import DramBackend

_ROUNDS = 3


def copies(lab: Lab) -> Rows:
    """Pieces of a DRAM tier's arena, pinned where CUDA is, out of the device and into it; then the KVCache itself.

    Shares are of the peak: the largest piece, to and from memory that torch itself has pinned.
    """
    on_gpu, most = lab.device.type == "cuda", max(lab.sizes.copy_bytes)
    device = torch.empty(most, dtype=torch.uint8, device=lab.device)
    arena = DramBackend(2 * most, pinned=True if on_gpu else None)
    try:
        block = arena.reserve(b"piece", [most])
        arena.write(block, [np.zeros(most, np.uint8)])
        arena.commit(block)
        with torch.inference_mode():
            peaks = _both_ways(lab, torch.empty(most, dtype=torch.uint8, pin_memory=on_gpu), device)
            piece = torch.from_numpy(arena.read(block, 0, 1)[0])
            rows = [
                {"what": "arena", "bytes": size}
                | _rates(size, _both_ways(lab, piece[:size], device[:size]), most, peaks)
                for size in lab.sizes.copy_bytes
            ]
            tokens = min(lab.sizes.copy_tokens, lab.capacity_tokens // 2)
            blocks = lab.cache.data[:, :, : tokens // lab.block_size_tokens]
            host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=on_gpu)
            seconds = _both_ways(lab, host, blocks)
        rows.append({"what": "cache", "bytes": host.nbytes, **_rates(host.nbytes, seconds, most, peaks)})
    finally:
        arena.close()
    return rows


def layerwise(lab: Lab) -> Rows:
    """Prefills whose KVCache is loaded from or stored into a DRAM tier, serialized and layer by layer."""
    sizes = lab.sizes
    with tempfile.TemporaryDirectory() as folder:
        times = compare_media(
            lab.model,
            Path(folder),
            media=("dram",),
            prompt_tokens=sizes.layerwise_tokens,
            new_tokens=sizes.layerwise_new_tokens,
            block_tokens=sizes.layerwise_block_tokens,
            rounds=_ROUNDS,
        )
    return [asdict(time) for time in times]


def _both_ways(lab: Lab, host: torch.Tensor, device: torch.Tensor) -> dict[str, float]:
    return {
        "device_to_host": lab.median_s(lambda: host.copy_(device, non_blocking=True)),
        "host_to_device": lab.median_s(lambda: device.copy_(host, non_blocking=True)),
    }


def _rates(size: int, seconds: dict[str, float], most: int, peaks: dict[str, float]) -> dict[str, float]:
    rates = {f"{way}_bytes_per_s": size / taken_s for way, taken_s in seconds.items()}
    return rates | {f"{way}_share": size / seconds[way] / (most / peak_s) for way, peak_s in peaks.items()}
