"""What `gpu.py` measures: one function per section, a `Lab` in, plain values out."""  # noqa: INP001  # scripts, not a package

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from gpu_lab import Lab, Rows
from layerwise import measure_layerwise
from speed import HuggingFaceContinuous

from mooncake_lab.batching import VLLM, BatchingPolicy, Sarathi
from mooncake_lab.bench.peers import HuggingFaceGenerate, hugging_face, our_engine
from mooncake_lab.engine.backends import DenseBackend, choose_backend
from mooncake_lab.engine.blocks import BlockAllocator
from mooncake_lab.engine.config import config_from_shape
from mooncake_lab.engine.kvcache import KVCache
from mooncake_lab.engine.loop import Engine, EngineSettings
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.packing import Piece, pack
from mooncake_lab.engine.sequence import GenerationRequest
from mooncake_lab.engine.weights import assemble, random_weights, state_dict
from mooncake_lab.perf import model_shape
from mooncake_lab.store.backends.dram import DramBackend


def correctness(lab: Lab) -> Rows:
    """The fast path beside the dense one on the same weights: a chunked prompt, then decodes.

    Raises:
        RuntimeError: when they differ by more than rounding in the model's type explains.
    """
    reference = make_model(lab.weights, DenseBackend(), positions=512)
    dtype = lab.model.embedding.dtype
    caches = [
        KVCache(lab.model.config, blocks=32, block_size_tokens=16, device=lab.device, dtype=dtype)
        for _ in range(2)
    ]
    allowed = 1e-4 if dtype == torch.float32 else 5e-2
    tokens = np.random.default_rng(0).integers(0, lab.model.config.vocabulary, (3, 128))
    tables = np.arange(30, dtype=np.int32).reshape(3, 10)
    rows: Rows = []
    for steps in ([(40, 0), (25, 0), (9, 0)], [(30, 40), (1, 25), (1, 9)], [(1, 70), (1, 26), (1, 10)]):
        pieces = [
            Piece(tokens[i, cached : cached + new], cached, tables[i], emits=True)
            for i, (new, cached) in enumerate(steps)
        ]
        batch = pack(pieces, 16, lab.device)
        found, expected = lab.model.forward(batch, caches[0]), reference.forward(batch, caches[1])
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        rows.append({"new_tokens": [new for new, _ in steps], "relative_error": error, "allowed": allowed})
        if not error < allowed:
            raise RuntimeError(
                f"{lab.model.backend.name} differs from dense by {error:.2g}; allowed is {allowed:.2g}"
            )
    return rows + _same_tokens(lab)


def _same_tokens(lab: Lab) -> Rows:
    """A whole engine in float32 on this device beside the dense backend on CPU: greedy tokens must be equal.

    Raises:
        RuntimeError: when a token differs.
    """
    small = config_from_shape(model_shape("lab-tiny"), max_positions=512)
    weights = random_weights(small, device=torch.device("cpu"), dtype=torch.float32)
    here = assemble(small, state_dict(weights).__getitem__, device=lab.device, dtype=torch.float32)
    prompts = np.random.default_rng(1).integers(0, small.vocabulary, (6, 50)).tolist()
    found = [
        our_engine(model, cache_tokens=1024, chunk_tokens=64).generate(prompts, [12] * 6)
        for model in (
            make_model(weights, DenseBackend()),
            make_model(here, choose_backend(lab.device, torch.float32)),
        )
    ]
    if found[0] != found[1]:
        raise RuntimeError(f"greedy tokens on {lab.device} differ from those of the dense backend on CPU")
    return [{"greedy_tokens_equal": sum(map(len, found[0]))}]


def prefill(lab: Lab) -> Rows:
    """Prompts of rising length, alone, in chunks above `prefill_chunk_tokens`."""
    rows: Rows = []
    chunk = lab.sizes.prefill_chunk_tokens
    for tokens in lab.sizes.prefill_tokens:
        if tokens > lab.capacity_tokens:
            rows.append({"tokens": tokens, "skipped": f"the KVCache holds {lab.capacity_tokens} tokens"})
            continue
        batches = [lab.batch([(min(chunk, tokens - at), at)]) for at in range(0, tokens, chunk)]
        seconds = lab.median_s(
            lambda batches=batches: [lab.forward(b) for b in batches], 3 if tokens < 32768 else 1
        )
        flops = prefill_flops(lab, tokens)
        rows.append(
            {"tokens": tokens, "chunks": len(batches), "seconds": seconds, "tokens_per_s": tokens / seconds,
             "flops_per_s": flops / seconds, "share_of_gemm": flops / seconds / lab.gemm_flops_per_s}
        )  # fmt: skip
    return rows


def decode(lab: Lab) -> Rows:
    """Batches of decodes at several contexts; bytes are weights and KVCache, each once."""
    rows: Rows = []
    config, size = lab.model.config, lab.model.embedding.dtype.itemsize
    for context in lab.sizes.decode_contexts:
        for batch in lab.sizes.decode_batches:
            if batch * (context + 32) > lab.capacity_tokens:
                rows.append({"batch": batch, "context": context, "skipped": "more than the KVCache holds"})
                continue
            seconds = lab.iteration_s([(1, context - 1)] * batch)
            moved = config.linear_parameters * size + batch * context * config.kv_bytes_per_token(size)
            rate = moved / seconds
            rows.append(
                {"batch": batch, "context": context, "seconds": seconds, "tokens_per_s": batch / seconds,
                 "bytes": moved, "bytes_per_s": rate, "share_of_copy": rate / lab.peaks.device_memory_bytes_per_s}
            )  # fmt: skip
    return rows


def hybrid(lab: Lab) -> Rows:
    """A chunk with decodes beside it (SARATHI Table 2), in SARATHI's accounting and a fair one.

    SARATHI's: the decodes cost what the iteration grew by. Fair: every token of the iteration costs the same.
    """
    rows: Rows = []
    context = lab.sizes.hybrid_context
    for chunk in lab.sizes.hybrid_chunks:
        for decodes in lab.sizes.hybrid_batches:
            steps = [(1, context - 1)] * decodes
            alone, together, only = (lab.iteration_s(work) for work in ([(chunk, 0)], [(chunk, 0), *steps], steps))
            rows.append(
                {"chunk": chunk, "decodes": decodes, "prefill_s": alone, "decode_s": only, "hybrid_s": together,
                 "decode_token_alone_s": only / decodes, "decode_token_marginal_s": (together - alone) / decodes,
                 "decode_token_fair_s": together / (chunk + decodes),
                 "iterations_saved": (alone + only) / together}
            )  # fmt: skip
    return rows


def tiles(lab: Lab) -> Rows:
    """One prompt of every width around multiples of a tile (SARATHI Fig. 7)."""
    return [{"tokens": n, "seconds": lab.iteration_s([(n, 0)])} for n in lab.sizes.tile_tokens]


def chunks(lab: Lab) -> Rows:
    """One prompt, cut finer and finer (SARATHI Fig. 13)."""
    rows: Rows = []
    tokens = min(lab.sizes.chunk_prompt, lab.capacity_tokens)
    for chunk in (*lab.sizes.chunks, tokens):
        batches = [lab.batch([(min(chunk, tokens - at), at)]) for at in range(0, tokens, chunk)]
        seconds = lab.median_s(lambda batches=batches: [lab.forward(b) for b in batches], 2)
        rows.append({"prompt": tokens, "chunk": chunk, "seconds": seconds})
    return [row | {"over_whole": row["seconds"] / rows[-1]["seconds"]} for row in rows]


def pd_sweep(lab: Lab) -> Rows:
    """Equal requests of several P:D ratios, decode-maximal beside separate batches (SARATHI Fig. 9)."""
    rows: Rows = []
    sizes = lab.sizes
    for ratio in sizes.pd_ratios:
        outputs = max(2, round(sizes.pd_total / (ratio + 1)))
        prompt = sizes.pd_total - outputs
        seconds = {
            name: _burst_s(lab, policy, prompt, outputs)
            for name, policy in (
                ("sarathi", Sarathi(chunk_tokens=sizes.pd_chunk)), ("separate", VLLM())
            )
        }  # fmt: skip
        rows.append(
            {"ratio": prompt / (outputs - 1), "prompt": prompt, "outputs": outputs, "batch": sizes.pd_batch,
             "chunk": sizes.pd_chunk, **seconds, "gain": seconds["separate"] / seconds["sarathi"]}
        )  # fmt: skip
    return rows


def beside_transformers(lab: Lab) -> Rows:
    """The same weights in transformers: `generate`, and its continuous batching."""
    sizes = lab.sizes
    prompts = np.random.default_rng(0).integers(0, 200, (sizes.peer_batch, sizes.peer_prompt)).tolist()
    outputs = [sizes.peer_steps] * sizes.peer_batch
    room = sizes.peer_batch * (sizes.peer_prompt + sizes.peer_steps + 16)
    theirs = hugging_face(lab.weights)
    subjects = {
        "ours": our_engine(lab.model, cache_tokens=room, chunk_tokens=4096),
        "generate": HuggingFaceGenerate(theirs),
        "continuous": HuggingFaceContinuous(theirs, {"num_blocks": room // 256 + 2 * sizes.peer_batch}),
    }
    seconds = {
        name: lab.median_s(lambda subject=subject: subject.generate(prompts, outputs), 2)
        for name, subject in subjects.items()
    }
    return [
        {
            "peer": name,
            "seconds": seconds[name],
            "our_seconds": seconds["ours"],
            "ratio": seconds[name] / seconds["ours"],
        }
        for name in ("generate", "continuous")
    ]


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
    times = measure_layerwise(
        lab.model,
        prompt_tokens=lab.sizes.layerwise_tokens,
        new_tokens=lab.sizes.layerwise_new_tokens,
        block_tokens=lab.sizes.layerwise_block_tokens,
        rounds=3,
    )
    return [{"medium": "dram"} | asdict(time) for time in times]


def memory(lab: Lab) -> Rows:
    """Ten thousand requests through the allocator: every block comes back, and nothing fragments."""
    allocator, rng = BlockAllocator(lab.cache.blocks), np.random.default_rng(0)
    held: list[list[int]] = []
    for _ in range(10_000):
        count = int(rng.integers(1, max(2, lab.cache.blocks // 8)))
        while count > allocator.available:
            allocator.release(held.pop(int(rng.integers(len(held)))))
        held.append(allocator.allocate(count))
    for table in held:
        allocator.release(table)
    allocator.check([])
    reserved = torch.cuda.memory_reserved() if lab.device.type == "cuda" else 0
    return [
        {"requests": 10_000, "blocks": lab.cache.blocks, "available_after": allocator.available,
         "cache_bytes": lab.cache.data.nbytes, "reserved_bytes": reserved}
    ]  # fmt: skip


SECTIONS: Final[Mapping[str, Callable[[Lab], Rows]]] = MappingProxyType(
    {
        "correctness": correctness,
        "decode": decode,
        "prefill": prefill,
        "hybrid": hybrid,
        "tiles": tiles,
        "copies": copies,
        "layerwise": layerwise,
        "memory": memory,
        "beside_transformers": beside_transformers,
        "chunks": chunks,
        "pd_sweep": pd_sweep,
    }
)
"""In the order of running: what matters most first, should the time run out."""


def prefill_flops(lab: Lab, tokens: int) -> float:
    """Multiplications and additions of a prompt: linear operators, causal attention, the head once."""
    config = lab.model.config
    head = config.vocabulary * config.width
    linear = 2.0 * (config.linear_parameters - head) * tokens + 2.0 * head
    return linear + 2.0 * config.layers * config.query_width * tokens * (tokens + 1)


def _burst_s(lab: Lab, policy: BatchingPolicy, prompt: int, outputs: int) -> float:
    sizes = lab.sizes
    settings = EngineSettings(
        cache_blocks=-(-sizes.pd_total // 16) * (sizes.pd_batch + 1),
        max_requests=sizes.pd_batch,
        max_batch_tokens=max(sizes.pd_total * 4, sizes.pd_chunk),
        max_request_tokens=sizes.pd_total,
        prefix_caching=False,
        keep_log=False,
    )
    engine = Engine(lab.model, policy, settings)
    requests = [
        GenerationRequest(prompt=[1] * prompt, max_new_tokens=outputs, end_tokens=())
        for _ in range(2 * sizes.pd_batch)
    ]
    engine.generate(requests[:2])  # records the decode steps
    return lab.seconds(lambda: engine.generate(requests))


def _both_ways(lab: Lab, host: torch.Tensor, device: torch.Tensor) -> dict[str, float]:
    return {
        "device_to_host": lab.median_s(lambda: host.copy_(device, non_blocking=True)),
        "host_to_device": lab.median_s(lambda: device.copy_(host, non_blocking=True)),
    }


def _rates(size: int, seconds: dict[str, float], most: int, peaks: dict[str, float]) -> dict[str, float]:
    rates = {f"{way}_bytes_per_s": size / taken_s for way, taken_s in seconds.items()}
    return rates | {f"{way}_share": size / seconds[way] / (most / peak_s) for way, peak_s in peaks.items()}
