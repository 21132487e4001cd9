"""How much of loading and storing KVCache the computation hides (arXiv Fig. 7), measured on this machine.

Stable for other modules: `measure_layerwise(...)` returns a `LayerwiseMeasurement` of `LayerwiseTime` rows, all
frozen. What is reported are medians, and medians of what was paired within a round.

    python -m mooncake_lab.bench.layerwise_report --model lab-30m --media dram,ssd,tcp
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mooncake_lab.bench.layerwise import LayerwiseTime, check_media, compare_media
from mooncake_lab.bench.layerwise_backends import LAYERWISE_MEDIA
from mooncake_lab.bench.machine import Machine, describe_machine
from mooncake_lab.bench.stages import computing_threads
from mooncake_lab.engine.loading import load_model


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
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.bench.layerwise_report", description=first_line)
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
