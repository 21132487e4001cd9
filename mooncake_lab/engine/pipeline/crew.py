"""A crew of processes that prefill together: started, given jobs, always ended; and their shares put together."""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.pipeline.jobs import CppJob, CrewSpec, Job, PromptTokens, RunaheadJob, Share
from mooncake_lab.engine.pipeline.worker import begin, join, share_of
from mooncake_lab.perf import chunk_sizes

_GRACE_S: Final = 5.0
"""How long the others' errors are waited for, to find the process that ended among those that lost it."""


class ProcessDiedError(RuntimeError):
    """A process of a crew ended or failed in the middle of something; the crew is stopped.

    Args:
        rank: which one.
        said: what is known of the reason.
    """

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(said)
        self.rank = rank


class Crew:
    """Processes on this machine that share prefills. Use it in a `with` statement: leaving it ends them all.

    A process that dies or fails is reported by rank, and the rest are stopped: they would wait for it. A process
    whose crew is gone is ended by the kernel.

    Args:
        spec: what to start.

    Raises:
        ProcessDiedError: when a process does not come up.
        TimeoutError: when it takes longer than the spec allows.
    """

    def __init__(self, spec: CrewSpec) -> None:
        self.spec = spec
        self.pids: list[int] = []
        """Process ids by rank; empty once the crew is stopped."""
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-lab-crew-"))
        # one executor per rank, since each rank has a process of its own
        self._ranks = [ProcessPoolExecutor(1, get_context("spawn")) for _ in range(spec.processes)]
        self._stack.callback(self._stop)
        self.pids = self._gather("starting", spec.timeout_s, begin, [(os.getpid(),)] * spec.processes)
        rendezvous = str(Path(folder) / "rendezvous")
        joining = [(rank, spec, rendezvous) for rank in range(spec.processes)]
        self._gather("coming up", spec.timeout_s, join, joining)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(self, job: Job, timeout_s: float | None = None) -> list[Share]:
        """Do a job together; the shares of those that took part, by rank.

        Args:
            job: what to do.
            timeout_s: after which it is given up; None takes the spec's.

        Raises:
            ValueError: when the job needs more processes than there are, or the crew has been stopped.
            ProcessDiedError: when a process dies or fails.
            TimeoutError: when it takes longer than the spec allows.
        """
        if job.processes > self.spec.processes:
            raise ValueError(f"a job for {job.processes} processes; this crew has {self.spec.processes}")
        if not self.pids:
            raise ValueError("this crew was stopped; start another crew")
        jobs = [(job,)] * self.spec.processes
        return self._gather("prefilling", timeout_s or self.spec.timeout_s, share_of, jobs)[: job.processes]

    def close(self) -> None:
        """End all processes and remove what they shared; once is enough, more does nothing."""
        self._stack.close()

    def _gather(
        self, doing: str, timeout_s: float, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """What a function gives in every process."""
        futures = [_submit(rank, function, given) for rank, given in zip(self._ranks, arguments, strict=True)]
        done, missing = wait(futures, timeout_s, FIRST_EXCEPTION)
        if missing and any(future.exception() for future in done):
            done, _ = wait(futures, _GRACE_S)
        errors = {rank: future.exception() for rank, future in enumerate(futures) if future in done}
        failed = [rank for rank, error in errors.items() if error is not None]
        if not failed and len(errors) == len(futures):
            return [future.result() for future in futures]
        self.close()
        if not failed:
            ranks = [rank for rank in range(len(futures)) if rank not in errors]
            raise TimeoutError(f"ranks {ranks} gave no answer within {timeout_s:g} s of {doing}")
        rank = next((each for each in failed if isinstance(errors[each], BrokenProcessPool)), failed[0])
        error = errors[rank]
        said = f"rank {rank} of {len(futures)} failed while {doing}; the others were stopped: {error}"
        raise ProcessDiedError(rank, said) from error

    def _stop(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may wait in the network for one that is gone: it cannot be asked
        self.pids = []
        for rank in self._ranks:
            rank.shutdown(cancel_futures=True)


def _submit(rank: ProcessPoolExecutor, function: Callable[..., Any], given: tuple[Any, ...]) -> "Future[Any]":
    """What a function gives in a process; that a process had died before is its failure, too."""
    try:
        return rank.submit(function, *given)
    except BrokenProcessPool as error:
        failed = Future[Any]()
        failed.set_exception(error)
        return failed


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Together:
    """A prefill that several processes did."""

    first_token: int
    kv: tuple[torch.Tensor, ...]
    """A layer: (2, tokens, kv_heads, head_width), keys then values."""
    shares: tuple[Share, ...]
    """What each process did, by rank."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that went from process to process."""
        return sum(share.sent_bytes for share in self.shares)

    @property
    def seconds(self) -> float:
        """From the first thing that any process did to the last."""
        times = [(each.start_s, each.end_s) for share in self.shares for each in share.activities]
        return max(end for _, end in times) - min(start for start, _ in times)

    def span(self, fingerprint: bytes) -> KVSpan:
        """The KVCache as an engine takes it."""
        return KVSpan(fingerprint=fingerprint, start=0, tokens=self.kv[0].shape[1], layers=self.kv)


def cpp_prefill(crew: Crew, tokens: PromptTokens, *, chunk_tokens: int, processes: int | None = None) -> Together:
    """Prefill a prompt in chunks, each process holding a run of layers.

    Args:
        crew: the processes.
        tokens: the prompt.
        chunk_tokens: of each chunk but the last.
        processes: how many take part; None takes all.

    Raises:
        ValueError: when there is nothing to cut, or more processes than layers or than the crew has.
        ProcessDiedError: when a process dies or fails.
    """
    prompt = np.asarray(tokens, dtype=np.int64)
    sizes = tuple(chunk_sizes(len(prompt), chunk_tokens))
    return _together(crew, CppJob(tokens=prompt, sizes=sizes, processes=processes or crew.spec.processes))


def runahead_prefill(crew: Crew, tokens: PromptTokens, *, bounds: Sequence[int]) -> Together:
    """Prefill a prompt in runs of tokens that end at `bounds`, a process each.

    Raises:
        ValueError: when a run is empty or there are more than the crew has processes.
        ProcessDiedError: when a process dies or fails.
    """
    return _together(crew, RunaheadJob(tokens=np.asarray(tokens, dtype=np.int64), bounds=tuple(bounds)))


def _together(crew: Crew, job: Job) -> Together:
    shares = crew.run(job)
    (token,) = [share.first_token for share in shares if share.first_token is not None]
    dtype = DTYPES[crew.spec.dtype]
    layers = [layer for share in sorted(shares, key=lambda each: each.first_layer) for layer in share.kv]
    kv = tuple(torch.from_numpy(layer).view(dtype).squeeze(-1) for layer in layers)
    return Together(first_token=token, kv=kv, shares=tuple(shares))


def overlap_share(shares: Sequence[Share]) -> float:
    """Share of the time with any process computing in which two or more of them were.

    Raises:
        ValueError: when no worker computed.
    """
    edges = sorted(
        edge
        for share in shares
        for each in share.activities
        if each.what == "compute"
        for edge in ((each.start_s, 1), (each.end_s, -1))
    )
    if not edges:
        raise ValueError(f"none of {len(shares)} processes computed anything; there is no overlap to measure")
    busy_s = together_s = 0.0
    computing, since_s = 0, edges[0][0]
    for at_s, change in edges:
        busy_s += (at_s - since_s) * (computing >= 1)
        together_s += (at_s - since_s) * (computing >= 2)
        computing, since_s = computing + change, at_s
    return together_s / busy_s if busy_s else 0.0
