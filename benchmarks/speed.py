"""What the programs of the engine's speed share: floors, tables, and transformers' continuous batching.

A floor is the least time that work can take at the highest rates that anything on the machine reached. The peaks
of `mooncake_lab.bench.peaks` are candidates, and so is every program that was timed, ours and others: what one of
them did the machine can do. So no time lies below its floor.

`python benchmarks/speed.py data/measured/cpu_engine.json [MARK]` writes a table of `benchmarks/README.md` again.
"""  # noqa: INP001  # scripts, not a package

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch

from mooncake_lab.bench.commits import commit
from mooncake_lab.bench.engine import Case
from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.bench.peers import Decoding, Tokens, checked_seconds
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.reference import Clock
from mooncake_lab.perf import Hardware

ROOT: Final = Path(__file__).parents[1]
PEERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hf": "`generate`",
        "hf-continuous": "transformers' continuous batching",
        "whole": "ours, prompt not cut at 512",
    }
)
"""What peers are called that go by another name than their own."""
MEASURED: Final = ("cpu_engine.json",)
"""Files of `data/measured` that the README's sentence comes from."""
_HEAD = ("model", "threads", "case", "tokens/s", "peer", "times the peer", "rounds", "times the floor", "bound by")


def provenance(device: str = "cpu") -> dict[str, Any]:
    """The machine, the date, the commit and the load: what every file of measurements begins with."""
    machine = describe_machine(device)
    return {
        "machine": asdict(machine),
        "device": device,
        "date": machine.date,
        "commit": commit(),
        "load_average": list(os.getloadavg()),
    }


@dataclass(frozen=True, slots=True)
class HuggingFaceContinuous:
    """transformers' own continuous batching over a paged cache; see `mooncake_lab.bench.peers.Subject`."""

    model: Any
    settings: Mapping[str, Any]

    @torch.inference_mode()
    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """All at once; starting and stopping its manager is part of it, warming up is not."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        how = GenerationConfig(do_sample=False, max_new_tokens=max(new_tokens), eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(**self.settings)
        found: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=config, block=True, timeout=5, warmup=False
        ) as manager:
            ids = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, new_tokens, strict=True)]
            while len(found) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
                elif not manager.is_running():
                    raise RuntimeError(f"transformers' batching stopped after {len(found)} of {len(ids)} requests")
        return [found[request_id] for request_id in ids]

    def seconds(self, prompts: Tokens, new_tokens: Sequence[int], clock: Clock) -> float:
        """Its manager starts for every call, so decode steps alone cannot be timed."""
        return checked_seconds(self.generate, prompts, new_tokens, clock)

    def decoding(self, prompt: list[int], batch: int, most_tokens: int, clock: Clock) -> Decoding:
        """Refused.

        Raises:
            NotImplementedError: saying why.
        """
        raise NotImplementedError(
            "the manager of transformers' continuous batching starts for every call: its decode steps cannot be"
            " timed alone"
        )


def work_of(case: Case, config: LlamaConfig, bytes_per_element: int) -> dict[str, float]:
    """The bytes that a case has to read, `bytes_moved`, and its `flops`.

    Bytes: weights once a step, and each request's KVCache once a step that it decodes. FLOPs: the multiplications
    of linear operators and of causal attention. Steps are as few as the longest output allows.
    """
    weights = config.linear_parameters * bytes_per_element
    kv = config.kv_bytes_per_token(bytes_per_element)
    first = case.kind == "decode"
    steps = max(case.new_tokens) - first
    moved = float(steps * weights)
    flops = 0.0
    for prompt, new in zip(case.prompt_tokens, case.new_tokens, strict=True):
        decodes = new - 1
        moved += kv * (decodes * prompt + decodes * (decodes + 1) // 2)
        begin = prompt if first else case.reused_tokens
        tokens = prompt + decodes - begin
        pairs = ((prompt + decodes) * (prompt + decodes + 1) - begin * (begin + 1)) / 2
        head = config.vocabulary * config.width
        flops += 2.0 * (config.linear_parameters - head) * tokens + 2.0 * head * (new - first)
        flops += 4.0 * config.layers * config.query_width * pairs
    return {"bytes_moved": moved, "flops": flops}


class Rates(NamedTuple):
    """How fast a machine is."""

    bytes_per_s: float
    flops_per_s: float


def rates_of(peaks: Hardware, bytes_per_element: int) -> Rates:
    """The peaks that bound numbers of this size: what has fewer bits can be computed in float32, too."""
    rate = peaks.float32_flops_per_s
    if bytes_per_element < 4:
        rate = max(rate, peaks.bfloat16_flops_per_s)
    return Rates(peaks.device_memory_bytes_per_s, rate)


def floor_seconds(bytes_moved: float, flops: float, rates: Rates) -> tuple[float, Literal["bandwidth", "compute"]]:
    """The least seconds for this work at these rates, and which of the two sets them."""
    memory_s, compute_s = bytes_moved / rates.bytes_per_s, flops / rates.flops_per_s
    return (memory_s, "bandwidth") if memory_s >= compute_s else (compute_s, "compute")


def with_floors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a benchmark with floors from the highest rates that any of them knows of.

    Args:
        rows: each with `threads`, `dtype`, `bytes_moved`, `flops`, `seconds`, `peer_seconds` (or None), `peaks`.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        rates = _highest(row, rows)
        floor_s, bound = floor_seconds(row["bytes_moved"], row["flops"], rates)
        found.append({**row, "floor_seconds": floor_s, "bound_by": bound, "peaks": rates._asdict()})
    return found


def _highest(row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Rates:
    """The highest rates for a row: with as many threads, and FLOPs of its type of numbers or of a wider one."""
    bytes_per_s = flops_per_s = 0.0
    for other in rows:
        if other["threads"] != row["threads"]:
            continue
        shortest_s = min(filter(None, (other["seconds"], other["peer_seconds"])))
        peaks = other.get("peaks", {})
        bytes_per_s = max(bytes_per_s, peaks.get("bytes_per_s", 0.0), other["bytes_moved"] / shortest_s)
        if other["dtype"] in (row["dtype"], "float32"):
            flops_per_s = max(flops_per_s, peaks.get("flops_per_s", 0.0), other["flops"] / shortest_s)
    return Rates(bytes_per_s, flops_per_s)


def speed_table(found: Mapping[str, Any]) -> str:
    """A measurement of `engine.py` as Markdown: a sentence on where and when, and a row a case."""
    machine = found["machine"]
    lines = [
        "| " + " | ".join(cells) + " |" for cells in (_HEAD, ("---",) * len(_HEAD), *map(_row, found["rows"]))
    ]
    skipped = (
        f" Not measured (for lack of time, unless a reason is given): {'; '.join(found['skipped'])}."
        if found["skipped"]
        else ""
    )
    beside = "".join(f", {version}" for version in found.get("peers", {}).values())
    where = (
        f"Measured on {machine['processor']}, {machine['cores']} cores, {machine['date']}, torch"
        f" {machine['torch_version']}, transformers {found['transformers']}{beside}, commit {found['commit']},"
        f" load average {found['load_average'][0]:.1f}, by the {found['clock']} clock.{skipped}"
    )
    floors = f" Floors: {found['floors']}." if "floors" in found else ""
    return where + floors + "\n\n" + "\n".join(lines) + "\n"


def speed_sentence(*measurements: Mapping[str, Any]) -> str:
    """How fast the engine is: median and range of the ratios beside each other program, and the rows below 1."""
    names: Mapping[str, str] = {**PEERS, "hf": "transformers' `generate`"}
    ratios: dict[str, list[float]] = {}
    dtypes: dict[str, set[str]] = {}
    for found in measurements:
        for row in found["rows"]:
            if row["peer"] != "whole":  # our own engine, set otherwise
                peer = names.get(row["peer"], str(row["peer"]))
                ratios.setdefault(peer, []).append(row["ratio"])
                dtypes.setdefault(peer, set()).add(row["dtype"])
    every = set().union(*dtypes.values())
    only = {peer: "" if own == every else f" ({', '.join(sorted(own))} only)" for peer, own in dtypes.items()}
    beside = "; ".join(f"{peer}{only[peer]} {_spread(each)}" for peer, each in ratios.items())
    machine = measurements[0]["machine"]
    slower = [
        f"{row['model']} {row['dtype']}, {row['case']} ({names.get(row['peer'], row['peer'])} {row['ratio']:.2f})"
        for found in measurements
        for row in found["rows"]
        if row["peer"] != "whole" and row["ratio"] < 1
    ]
    below = f" Slower than another program: {'; '.join(slower)}." if slower else ""
    return (
        "Our engine's tokens per second over those of other programs, with the same weights on"
        f" {machine['cores']} CPU cores (median and range over the cases, {machine['date']}): {beside}.{below}\n"
    )


def _spread(ratios: Sequence[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one case)"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def measurements() -> list[dict[str, Any]]:
    """The measurements that the README's sentence comes from."""
    folder = ROOT / "data" / "measured"
    return [json.loads((folder / name).read_text(encoding="utf-8")) for name in MEASURED]


def between_marks(page: str, mark: str, content: str) -> str:
    """A page with new content between its marks, such as `<!-- speed: begin -->` and `<!-- speed: end -->`.

    Raises:
        ValueError: when the page has not exactly one pair of marks.
    """
    marked = re.compile(rf"(?P<begin><!-- {mark}: begin -->\n).*?(?P<end><!-- {mark}: end -->)", re.DOTALL)
    text, count = marked.subn(lambda match: f"{match['begin']}{content}{match['end']}", page)
    if count != 1:
        raise ValueError(f"the page has {count} pairs of marks '<!-- {mark}: begin -->' and 'end'; one is needed")
    return text


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['model']} {row['dtype']}",
        str(row["threads"]),
        row["case"],
        f"{row['tokens_per_s']:,.0f}",
        PEERS.get(row["peer"], row["peer"]),
        f"**{row['ratio']:.2f}**",
        f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}" if row["rounds"] > 1 else "1 round",
        f"{row['seconds'] / row['floor_seconds']:.1f}",
        row["bound_by"],
    )


def refresh(measured: Path) -> None:
    """Write a table of `benchmarks/README.md`, and the sentence of the README, from the measurements."""
    found = json.loads(measured.read_text(encoding="utf-8"))
    for page, content in (
        (ROOT / "benchmarks" / "README.md", speed_table(found)),
        (ROOT / "README.md", speed_sentence(*measurements())),
    ):
        page.write_text(between_marks(page.read_text(encoding="utf-8"), "speed", content), encoding="utf-8")


if __name__ == "__main__":
    refresh(Path(sys.argv[1]))
