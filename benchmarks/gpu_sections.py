"""What `gpu.py` measures: one function per section, a `Lab` in, plain values out."""  # noqa: INP001  # scripts, not a package

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from gpu_lab import Lab, Rows
from layerwise import measure_layerwise
from serve import believed
from speed import HuggingFaceContinuous

from mooncake_lab.batching import VLLM, BatchingPolicy, Sarathi
from mooncake_lab.bench.peers import HuggingFaceGenerate, hugging_face, our_engine
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.compression import FullCache, KCache, Method, MiniCache, PyramidInfer, Session, SnapKV
from mooncake_lab.core import MIB, Moved
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
from mooncake_lab.serving import LiveCluster, LiveOptions
from mooncake_lab.store.backends.dram import DramBackend


def correctness(lab: Lab) -> Rows:
    """The fast path beside the dense one on the same weights: a chunked prompt, then decodes.

    Raises:
        RuntimeError: when they differ by more than rounding in the model's type explains.
    """
    reference = make_model(lab.weights, DenseBackend(), positions=512, digest=lab.model.weights_digest)
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


def graphs(lab: Lab) -> Rows:
    """Decode steps replayed from CUDA graphs, where the backend records them, beside the same steps launched."""
    rows: Rows = []
    context = min(lab.sizes.decode_contexts)
    for size in lab.sizes.decode_batches:
        batch = lab.batch([(1, context - 1)] * size)
        launched = lab.median_s(lambda batch=batch: lab.model.forward(batch, lab.cache))
        recorded = lab.median_s(lambda batch=batch: lab.forward(batch))
        rows.append(
            {"batch": size, "context": context, "launched_s": launched, "recorded_s": recorded,
             "gain": launched / recorded}
        )  # fmt: skip
    return rows


def hybrid(lab: Lab) -> Rows:
    """A chunk with decodes beside it (SARATHI Table 2), in SARATHI's accounting and a fair one.

    SARATHI's: the decodes cost what the iteration grew by. Fair: every token of the iteration costs the same.
    Iterations are recorded; `launched_s` is that of both as an engine launches it.
    """
    rows: Rows = []
    context = lab.sizes.hybrid_context
    for chunk in lab.sizes.hybrid_chunks:
        for decodes in lab.sizes.hybrid_batches:
            steps = [(1, context - 1)] * decodes
            both = [(chunk, 0), *steps]
            alone, together, only = (lab.recorded_s(work) for work in ([(chunk, 0)], both, steps))
            rows.append(
                {"chunk": chunk, "decodes": decodes, "prefill_s": alone, "decode_s": only, "hybrid_s": together,
                 "launched_s": lab.iteration_s(both),
                 "decode_token_alone_s": only / decodes, "decode_token_marginal_s": (together - alone) / decodes,
                 "decode_token_fair_s": together / (chunk + decodes),
                 "iterations_saved": (alone + only) / together}
            )  # fmt: skip
    return rows


def tiles(lab: Lab) -> Rows:
    """One prompt of every width around multiples of a tile (SARATHI Fig. 7), recorded and as it is launched."""
    return [
        {"tokens": n, "seconds": lab.recorded_s([(n, 0)]), "launched_s": lab.iteration_s([(n, 0)])}
        for n in lab.sizes.tile_tokens
    ]


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
        # without `max_batch_tokens`, transformers 5.17 takes as many as the memory holds, and masks of its square
        "continuous": HuggingFaceContinuous(
            theirs, {"num_blocks": room // 256 + 2 * sizes.peer_batch, "max_batch_tokens": max(256, room)}
        ),
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


def compressed(lab: Lab) -> Rows:
    """A prompt whose KVCache each method makes smaller: the prefill with that, a step after it, and the bytes."""
    tokens, kept = lab.sizes.compressed_tokens, lab.sizes.kept_tokens
    methods: dict[str, Method] = {
        "full": FullCache(),
        "snapkv": SnapKV(capacity=kept),
        "pyramidinfer": PyramidInfer(),
        "minicache": MiniCache(),
        "kcache": KCache(top=kept // 4),
    }
    session = Session(lab.model, room_tokens=2 * tokens + 1024)
    prompt = np.random.default_rng(0).integers(0, lab.model.config.vocabulary, tokens)
    rows: Rows = []
    for name, method in methods.items():
        prefill_s = lab.median_s(lambda method=method: session.start(prompt, method)[0].release(), 2)
        held, logits = session.start(prompt, method)
        new = np.array([[int(logits.argmax())]])
        about = {"device_bytes": held.device_bytes, "host_bytes": held.host_bytes}
        step_s = lab.median_s(lambda held=held, new=new: session.extend([held], new))
        held.release()
        rows.append({"method": name, "prompt": tokens, "prefill_s": prefill_s, "step_s": step_s} | about)
    return [row | {"step_over_full": row["step_s"] / rows[0]["step_s"]} for row in rows]


def processes(lab: Lab) -> Rows:
    """A prefill and a decode worker, each a process with the model on this device; KVCache goes through the host.

    The lab's own model leaves the device first, so this is the last section.
    """
    sizes, device, dtype = lab.sizes, lab.device, str(lab.model.embedding.dtype).removeprefix("torch.")
    vocabulary, backend = lab.model.config.vocabulary, lab.model.backend.name
    if device.type == "cuda":
        lab.release()
    longest = max(sizes.copy_tokens, sizes.peer_prompt)
    options = LiveOptions(
        model=f"random:{lab.shape}", device=str(device), dtype=dtype, backend=backend, spares=0,
        max_model_len=longest + sizes.peer_steps,
    )  # fmt: skip
    draw, rows, moved = np.random.default_rng(0), Rows(), list[Moved]()
    spec = ClusterSpec.small(chunk_tokens=sizes.worker_chunk_tokens)
    with LiveCluster(spec, options, model=believed(options.model)) as live:
        live.on_record = lambda record: moved.append(record) if isinstance(record, Moved) else None
        for requests, tokens in ((sizes.peer_batch, sizes.peer_prompt), (1, sizes.copy_tokens)):

            def serve_s(requests: int = requests, tokens: int = tokens) -> float:
                prompts = draw.integers(0, vocabulary, (requests, tokens)).astype(np.int32)
                start = lab.clock()
                live.generate(list(prompts), max_new_tokens=sizes.peer_steps)
                return lab.clock() - start

            serve_s()
            moved.clear()
            seconds = statistics.median(serve_s() for _ in range(3))
            sent = [one for one in moved if (one.source, one.destination) == ("prefill-0", "decode-0")]
            rows.append(
                {"requests": requests, "prompt": tokens, "outputs": sizes.peer_steps, "seconds": seconds,
                 "tokens_per_s": requests * (tokens + sizes.peer_steps) / seconds,
                 "moved_bytes": sum(one.bytes for one in sent) // 3,
                 "moved_bytes_per_s": statistics.median(one.bytes / (one.at_s - one.start_s) for one in sent)}
            )  # fmt: skip
    return rows


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
        "copies": copies,
        "graphs": graphs,
        "hybrid": hybrid,
        "layerwise": layerwise,
        "tiles": tiles,
        "chunks": chunks,
        "pd_sweep": pd_sweep,
        "compressed": compressed,
        "memory": memory,
        "beside_transformers": beside_transformers,
        "processes": processes,
    }
)
"""In the order of running: what matters most first, should the time run out."""


_LARGE_COPY_BYTES: Final = 16 * MIB
"""Smaller copies wait for their beginning more than for their bytes."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What rows of a section should reach."""

    shares: tuple[str, ...]
    least: float
    judged: Callable[[dict[str, Any]], bool] = lambda _: True
    """Which rows."""

    def beside(self, rows: Rows) -> str:
        """Found and wanted in one line."""
        found = [row[share] for row in rows for share in self.shares if share in row and self.judged(row)]
        goal = f"{' and '.join(self.shares)}: the goal is {self.least:.2f}"
        if not found:
            return f"{goal}, and no row is large enough to judge"
        reached = sum(share >= self.least for share in found)
        return f"{goal}; {min(found):.2f} to {max(found):.2f}, {reached} of {len(found)} reach it"


GOALS: Final[Mapping[str, Goal]] = MappingProxyType(
    {
        "decode": Goal(("share_of_copy",), 0.75),
        "prefill": Goal(("share_of_gemm",), 0.65, lambda row: row["tokens"] == 8192),
        "copies": Goal(
            ("device_to_host_share", "host_to_device_share"), 0.9, lambda row: row["bytes"] >= _LARGE_COPY_BYTES
        ),
        "layerwise": Goal(("hidden_share",), 0.9, lambda row: row["moved_tokens"] >= 8192),
    }
)
"""Of this project's roadmap, printed beside what was found."""


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
    engine.record_steps()
    engine.generate(requests[:2])
    return lab.seconds(lambda: engine.generate(requests))


def _both_ways(lab: Lab, host: torch.Tensor, device: torch.Tensor) -> dict[str, float]:
    return {
        "device_to_host": lab.median_s(lambda: host.copy_(device, non_blocking=True)),
        "host_to_device": lab.median_s(lambda: device.copy_(host, non_blocking=True)),
    }


def _rates(size: int, seconds: dict[str, float], most: int, peaks: dict[str, float]) -> dict[str, float]:
    rates = {f"{way}_bytes_per_s": size / taken_s for way, taken_s in seconds.items()}
    return rates | {f"{way}_share": size / seconds[way] / (most / peak_s) for way, peak_s in peaks.items()}
