"""Reusing a prefix from DRAM against computing it again: measured, beside what the latency model predicts.

    python -m mooncake_lab.bench.reuse --prefix 2048

The model (FAST'25 Eqs. 1-2 as `perf.PrefillLatency`) is fitted, in the same run, to prefills that are shorter than
the one it predicts and that reuse nothing; the load is the prefix's bytes over the bandwidth the medium measured.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_lab.bench.layerwise import prefill_engine
from mooncake_lab.bench.machine import Machine, describe_machine
from mooncake_lab.bench.rounds import median_ratio, paired_rounds, timed
from mooncake_lab.bench.stages import computing_threads
from mooncake_lab.core import MIB
from mooncake_lab.engine.layerwise.prefill import LayerwisePrefill
from mooncake_lab.engine.loading import load_model
from mooncake_lab.engine.roles import PrefillEngine
from mooncake_lab.perf.calibration import fit_prefill
from mooncake_lab.store.backends import DramBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """One prompt prefilled both ways; seconds are medians over rounds in which both took turns."""

    model: str
    prefix_tokens: int
    new_tokens: int
    recompute_s: float
    """All of the prompt is computed."""
    reuse_s: float
    """The prefix is loaded from DRAM, layer by layer, and the rest is computed."""
    ratio: float
    """Recompute over reuse, paired within rounds; above 1 reuse is faster."""
    predicted_recompute_s: float
    predicted_reuse_s: float
    predicted_ratio: float
    read_bytes_per_s: float
    """Of DRAM, in the reads of the reused prefix."""
    machine: Machine

    @property
    def miss(self) -> float:
        """How far the measured ratio is from the predicted one, as a share of the latter."""
        return self.ratio / self.predicted_ratio - 1


def measure_reuse(
    *,
    model: str = "lab-30m",
    prefix_tokens: int = 2048,
    new_tokens: int = 256,
    block_tokens: int = 256,
    rounds: int = 5,
    threads: int | None = 1,
    seed: int = 0,
) -> PrefixReuse:
    """Measure and predict; the prompt is one that the model's fit did not see.

    Raises:
        ValueError: when the prefix is no multiple of a block, or too short to fit a model below it.
    """
    lengths = sorted({new_tokens, prefix_tokens // 8, prefix_tokens // 4, prefix_tokens // 2})
    if prefix_tokens % block_tokens or len(lengths) < 3:
        raise ValueError(
            f"a prefix of {prefix_tokens} tokens; allowed are multiples of {block_tokens}, from {8 * block_tokens}"
        )
    tokens = prefix_tokens + new_tokens
    with computing_threads(threads):
        ready = load_model(f"random:{model}", device="cpu", seed=seed, positions=tokens + 1)
        prefix_bytes = prefix_tokens * ready.config.kv_bytes_per_token(ready.embedding.dtype.itemsize)
        engine, draw = prefill_engine(ready, tokens), np.random.default_rng(seed)
        medium = DramBackend(prefix_bytes + 16 * MIB)
        prompt = draw.integers(0, ready.config.vocabulary, tokens).astype(np.int32)
        taken, read_bytes_per_s = _in_turns(
            engine, medium, prompt, (*lengths, tokens), prefix_tokens, block_tokens, rounds
        )
        medium.close()
        machine = describe_machine("cpu")
    fitted = fit_prefill(
        np.array(lengths, float),
        np.zeros(len(lengths)),
        np.array([statistics.median(taken[length]) for length in lengths]),
    ).model
    computed_s = float(fitted.compute_s(tokens, prefix_tokens))
    predicted = (
        float(fitted.compute_s(tokens)),
        max(computed_s, prefix_bytes / read_bytes_per_s),
    )  # the longer hides
    return PrefixReuse(
        model=model,
        prefix_tokens=prefix_tokens,
        new_tokens=new_tokens,
        recompute_s=statistics.median(taken[tokens]),
        reuse_s=statistics.median(taken["reuse"]),
        ratio=median_ratio(taken[tokens], taken["reuse"]),
        predicted_recompute_s=predicted[0],
        predicted_reuse_s=predicted[1],
        predicted_ratio=predicted[0] / predicted[1],
        read_bytes_per_s=read_bytes_per_s,
        machine=machine,
    )


def _in_turns(
    engine: PrefillEngine,
    medium: DramBackend,
    prompt: npt.NDArray[np.int32],
    lengths: Sequence[int],
    prefix_tokens: int,
    block_tokens: int,
    rounds: int,
) -> tuple[dict[int | str, list[float]], float]:
    """Seconds of prefills from nothing by length, and of the prompt on a stored prefix; the rate of its reads."""
    with (
        TieredStore([TierSettings(medium=medium)]) as store,
        LayerwisePrefill(engine, store, block_tokens=block_tokens) as layerwise,
    ):
        layerwise.prefill(prompt[:prefix_tokens])
        layerwise.flush()

        def time_once() -> dict[int | str, float]:
            ways: dict[int | str, float] = {}
            for length in lengths:
                engine.engine.allocator.forget()
                ways[length] = timed(lambda length=length: engine.prefill(prompt[:length]))
            engine.engine.allocator.forget()
            ways["reuse"] = timed(lambda: layerwise.prefill(prompt, keep=False))
            return ways

        taken = paired_rounds(time_once, rounds)
        tier = store.statistics()[0]
    return taken, tier.read_bytes / tier.read_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine and show measured beside predicted."""
    first_line = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.bench.reuse", description=first_line)
    parser.add_argument("--model", default="lab-30m", help="a shape of perf.MODELS")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the prefix")
    parser.add_argument("--new", type=int, default=256, help="tokens behind it")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    chosen = parser.parse_args(arguments)
    found = measure_reuse(
        model=chosen.model,
        prefix_tokens=chosen.prefix,
        new_tokens=chosen.new,
        rounds=chosen.rounds,
        threads=chosen.threads,
    )
    sys.stdout.write(
        f"{found.prefix_tokens} tokens of a prompt of {found.prefix_tokens + found.new_tokens}, {found.model}\n"
        f"{'':10} {'recompute':>10} {'reuse':>10} {'ratio':>7}\n"
        f"{'measured':10} {found.recompute_s:9.4f}s {found.reuse_s:9.4f}s {found.ratio:7.2f}\n"
        f"{'predicted':10} {found.predicted_recompute_s:9.4f}s {found.predicted_reuse_s:9.4f}s"
        f" {found.predicted_ratio:7.2f}\n"
        f"measured over predicted {1 + found.miss:.2f}; DRAM read {found.read_bytes_per_s / 1e9:.1f} GB/s;"
        f" {found.machine}\n"
    )


if __name__ == "__main__":
    main()
