"""Smaller KVCaches: how often the answer is still right, and how many bytes are left (SnapKV and others)."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import pandas as pd
import torch

from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.compression import (
    Combined,
    FullCache,
    KCache,
    Method,
    MiniCache,
    Oracle,
    PyramidInfer,
    RandomTokens,
    RecentTokens,
    Session,
    SnapKV,
)
from mooncake_lab.compression.exam import Make, When, exam, marks
from mooncake_lab.compression.questions import NEEDLE_TOKENS, Sample
from mooncake_lab.core import carried_folder
from mooncake_lab.engine import LlamaModel, load_model
from mooncake_lab.metrics import wilson

SHARES: Final = (0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Shares of the prompt that an eviction keeps."""
KNOBS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
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
)
"""Methods and what is varied: the share kept, the deepest layer's share, bits an element, or values fetched."""
WINDOW: Final = 16
PROMPTS: Final[Mapping[str, int]] = MappingProxyType({"smoke": 2, "classroom": 8, "full": 500, "gpu": 500})
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
        made = {(name, knob): _maker(name, knob) for name in self.methods for knob in KNOBS[name]}
        labels = {f"{name} {knob:g}": (name, knob) for name, knob in made}
        makers = {label: made[key] for label, key in labels.items()}
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
    """Seeds put together: share of right answers with its 95 % interval, and bytes as a share of the full cache.

    Args:
        rows: of `Exam`.

    Returns:
        One row a task, time, method and knob.
    """
    by = ["task", "when", "method", "knob"]
    table = rows.groupby(by, sort=False)[["right", "prompts", "device_bytes", "host_bytes", "full_bytes"]]
    summed = table.agg(
        {"right": "sum", "prompts": "sum", "device_bytes": "mean", "host_bytes": "mean", "full_bytes": "mean"}
    ).reset_index()
    counted = zip(summed["right"].to_numpy(), summed["prompts"].to_numpy(), strict=True)
    bounds = [wilson(int(right), int(prompts)) for right, prompts in counted]
    return summed.assign(
        accuracy=summed["right"] / summed["prompts"],
        low=[low for low, _ in bounds],
        high=[high for _, high in bounds],
        device_share=summed["device_bytes"] / summed["full_bytes"],
        stored_share=(summed["device_bytes"] + summed["host_bytes"]) / summed["full_bytes"],
    )


def right_answers(table: pd.DataFrame, methods: Mapping[str, tuple[str, float]]) -> pd.DataFrame:
    """Right answers out of prompts, to be read: a row a task and time, a column a method.

    Args:
        table: what `accuracy` made.
        methods: method and knob by the name of a column.
    """
    keys = list(zip(table["method"], table["knob"], strict=True))
    counted = table.assign(
        said=[f"{right} of {asked}" for right, asked in zip(table["right"], table["prompts"], strict=True)]
    )
    columns = {
        name: counted[[key == chosen for key in keys]].set_index(["task", "when"])["said"]
        for name, chosen in methods.items()
    }
    return (
        pd.DataFrame(columns)
        .reindex(list(dict.fromkeys(zip(table["task"], table["when"], strict=True))))
        .fillna("")
    )


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


BREAKING: Final[Mapping[str, tuple[str, When]]] = MappingProxyType(
    {
        "recall, compressed before the question": ("recall", "later"),
        "recall, a second question afterwards": ("two_questions", "turn"),
        "needle, compressed before the question": ("needle", "later"),
        "recall, the question ahead of its records": ("question_first", "asked"),
    }
)
"""Where methods break: a name, the task, and when the cache is made smaller."""


def lab_model(name: str = "lab-recall", positions: int = 2048) -> LlamaModel:
    """A model of `data/models`, or of random weights, on the CPU in float32."""
    where = name if name.startswith("random:") else str(carried_folder("models") / name)
    return load_model(where, device="cpu", dtype="float32", positions=positions)


@lru_cache(maxsize=2)
def _session(model: str) -> Session:
    return Session(lab_model(model), room_tokens=24_576)


def _snapkv(tokens: int) -> SnapKV:
    return SnapKV(capacity=tokens, window=WINDOW)


def _random(tokens: int, sample: Sample) -> RandomTokens:
    return RandomTokens(capacity=tokens, recent=WINDOW, seed=int(sample.tokens.sum()))


def _merged(bits: float, start: float = 0.5) -> MiniCache:
    return MiniCache(bits=None if bits == 32 else int(bits), start=start)


_Maker = Callable[[Sample, float, int], Method]
"""From a sample, a knob, and the knob as a share of the sample's tokens."""
_MAKERS: Final[Mapping[str, _Maker]] = {
    "full": lambda _, __, ___: FullCache(),
    "oracle": lambda sample, _, tokens: Oracle(capacity=tokens, evidence=sample.questions[-1].evidence),
    "snapkv": lambda _, __, tokens: _snapkv(tokens),
    "snapkv_wide": lambda _, __, tokens: replace(_snapkv(tokens), kernel=2 * NEEDLE_TOKENS - 1),
    "snapkv_unpooled": lambda _, __, tokens: replace(_snapkv(tokens), kernel=1),
    "sinks_recent": lambda _, __, tokens: RecentTokens(capacity=tokens, sinks=4),
    "recent": lambda _, __, tokens: RecentTokens(capacity=tokens),
    "random": lambda sample, _, tokens: _random(tokens, sample),
    "pyramidinfer": lambda _, knob, __: PyramidInfer(decay=knob, min_context=16),
    "minicache": lambda _, knob, __: _merged(knob),
    "rounding": lambda _, knob, __: _merged(knob, start=1.0),
    "kcache": lambda _, knob, __: KCache(top=int(knob)),
    "snapkv_kcache": lambda _, __, tokens: Combined(_snapkv(tokens), KCache(top=8)),
}


def _maker(name: str, knob: float) -> Make:
    """Makes a method of a name and knob for a sample.

    Raises:
        ValueError: when there is no such method.
    """
    if name not in _MAKERS:
        raise ValueError(f"no method {name!r}; there are {', '.join(_MAKERS)}")
    return lambda sample: _MAKERS[name](sample, knob, max(WINDOW + 2, round(knob * len(sample.tokens))))


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


def provenance(asked: Sequence[Exam]) -> str:
    """What to say under a figure of exams that were just answered."""
    seeds = len({each.seed for each in asked})
    plural = "" if seeds == 1 else "s"
    with one_thread():
        machine = describe_machine()
    return f"measured: {asked[0].prompts} prompts a task and seed, {seeds} seed{plural}; {machine}"


def kept_provenance(rows: pd.DataFrame) -> str:
    """What to say under a figure of the committed table."""
    seeds = len(set(rows["seed"]))
    prompts_of = rows["prompts"].to_numpy()
    least, most = int(prompts_of.min()), int(prompts_of.max())
    prompts = f"{least}" if least == most else f"{least} to {most}"
    plural = "" if seeds == 1 else "s"
    return f"measured: {prompts} prompts a task and seed, {seeds} seed{plural}; {rows['machine'].iloc[0]}"


def compare(
    methods: Mapping[str, Method], *, prompts: int, when: When = "asked", task: str = "recall"
) -> dict[str, float]:
    """Share of right answers by method, for those who write their own."""
    session = _session("lab-recall")
    makers = {name: _always(method) for name, method in methods.items()}
    with one_thread():
        found = [marks(session, sample, makers, when=when) for sample in exam(task, prompts)]
    return {name: sum(mark[name].right for mark in found) / prompts for name in methods}


def _always(method: Method) -> Make:
    return lambda _: method
