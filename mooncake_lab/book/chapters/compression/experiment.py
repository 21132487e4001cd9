"""Smaller KVCaches: how often the answer is still right, and how many bytes are left (SnapKV and others)."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import pandas as pd
import torch

from mooncake_lab import compression
from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.book.experiments import where
from mooncake_lab.compression.exam import Make, When, exam, marks
from mooncake_lab.compression.questions import NEEDLE_TOKENS, Sample
from mooncake_lab.core import carried_folder, entry
from mooncake_lab.engine import LlamaModel, load_model
from mooncake_lab.metrics import wilson

SHARES: Final = (0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Shares of the prompt that an eviction keeps."""
KNOBS: Final = {
    "full": (1,),
    "oracle": SHARES,
    "snapkv": SHARES,
    "snapkv_wide": SHARES,
    "snapkv_unpooled": SHARES,
    "sinks_recent": SHARES,
    "recent": SHARES,
    "random": SHARES,
    "pyramidinfer": (0.9, 0.5, 0.1),
    "minicache": (32, 8, 4, 2),
    "rounding": (8, 4, 2),
    "kcache": (128, 32, 8, 2),
    "snapkv_kcache": (0.25, 0.125, 0.0625),
}
"""Methods and what is varied: the share kept, the deepest layer's share, bits an element, or values fetched."""
WINDOW: Final = 16
PROMPTS: Final = {"smoke": 2, "classroom": 8, "full": 500, "gpu": 500}
"""Prompts a task and seed, by scale."""
_FEW = ("full", "oracle", "snapkv", "sinks_recent", "random", "pyramidinfer", "minicache", "kcache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """Some prompts of one task, answered with every method's cache."""

    task: str = "recall"
    when: When = "asked"
    """When the cache is made smaller."""
    prompts: int = 16
    length: int = 1024
    methods: tuple[str, ...] = tuple(KNOBS)
    model: str = "lab-recall"
    """A directory of `data/models`, or `random:SHAPE`."""
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a method and knob: how many answers were right, and the bytes of a compressed context."""
        session = _session(self.model)
        labels = {f"{name} {knob:g}": (name, knob) for name in self.methods for knob in KNOBS[name]}
        makers = {label: partial(_made_of, *key) for label, key in labels.items()}
        samples = exam(self.task, self.prompts, seed=self.seed, length=self.length)
        with one_thread():
            found = [marks(session, sample, makers, when=self.when) for sample in samples]
        per_token = session.plain.config.kv_bytes_per_token(session.plain.embedding.element_size())
        for label, (name, knob) in labels.items():
            each = [mark[label] for mark in found]
            yield {
                "method": name,
                "knob": knob,
                "right": sum(mark.right for mark in each),
                "device_bytes": sum(mark.device_bytes for mark in each) / len(each),
                "host_bytes": sum(mark.host_bytes for mark in each) / len(each),
                "full_bytes": _compressed_at(samples[0], self.when) * per_token,
            }


def accuracy(rows: pd.DataFrame) -> pd.DataFrame:
    """Seeds put together: share of right answers with its 95 % interval, and bytes over those of a full cache."""
    by = ["task", "when", "method", "knob"]
    sums = {"right": "sum", "prompts": "sum", "device_bytes": "mean", "host_bytes": "mean", "full_bytes": "mean"}
    summed = rows.groupby(by, sort=False).agg(sums).reset_index()
    counted = zip(summed["right"].tolist(), summed["prompts"].tolist(), strict=True)
    low, high = zip(*(wilson(right, prompts) for right, prompts in counted), strict=True)
    return summed.assign(
        accuracy=summed["right"] / summed["prompts"],
        low=low,
        high=high,
        device_share=summed["device_bytes"] / summed["full_bytes"],
        stored_share=(summed["device_bytes"] + summed["host_bytes"]) / summed["full_bytes"],
    )


def right_answers(table: pd.DataFrame, methods: Mapping[str, tuple[str, float]]) -> pd.DataFrame:
    """Right answers out of prompts, to be read: a row a task and time, a column a method.

    Args:
        table: what `accuracy` made.
        methods: method and knob by the name of a column.
    """
    said = table["right"].astype(str) + "/" + table["prompts"].astype(str)
    counted = table.assign(said=said).set_index(["task", "when"])
    columns = {name: where(counted, method=method, knob=knob)["said"] for name, (method, knob) in methods.items()}
    return pd.DataFrame(columns).reindex(counted.index.unique()).fillna("")


def exams(scale: str, seed: int = 0) -> tuple[Exam, ...]:
    """What a chapter asks at a scale: recall with every method, and where methods break with some of them."""
    prompts = PROMPTS[scale]
    length = 256 if scale == "smoke" else 1024
    seeds = range(seed, seed + (3 if prompts >= 500 else 1))
    base = Exam(prompts=prompts, length=length)
    main = [replace(base, task=task, seed=each) for task in ("recall", "needle") for each in seeds]
    few = replace(base, methods=_FEW)
    hard = [replace(few, task=task, when=when, seed=each) for task, when in BREAKING.values() for each in seeds]
    return (*main, *hard)


BREAKING: Final = {
    "recall, compressed before the question": ("recall", "later"),
    "recall, a second question afterwards": ("two_questions", "turn"),
    "needle, compressed before the question": ("needle", "later"),
    "recall, the question ahead of its records": ("question_first", "asked"),
}
"""Where methods break: a name, the task, and when the cache is made smaller."""


def lab_model(name: str = "lab-recall", positions: int = 2048) -> LlamaModel:
    """A model of `data/models`, or of random weights, on the CPU in float32."""
    where = name if name.startswith("random:") else str(carried_folder("models") / name)
    return load_model(where, device="cpu", dtype="float32", positions=positions)


@lru_cache(maxsize=2)
def _session(model: str) -> compression.Session:
    return compression.Session(lab_model(model), room_tokens=24_576)


def _snapkv(tokens: int, kernel: int = 5) -> compression.SnapKV:
    return compression.SnapKV(capacity=tokens, window=WINDOW, kernel=kernel)


def _random(tokens: int, seed: int) -> compression.RandomTokens:
    return compression.RandomTokens(capacity=tokens, recent=WINDOW, seed=seed)


def _merged(bits: float, start: float = 0.5) -> compression.MiniCache:
    return compression.MiniCache(bits=None if bits == 32 else int(bits), start=start)


_MAKERS: Final[Mapping[str, Callable[[Sample, float, int], compression.Method]]] = {
    "full": lambda _, __, ___: compression.FullCache(),
    "oracle": lambda sample, _, n: compression.Oracle(capacity=n, evidence=sample.questions[-1].evidence),
    "snapkv": lambda _, __, n: _snapkv(n),
    "snapkv_wide": lambda _, __, n: _snapkv(n, kernel=2 * NEEDLE_TOKENS - 1),
    "snapkv_unpooled": lambda _, __, n: _snapkv(n, kernel=1),
    "sinks_recent": lambda _, __, n: compression.RecentTokens(capacity=n, sinks=4),
    "recent": lambda _, __, n: compression.RecentTokens(capacity=n),
    "random": lambda sample, _, n: _random(n, int(sample.tokens.sum())),
    "pyramidinfer": lambda _, knob, __: compression.PyramidInfer(decay=knob, min_context=16),
    "minicache": lambda _, knob, __: _merged(knob),
    "rounding": lambda _, knob, __: _merged(knob, start=1.0),
    "kcache": lambda _, knob, __: compression.KCache(top=int(knob)),
    "snapkv_kcache": lambda _, __, n: compression.Combined(_snapkv(n), compression.KCache(top=8)),
}
"""Methods by name: from a sample, a knob, and the knob as a share of the sample's tokens."""


def _made_of(name: str, knob: float, sample: Sample) -> compression.Method:
    return entry(_MAKERS, name, "no method")(sample, knob, max(WINDOW + 2, round(knob * len(sample.tokens))))


def _compressed_at(sample: Sample, when: When) -> int:
    last, first = sample.questions[-1], sample.questions[0]
    return {"asked": last.answer_at, "later": last.asked_at, "turn": first.answer_at}[when]


@contextmanager
def one_thread() -> Generator[None]:
    """Let torch use one: the model is small, and threads that wait for each other count as processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def provenance(rows: pd.DataFrame, machine: str = "") -> str:
    """What to say under a figure of exams: of the committed table, or just answered here."""
    seeds, prompts = len(set(rows["seed"])), sorted({min(rows["prompts"]), max(rows["prompts"])})
    asked = " to ".join(map(str, prompts))
    seeds_said = f"{seeds} seed{'' if seeds == 1 else 's'}"
    return f"measured: {asked} prompts a task and seed, {seeds_said}; {machine or rows['machine'].iloc[0]}"


def machine_of_one_thread() -> str:
    """This machine, as it computes here."""
    with one_thread():
        return str(describe_machine())


def compare(
    methods: Mapping[str, compression.Method], *, prompts: int, when: When = "asked", task: str = "recall"
) -> dict[str, float]:
    """Share of right answers by method, for those who write their own."""
    session = _session("lab-recall")
    makers: dict[str, Make] = {name: lambda _, method=method: method for name, method in methods.items()}
    with one_thread():
        found = [marks(session, sample, makers, when=when) for sample in exam(task, prompts)]
    return {name: sum(mark[name].right for mark in found) / prompts for name in methods}
