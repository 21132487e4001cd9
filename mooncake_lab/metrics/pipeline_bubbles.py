"""Where the stages of a pipeline stood idle, and why: bubbles by the causes that SARATHI §3.2 and Fig. 5 name.

Every idle second has one cause. A stage waits before its first iteration (*fill*) and after its last (*drain*).
Between two iterations it waits because the work around the wait is unequal: prompts of different lengths (*PB1*),
a prompt beside decodes (*PB2*), or decodes with different contexts (*PB3*). The first stage waits for a
micro-batch to come back, so all that is in flight counts; a later one waits for its neighbour, so the two
iterations count. Where a micro-batch had nothing to do, the wait is *no work*.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import sum_in_order
from mooncake_lab.simulation import PipelineRun

CAUSES: Final = ("fill", "drain", "PB1", "PB2", "PB3", "no work")
"""Why a stage is idle; with *busy* they add up to stages x makespan."""


def gaps_s(run: PipelineRun) -> npt.NDArray[np.float64]:
    """Idle seconds of each stage before each iteration, (iterations, stages); the first row is the fill."""
    start_s, end_s = np.asarray(run.start_s), np.asarray(run.end_s)
    return start_s - np.vstack([np.zeros((1, end_s.shape[1])), end_s[:-1]])


def account(run: PipelineRun) -> Mapping[str, float]:
    """Stage-seconds by what they were spent on: busy and each of `CAUSES`; they add up to stages x makespan.

    Raises:
        ValueError: when nothing ran.
    """
    if not run.start_s:
        raise ValueError("a pipeline that ran nothing has no bubbles to tell apart")
    gaps, causes = gaps_s(run), gap_causes(run)
    spent = {"busy": float((np.asarray(run.end_s) - np.asarray(run.start_s)).sum())}
    spent |= {cause: float(gaps[causes == index].sum()) for index, cause in enumerate(CAUSES)}
    spent["drain"] = float((run.makespan_s - np.asarray(run.end_s[-1])).sum())
    return spent


def idle_share(run: PipelineRun) -> float:
    """Share of the time of all stages in which they did nothing."""
    spent = account(run)
    return 1 - spent["busy"] / sum_in_order(spent.values())


def gap_causes(run: PipelineRun) -> npt.NDArray[np.int64]:
    """The place in `CAUSES` of each gap, (iterations, stages)."""
    prompts = np.asarray(run.prompt_tokens) > 0
    causes = np.empty(np.shape(run.start_s), dtype=np.int64)
    causes[:, 1:] = _pair_causes(prompts)[:, None]
    causes[:, 0] = _loop_causes(prompts, run.micro_batch)
    causes[np.asarray(run.starved)] = CAUSES.index("no work")
    causes[0] = CAUSES.index("fill")
    return causes


def _pair_causes(prompts: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Between an iteration and the one before it: both carry prompts, neither does, or one."""
    before = np.roll(prompts, 1)
    mixed = np.where(~prompts & ~before, CAUSES.index("PB3"), CAUSES.index("PB2"))
    return np.where(prompts & before, CAUSES.index("PB1"), mixed)


def _loop_causes(prompts: npt.NDArray[np.bool_], micro_batch: Sequence[int]) -> npt.NDArray[np.int64]:
    """Among all that passed since the same micro-batch last entered: all carry prompts, none does, or some."""
    counted = np.concatenate([[0], np.cumsum(prompts)])
    last: dict[int, int] = {}
    causes = np.empty(len(prompts), dtype=np.int64)
    for index, batch in enumerate(micro_batch):
        since = last.get(batch, 0)
        with_prompt, passed = int(counted[index + 1] - counted[since]), index + 1 - since
        name = "PB3" if with_prompt == 0 else "PB1" if with_prompt == passed else "PB2"
        causes[index] = CAUSES.index(name)
        last[batch] = index
    return causes
