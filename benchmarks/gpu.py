"""Measure a GPU: check that the engine is right on it, then time everything, and write one JSON file.

    python benchmarks/gpu.py --out data/measured/engine_h200.json
    python benchmarks/gpu.py --shape lab-tiny --device cpu      (a dry run, anywhere)

Sections run in order of importance. One that begins after the budget is spent is written down as skipped, and one
that fails as failed, with its error; then the exit code is 1 and everything else is still there. An error after
which a process cannot use the device any more ends that process, as a signal does; one whose section hangs is
killed. A new process then measures the rest. The file is written after each section and keeps what earlier runs
found of other sections, so they can be run one by one:

    python benchmarks/gpu.py --out data/measured/engine_h200.json --section decode
"""  # noqa: INP001  # scripts, not a package

import argparse
import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_lab import DRY, FULL, Lab
from gpu_sections import GOALS, SECTIONS

from mooncake_lab.bench.commits import commit
from mooncake_lab.bench.machine import describe_machine, measure_peaks
from mooncake_lab.core import complete_file
from mooncake_lab.engine.backends import choose_backend
from mooncake_lab.engine.config import config_from_shape
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.weights import random_weights
from mooncake_lab.perf import model_shape

DEVICE_LOST = 3
"""Exit code of a process that could not measure all sections, because an error left it without the device."""
_LOST = "the device was lost in "
_LOSING = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS_EXECUTION_FAILED", "illegal memory", "device-side assert")
"""In messages of errors that leave a process without its device."""


def driver_version() -> str | None:
    """Of NVIDIA's driver, as its own tool reports it; `None` without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # plain words
    return (done.stdout.strip() or None) if done.returncode == 0 else None


def _loses_device(error: Exception) -> bool:
    """Whether every further call of this process fails, too; want of memory passes."""
    return "out of memory" not in str(error) and any(word in str(error) for word in _LOSING)


def make_lab(shape: str, device: str, dtype: str, backend: str = "auto") -> Lab:
    """A random model of a shape, and this machine's measured peaks; small sizes for the `lab-` shapes."""
    place, kind = torch.device(device), DTYPES[dtype]
    dry = shape.startswith("lab-")
    peaks = measure_peaks(device, side=256, copy_bytes=1 << 22, repeats=1) if dry else measure_peaks(device)
    config = config_from_shape(model_shape(shape), max_positions=1024 if dry else 135168)
    weights = random_weights(config, device=place, dtype=kind)
    model = make_model(weights, choose_backend(place, kind, backend))
    return Lab(shape=shape, weights=weights, model=model, sizes=DRY if dry else FULL, peaks=peaks)


def measure(
    lab: Lab,
    *,
    budget_s: float,
    names: list[str] | None = None,
    begun: Callable[[str], object] = lambda _: None,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Run the sections; what each found, or why it found nothing.

    `begun` is told the name of each as it begins, and `keep` gets all that was found after each of them.
    """
    begin, on_gpu = lab.clock(), lab.device.type == "cuda"
    found: dict[str, Any] = {}
    lost_in: str | None = None
    for name in SECTIONS if names is None else names:
        if lost_in is not None:
            found[name] = {"skipped": f"{_LOST}{lost_in}"}
            continue
        start = lab.clock()
        if start - begin > budget_s:
            found[name] = {"skipped": f"the budget of {budget_s:.0f} s was spent"}
            continue
        sys.stderr.write(f"{name} ...\n")
        begun(name)
        try:
            rows = SECTIONS[name](lab)
            found[name] = {"seconds": lab.clock() - start, "rows": rows}
            if name in GOALS:
                found[name]["goal"] = GOALS[name].beside(rows)
                sys.stderr.write(f"  {found[name]['goal']}\n")
        except Exception as error:  # noqa: BLE001  # written down; what the others found must not be lost
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
            lost_in = name if _loses_device(error) else None
        keep(found)
        if lost_in is not None:
            continue
        gc.collect()  # engines know their schedulers and are known by them: only this gives their KVCache back
        if on_gpu:
            torch.cuda.empty_cache()
    return found


def _earlier_sections(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Sections that a file already has.

    Raises:
        ValueError: when they were measured on another machine, commit or model.
    """
    if not out.exists():
        return {}
    earlier = json.loads(out.read_text())
    for name, value in about.items():
        same = earlier[name] | {"date": value["date"]} == value if name == "machine" else earlier[name] == value
        if not same:
            raise ValueError(
                f"{out} was measured with {name} {earlier[name]!r}, this is {value!r}; name another file"
            )
    return earlier["sections"]


def main() -> int:
    """Entry point of the script; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3-8b", help="a name in perf.MODELS; lab-* makes it a dry run")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--backend", default="auto", choices=("auto", "dense", "cpu", "cuda"))
    parser.add_argument("--section", action="append", choices=tuple(SECTIONS), help="default: all of them")
    parser.add_argument("--budget-s", type=float, default=440.0)
    parser.add_argument("--section-s", type=float, default=240.0, help="with --out, what takes longer is ended")
    parser.add_argument("--commit", help="of the source, where this is no checkout that knows it")
    parser.add_argument("--out", type=Path, help="default: standard output")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    dtype = asked.dtype or ("bfloat16" if asked.device == "cuda" else "float32")
    machine, driver = asdict(describe_machine(asked.device)), driver_version()
    about = {
        "machine": machine,
        "driver": driver,
        "commit": asked.commit or commit(),
        "shape": asked.shape,
        "dtype": dtype,
    }
    about["backend"] = choose_backend(torch.device(asked.device), DTYPES[dtype], asked.backend).name
    earlier = _earlier_sections(asked.out, about) if asked.out else {}
    start = time.perf_counter()
    lab = make_lab(asked.shape, asked.device, dtype, asked.backend)
    about |= {"peaks": asdict(lab.peaks), "setup_s": time.perf_counter() - start}

    def write(sections: dict[str, Any]) -> None:
        both = earlier | {name: each for name, each in sections.items() if name not in earlier or "rows" in each}
        text = json.dumps(about | {"sections": {name: both[name] for name in SECTIONS if name in both}}, indent=1)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(asked.out) as file:
            file.write(f"{text}\n".encode())

    if asked.out:
        write({})
    sections = measure(
        lab,
        budget_s=asked.budget_s,
        names=[name for name in SECTIONS if name in (asked.section or SECTIONS)],
        begun=(lambda name: _tell({"begun": name})) if asked.child else lambda _: None,
        keep=write if asked.out else lambda _: None,
    )
    rest = [name for name, section in sections.items() if section.get("skipped", "").startswith(_LOST)]
    if rest and asked.child:
        _tell({"left": rest})
        return DEVICE_LOST
    if not asked.out:
        sys.stdout.write(json.dumps(about | {"sections": sections}, indent=1) + "\n")
    failed = [name for name, section in sections.items() if "failed" in section]
    sys.stderr.write(f"failed: {', '.join(failed)}\n" if failed else "all sections done\n")
    return 1 if failed else 0


def _tell(message: dict[str, Any]) -> None:
    """From a process that measures to the one that waits for it, a line each."""
    sys.stdout.write(f"{json.dumps(message)}\n")
    sys.stdout.flush()


def measure_in_processes(arguments: list[str]) -> int:
    """Measure in a process, and what is left when the device is lost to it, or it hangs, in another one.

    Only the end of a process gives the memory of a lost device back, and ends a section that never returns. The
    exit code is 1 where a section failed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--section", action="append")
    parser.add_argument("--section-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path)
    asked, others = parser.parse_known_args(arguments)
    others += ["--section-s", str(asked.section_s), "--out", str(asked.out)]
    rest, failed = asked.section or list(SECTIONS), False
    while True:
        told = [word for name in rest for word in ("--section", name)]
        code, messages = _watched([sys.executable, __file__, "--child", *others, *told], asked.section_s)
        begun = [message["begun"] for message in messages if "begun" in message]
        if code == DEVICE_LOST:
            rest, why = messages[-1]["left"], "the device was lost"
        elif code < 0 and begun:
            why = f"its process was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                why += f", perhaps since a section may take {asked.section_s:.0f} s"
            _note_failure(asked.out, begun[-1], why)
            rest = [name for name in rest if name not in begun]
        else:
            return 1 if failed else code
        sys.stderr.write(f"{begun[-1]}: {why}; left for a new process: {', '.join(rest) or 'nothing'}\n")
        failed = True
        if not rest:
            return 1


def _watched(command: list[str], limit_s: float) -> tuple[int, list[dict[str, Any]]]:
    """Run a process that measures; its exit code and its messages. It is killed when none comes for so long."""
    messages: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # this program
        assert process.stdout is not None  # noqa: S101  # it was asked for
        while True:
            killer = threading.Timer(limit_s, process.kill)
            killer.start()
            line = process.stdout.readline()
            killer.cancel()
            if not line:
                return process.wait(), messages
            messages.append(json.loads(line))


def _note_failure(out: Path, name: str, why: str) -> None:
    """Write down in the file of a process that is gone in which section it was."""
    found = json.loads(out.read_text())
    found["sections"][name] = {"failed": why}
    with complete_file(out) as file:
        file.write(f"{json.dumps(found, indent=1)}\n".encode())


if __name__ == "__main__":
    sys.exit(main() if "--child" in sys.argv or "--out" not in sys.argv else measure_in_processes(sys.argv[1:]))
