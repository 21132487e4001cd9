"""Requests drawn from ServeGen's models of clients (Alibaba Cloud, NSDI'26): times and lengths, no block ids.

ServeGen publishes distributions in place of requests. Of each client there are two files in a folder:
`chunk-i-trace.csv` has a row for each window of ten minutes, with the rate, the coefficient of variation, and the
family, shape and scale (s) of the gaps between requests; `chunk-i-dataset.json` has the distributions of the
lengths, which hold from their time until the next.
"""

import csv
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.core import blocks_for
from mooncake_lab.workload.formats import TraceError
from mooncake_lab.workload.formats.rows import DEFAULT_BLOCK_SIZE_TOKENS
from mooncake_lab.workload.trace import Trace

_Lengths: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""The values of a distribution, and their shares."""
_WINDOW_S: Final = 600.0
"""Of the last row of a client; each other one ends where the next begins."""
_PAIR: Final = re.compile(r"(\d+): ([0-9.eE+-]+)")
_TABLE: Final = re.compile(r"\{(\d+: [0-9.eE+-]+(, )?)*\}")


@dataclass(frozen=True, slots=True)
class _Window:
    """When requests of a client arrive, and how long they are."""

    start_s: float
    end_s: float
    family: str
    shape: float
    scale_s: float

    def arrivals_s(self, start_s: float, end_s: float, speed: float, rng: np.random.Generator) -> list[float]:
        """The times in the part of the window that is asked for."""
        at_s, end_s = max(self.start_s, start_s), min(self.end_s, end_s)
        found = list[float]()
        while True:
            gap = rng.gamma(self.shape) if self.family == "Gamma" else rng.weibull(self.shape)
            at_s += gap * self.scale_s / speed
            if at_s >= end_s:
                return found
            found.append(at_s)


def servegen_trace(
    folder: str | Path, *, start_s: float = 0.0, duration_s: float = 600.0, speed: float = 1.0, seed: int = 0
) -> Trace:
    """Draw the requests of all clients of a folder, in order of arrival.

    Args:
        folder: with the files of each client.
        start_s: the part of the models' days that is drawn begins here.
        duration_s: how long it is.
        speed: 2 doubles each client's rate.
        seed: the same one gives the same trace.

    Raises:
        TraceError: when a file is missing or wrong, with its line; or no client sends anything then.
        ValueError: when a number is not positive.
        OSError: when a file cannot be read.
    """
    folder = Path(folder)
    if not (start_s >= 0 and 0 < duration_s < math.inf and 0 < speed < math.inf):
        raise ValueError(f"start {start_s} s, duration {duration_s} s, speed {speed}: positive numbers are needed")
    found = list[tuple[float, int, int]]()
    clients = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: (len(path.name), path.name))
    if not clients:
        raise TraceError(f"{folder} has no client; allowed is a folder with files such as chunk-0-trace.csv")
    for number, path in enumerate(clients):
        rng = np.random.default_rng([seed, number])
        lengths = _lengths(path.with_name(path.name.replace("-trace.csv", "-dataset.json")))
        for window in _windows(path):
            if window.end_s <= start_s or window.start_s >= start_s + duration_s:
                continue
            known = [at_s for at_s in lengths if at_s <= window.start_s]
            if not known:
                continue  # nothing says how long its requests are
            arrivals = window.arrivals_s(start_s, start_s + duration_s, speed, rng)
            inputs, outputs = (_drawn(each, len(arrivals), rng) for each in lengths[max(known)])
            found += zip(arrivals, inputs, outputs, strict=True)
    if not found:
        raise TraceError(f"{folder}: no client sends a request in {duration_s:g} s from {start_s:g} s on")
    return _trace(folder, sorted(found), seed)


def _trace(folder: Path, rows: list[tuple[float, int, int]], seed: int) -> Trace:
    at_s, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    counts = np.array([blocks_for(int(tokens), DEFAULT_BLOCK_SIZE_TOKENS) for tokens in inputs])
    return Trace(
        name=folder.name,
        origin="generated",
        arrival_s=at_s - at_s[0],
        input_tokens=inputs.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        block_ids=np.arange(counts.sum()),
        block_starts=np.concatenate([[0], np.cumsum(counts)]),
        ids="none",
        format="servegen",
        source=f"drawn from ServeGen's clients in {folder.name}, seed {seed}",
    )


def _windows(path: Path) -> list[_Window]:
    """The rows of a client; one without a family has no requests.

    Raises:
        TraceError: naming the line that is wrong.
    """
    rows = list[tuple[float, str, float, float]]()
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            try:
                start_s, _rate, _cv, family, shape, scale_s = row
                numbers = float(start_s), float(shape or "nan"), float(scale_s or "nan")
            except ValueError:
                numbers = (math.nan,) * 3
                family = "?"
            good = family in {"Gamma", "Weibull"} and min(numbers[1:]) > 0 and all(map(math.isfinite, numbers))
            if not (good or (family == "" and math.isfinite(numbers[0]))):
                raise TraceError(
                    f"{path}:{number}: the row is {','.join(row)[:80]!r}; allowed is a start (s), a rate, a"
                    " coefficient of variation, Gamma or Weibull, and a positive shape and scale"
                )
            rows.append((numbers[0], family, numbers[1], numbers[2]))
    ends = [after[0] for _, after in pairwise(rows)] + [row[0] + _WINDOW_S for row in rows[-1:]]
    return [_Window(row[0], end_s, *row[1:]) for row, end_s in zip(rows, ends, strict=True) if row[1]]


def _lengths(path: Path) -> dict[float, tuple[_Lengths, _Lengths]]:
    """The distributions of prompts and answers, by the time from which they hold.

    Raises:
        TraceError: naming the field that is wrong.
    """
    if not path.is_file():
        raise TraceError(f"{path} is missing; each client needs a file with its lengths")
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}: {error}; allowed are distributions, as ServeGen writes them") from None
    found = dict[float, tuple[_Lengths, _Lengths]]()
    for start, fields in content.items():
        inputs, outputs = (
            _distribution(path, start, name, fields.get(name, "")) for name in ("input_tokens", "output_tokens")
        )
        if len(inputs[0]) and len(outputs[0]):
            found[float(start)] = inputs, outputs
    return found


def _distribution(path: Path, start: str, name: str, text: str) -> _Lengths:
    if not start.isdecimal() or not _TABLE.fullmatch(text):
        raise TraceError(
            f"{path}: field {start}.{name} is {text[:60]!r}; allowed is a table such as '{{100: 0.5, 220: 0.5}}'"
        )
    pairs = [(int(value), float(share)) for value, share in _PAIR.findall(text) if int(value) > 0]
    shares = np.array([share for _, share in pairs], np.float64)
    if pairs and not (np.isfinite(shares).all() and shares.min() >= 0 and shares.sum() > 0):
        raise TraceError(f"{path}: field {start}.{name} has shares that are none; allowed are numbers from 0")
    return np.array([value for value, _ in pairs], np.int64), shares / (shares.sum() or 1)


def _drawn(lengths: _Lengths, count: int, rng: np.random.Generator) -> list[int]:
    return rng.choice(lengths[0], size=count, p=lengths[1]).tolist()
