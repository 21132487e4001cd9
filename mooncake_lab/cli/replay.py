"""`mooncake-lab replay`: a scaled-down trace through a live cluster."""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_lab.cli.options import (
    TBT,
    TTFT,
    Admission,
    Batching,
    Coupled,
    Decode,
    Device,
    Json,
    Lenient,
    LiveSeed,
    Placement,
    Prefill,
    Speed,
    Threads,
    TraceFile,
    TransferBackend,
    at_least,
    failing,
    print_numbers,
    read_or_fail,
)
from mooncake_lab.cli.serve import live_spec, show_start
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import SLO, Finished, Record, Rejected, write_log
from mooncake_lab.workload import Trace


def replay(
    context: typer.Context,
    trace: TraceFile,
    num_prompts: Annotated[int, at_least(1, "Number of requests to replay, from the start of the trace.")] = 100,
    speed: Speed = 1.0,
    divide: Annotated[int, at_least(1, "Divide all lengths and the block size by this number.")] = 32,
    model: Annotated[
        str, typer.Option(metavar="DIR|random:SHAPE", help="The model to serve.")
    ] = "random:lab-tiny",
    prefill: Prefill = None,
    decode: Decode = None,
    coupled: Coupled = None,
    batching: Batching = "sarathi_serve",
    placement: Placement = None,
    admission: Admission = "none",
    ttft_slo: TTFT = 30.0,
    tbt_slo: TBT = 0.1,
    transfer_backend: TransferBackend = "tcp",
    max_model_len: Annotated[int, at_least(2, "Longest context; longer requests are left out.")] = 8192,
    device: Device = "auto",
    threads: Threads = 1,
    seed: LiveSeed = 0,
    log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the run log here, as JSON lines.")
    ] = None,
    lenient: Lenient = False,
    json_: Json = False,
) -> None:
    """Replay the beginning of a trace on a live cluster in real time, and print a summary.

    All lengths are divided by `--divide`. Equal blocks become equal tokens, so what could be reused in the trace
    can be reused here. The numbers come from the run log of the cluster, as in `simulate`.

    Example: mooncake-lab replay data/traces/conversation_trace.jsonl --num-prompts 50 --speed 10 --prefill 2
    """
    options = locals()
    scaled = _scaled(read_or_fail("replay", trace, lenient=lenient), divide, max_model_len, num_prompts, speed)
    with failing("replay", RuntimeError):
        spec, live = live_spec(context, options, block_size_tokens=scaled.block_size_tokens, spares=0)
        show_start()
        numbers = _replayed(scaled, spec, live, SLO(ttft_s=ttft_slo, tbt_s=tbt_slo), log)
    print_numbers({"file": str(trace), "divided_by": divide, "speed": speed, **numbers}, json_=json_)


def _scaled(trace: Trace, divide: int, most_tokens: int, requests: int, speed: float) -> Trace:
    from mooncake_lab.workload.transforms import scaled_down

    try:
        scaled = scaled_down(trace, divide, most_tokens=most_tokens).head(requests)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return replace(scaled, arrival_s=(scaled.arrival_s - scaled.arrival_s[0]) / speed)


def _replayed(trace: Trace, spec: ClusterSpec, live: Any, slo: SLO, log: Path | None) -> dict[str, Any]:
    """Start a cluster, replay, and close it."""
    from mooncake_lab.metrics import check_log, run_summary
    from mooncake_lab.serving import LiveCluster

    started_s = time.perf_counter()
    with LiveCluster(spec, live) as cluster:
        opened_s = time.perf_counter() - started_s
        with _progress(len(trace)) as note:
            cluster.on_record = note
            records = cluster.run(trace.requests())
    if log is not None:
        write_log(log, records)
    violations = check_log(records)
    if violations:
        raise RuntimeError(f"the run log violates {violations[0].invariant}: {violations[0].sentence}")
    summary = run_summary(records, slo)
    summary["run_s"] = summary.pop("simulated_s")
    return {"workers": list(spec.roles), "start_s": opened_s, **summary}


@contextlib.contextmanager
def _progress(requests: int) -> Generator[Callable[[Record], None]]:
    """A progress bar on a terminal's stderr over the requests of a run; call what is yielded with each record."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=requests)
        yield lambda record: bar.advance(task, isinstance(record, Finished | Rejected))
