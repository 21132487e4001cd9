"""How much of loading and storing KVCache the computation hides (arXiv Fig. 7), measured on this machine.

Each round computes serialized, layer by layer, and without any transfer. Results are medians, and medians of what
was paired within a round.

    python -m mooncake_lab.bench.layerwise --model lab-30m --media dram,ssd,tcp
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.bench.layerwise_backends import LAYERWISE_MEDIA
from mooncake_lab.bench.machine import Machine, describe_machine
from mooncake_lab.bench.rounds import paired_rounds, timed
from mooncake_lab.bench.stages import computing_threads
from mooncake_lab.core import MIB
from mooncake_lab.engine.layerwise.prefill import LayerwisePrefill
from mooncake_lab.engine.loading import load_model
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.roles import PrefillEngine
from mooncake_lab.engine.sequence import GenerationRequest
from mooncake_lab.engine.settings import EngineSettings
from mooncake_lab.store.backends import StorageBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

Operation = Literal["load", "store"]
_Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseTime:
    """One operation of one medium at one length; seconds are medians over the rounds."""

    medium: str
    operation: Operation
    prompt_tokens: int
    moved_tokens: int
    """Tokens whose KVCache was loaded (the rest of the prompt was computed), or stored (all was computed)."""
    moved_bytes: int
    compute_s: float
    """The same prefill with nothing to load and nothing to store: the prefix lay in the engine."""
    serialized_s: float
    """Load all, then compute; or compute, then store all."""
    layerwise_s: float
    """Both at once, until the last of it is done."""
    serialized_extra_s: float
    """Median of serialized minus compute within a round: arXiv Fig. 7's latency of storing."""
    layerwise_extra_s: float
    """The same of layer-wise."""
    hidden_share: float
    """1 - layer-wise extra / serialized extra, of those medians: 1 hides everything, 0 nothing."""
    rounds: int


def compare_media(
    model: LlamaModel,
    folder: Path,
    *,
    media: Sequence[str],
    prompt_tokens: Sequence[int],
    new_tokens: int,
    block_tokens: int,
    rounds: int,
    seed: int = 0,
) -> tuple[LayerwiseTime, ...]:
    """The rows of `measure_layerwise` for a model that is there; for arguments and errors see that."""
    check_media(media, prompt_tokens, block_tokens)
    longest = max(prompt_tokens) + new_tokens
    room_bytes = 3 * longest * model.config.kv_bytes_per_token(model.embedding.dtype.itemsize) + 64 * MIB
    times: list[LayerwiseTime] = []
    for medium in media:
        with LAYERWISE_MEDIA[medium](folder, room_bytes) as (made, grow_cold):
            bench = _Bench(model, made, grow_cold, block_tokens, longest, seed)
            for tokens in prompt_tokens:
                times.append(bench.compare("load", tokens, tokens + new_tokens, rounds))
                times.append(bench.compare("store", tokens, tokens, rounds))
    return tuple(times)


def check_media(media: Sequence[str], prompt_tokens: Sequence[int], block_tokens: int) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: when a medium is unknown, or a length is no multiple of a block.
    """
    unknown = [name for name in media if name not in LAYERWISE_MEDIA]
    if unknown:
        raise ValueError(f"unknown medium {unknown[0]!r}; allowed are {', '.join(LAYERWISE_MEDIA)}")
    odd = [tokens for tokens in prompt_tokens if tokens < 1 or tokens % block_tokens]
    if odd:
        raise ValueError(f"prompts of {odd[0]} tokens; allowed are multiples of the block's {block_tokens}")


class _Bench:
    """One model over one medium. Mutable: prompts are drawn anew for every round."""

    def __init__(
        self,
        model: LlamaModel,
        medium: StorageBackend,
        grow_cold: Callable[[], None],
        block_tokens: int,
        longest: int,
        seed: int,
    ) -> None:
        self._model = model
        self._medium = medium
        self._grow_cold = grow_cold
        self._block_tokens = block_tokens
        self._draw = np.random.default_rng(seed)
        self._engine = prefill_engine(model, longest)
        self._token_bytes = model.config.kv_bytes_per_token(model.embedding.dtype.itemsize)

    def compare(self, operation: Operation, moved: int, tokens: int, rounds: int) -> LayerwiseTime:
        """Time the three ways in turns."""
        time_ways = self._load if operation == "load" else self._store

        def time_once() -> dict[str, float]:
            prompt = self._draw.integers(0, self._model.config.vocabulary, tokens).astype(np.int32)
            return time_ways(prompt, moved)

        taken = paired_rounds(time_once, rounds)
        extras = {way: _extra(taken[way], taken["compute"]) for way in ("serialized", "layerwise")}
        return LayerwiseTime(
            medium=self._medium.name,
            operation=operation,
            prompt_tokens=tokens,
            moved_tokens=moved,
            moved_bytes=moved * self._token_bytes,
            compute_s=statistics.median(taken["compute"]),
            serialized_s=statistics.median(taken["serialized"]),
            layerwise_s=statistics.median(taken["layerwise"]),
            serialized_extra_s=extras["serialized"],
            layerwise_extra_s=extras["layerwise"],
            hidden_share=1 - extras["layerwise"] / extras["serialized"],
            rounds=rounds,
        )

    def _load(self, prompt: _Tokens, moved: int) -> dict[str, float]:
        """A prompt whose beginning is in the store; for computing alone, in the engine's own KVCache."""
        with TieredStore([TierSettings(medium=self._medium)]) as store:
            with self._over(store, overlap=True) as filling:
                filling.prefill(prompt[:moved])
            alone = GenerationRequest(prompt=prompt, max_new_tokens=1, end_tokens=())
            # the engine kept the prefix; `prefill` would copy it out again, which the other ways do not
            seconds = {"compute": timed(lambda: self._engine.engine.generate([alone]))}
            for way, overlap in (("serialized", False), ("layerwise", True)):
                self._forget()
                self._grow_cold()
                with self._over(store, overlap=overlap) as prefill:
                    seconds[way] = timed(lambda prefill=prefill: prefill.prefill(prompt, keep=False))
        self._empty()
        return seconds

    def _store(self, prompt: _Tokens, _moved: int) -> dict[str, float]:
        """A prompt of which the store holds nothing; every way begins with an empty one."""
        self._forget()
        seconds = {"compute": timed(lambda: self._engine.prefill(prompt))}
        for way, overlap in (("serialized", False), ("layerwise", True)):
            self._forget()
            with (
                TieredStore([TierSettings(medium=self._medium)]) as store,
                self._over(store, overlap=overlap) as prefill,
            ):
                seconds[way] = timed(lambda prefill=prefill: (prefill.prefill(prompt), prefill.flush()))
            self._empty()
        return seconds

    def _over(self, store: TieredStore, *, overlap: bool) -> LayerwisePrefill:
        return LayerwisePrefill(
            self._engine, store, block_tokens=self._block_tokens, overlap=overlap, queue_bytes=1 << 62
        )

    def _forget(self) -> None:
        """Let the engine keep nothing."""
        self._engine.engine.allocator.forget()

    def _empty(self) -> None:
        """Let the medium hold nothing."""
        self._medium.free(*self._medium.blocks())


def prefill_engine(model: LlamaModel, longest: int) -> PrefillEngine:
    """An engine that takes prompts of up to `longest` tokens whole, and has space to keep some."""
    room = EngineSettings(cache_blocks=4 * -(-longest // 16), max_batch_tokens=longest, keep_log=False)
    return PrefillEngine(model, room)


def _extra(ours: Sequence[float], compute: Sequence[float]) -> float:
    return statistics.median(mine - alone for mine, alone in zip(ours, compute, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseMeasurement:
    """All rows of one run, and the machine."""

    model: str
    dtype: str
    layers: int
    block_tokens: int
    seed: int
    machine: Machine
    times: tuple[LayerwiseTime, ...]


def measure_layerwise(
    folder: Path,
    *,
    model: str = "lab-30m",
    media: Sequence[str] = ("dram", "ssd", "tcp"),
    prompt_tokens: Sequence[int] = (512, 1024, 2048),
    new_tokens: int = 256,
    block_tokens: int = 256,
    rounds: int = 5,
    threads: int | None = 1,
    device: str = "auto",
    seed: int = 0,
) -> LayerwiseMeasurement:
    """Measure loading a prefix and storing a prompt, serialized and layer-wise, paired with computing alone.

    Args:
        folder: where the SSD medium lies; what is made there is removed.
        model: a shape of `perf.MODELS`, or a directory of weights.
        media: names in `LAYERWISE_MEDIA`.
        prompt_tokens: lengths, each a multiple of `block_tokens`. Storing computes and stores all of it; loading
            loads all of it and computes `new_tokens` more.
        new_tokens: computed behind a loaded prefix.
        block_tokens: tokens of a block in the store.
        rounds: each visits every row once; one more warms up.
        threads: that torch computes with; 1 leaves a core of two to the loader, as a GPU leaves its host.
        device: auto, cpu or cuda.
        seed: of weights and prompts.

    Raises:
        ValueError: when a medium is unknown, or a length is no multiple of a block.
        OSError: when the folder has no room.
    """
    check_media(media, prompt_tokens, block_tokens)
    name = model if Path(model).is_dir() else f"random:{model}"
    with computing_threads(threads):
        ready = load_model(name, device=device, seed=seed, positions=max(prompt_tokens) + new_tokens + 1)
        times = compare_media(
            ready,
            folder,
            media=media,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            block_tokens=block_tokens,
            rounds=rounds,
            seed=seed,
        )
        return LayerwiseMeasurement(
            model=model,
            dtype=str(ready.embedding.dtype).removeprefix("torch."),
            layers=ready.config.layers,
            block_tokens=block_tokens,
            seed=seed,
            machine=describe_machine(ready.embedding.device.type),
            times=times,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine and show, or write, the result."""
    first_line = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.bench.layerwise", description=first_line)
    parser.add_argument("--model", default="lab-30m", help="a shape of perf.MODELS or a directory of weights")
    parser.add_argument("--media", default="dram,ssd,tcp", help=f"some of {','.join(LAYERWISE_MEDIA)}")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the SSD that counts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="prompt lengths")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of every row")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write, for data/measured")
    chosen = parser.parse_args(arguments)
    measured = measure_layerwise(
        chosen.dir,
        model=chosen.model,
        media=chosen.media.split(","),
        prompt_tokens=chosen.tokens,
        rounds=chosen.rounds,
        threads=chosen.threads,
        device=chosen.device,
    )
    if chosen.output:
        chosen.output.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    sys.stdout.write(_table(measured.times) + "\n")


def _table(times: Sequence[LayerwiseTime]) -> str:
    head = "medium  what   tokens    MB  compute  serialized  layer-wise   extra ser.  extra lay.  hidden"
    lines = [
        f"{t.medium:7} {t.operation:6} {t.moved_tokens:6} {t.moved_bytes / 1e6:5.1f} {t.compute_s:8.4f} "
        f"{t.serialized_s:11.4f} {t.layerwise_s:11.4f} {t.serialized_extra_s:12.4f} {t.layerwise_extra_s:11.4f} "
        f"{t.hidden_share:7.2f}"
        for t in times
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
