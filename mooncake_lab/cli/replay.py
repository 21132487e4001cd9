"""`mooncake-lab replay`: a scaled-down trace through a live cluster."""

import time
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
    failing,
    print_numbers,
    progress,
    read_or_fail,
    refuse_typed,
)
from mooncake_lab.cli.serve import live_spec, show_start
from mooncake_lab.core import SLO, write_log
from mooncake_lab.workload import Trace

_OF_A_CLUSTER = (
    "prefill", "decode", "coupled", "batching", "placement", "admission", "ttft_slo", "tbt_slo",
    "transfer_backend", "device", "threads", "seed", "log",
)  # fmt: skip
"""Parameters without effect on a server that is already running."""


def replay(
    context: typer.Context,
    trace: TraceFile,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Number of requests to replay, from the start of the trace.")
    ] = 100,
    speed: Speed = 1.0,
    divide: Annotated[int, typer.Option(min=1, help="Divide all lengths and the block size by this number.")] = 32,
    base_url: Annotated[
        str | None, typer.Option(help="Replay against this server (http://host:port) instead of a new cluster.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="MOONCAKE_LAB_API_KEY", help="Key of that server.")] = None,
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
    max_model_len: Annotated[
        int, typer.Option(min=2, help="Longest context; longer requests are left out.")
    ] = 8192,
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
    can be reused here. With `--base-url` a client measures the numbers; otherwise they come from the run log of
    the cluster, as in `simulate`.

    Example: mooncake-lab replay data/traces/conversation_trace.jsonl --num-prompts 50 --speed 10 --prefill 2
    """
    if base_url is None:
        refuse_typed(context, ["api_key"], "it is for the server of --base-url; a new cluster needs no key")
    else:
        refuse_typed(context, _OF_A_CLUSTER, "the server of --base-url has its own settings")
    scaled = _scaled(read_or_fail("replay", trace, lenient=lenient), divide, max_model_len, num_prompts, speed)
    with failing("replay", RuntimeError):
        if base_url is not None:
            try:
                from mooncake_lab.serving.openai_api.client import replay_over_http
            except ModuleNotFoundError as error:
                raise RuntimeError(f"--base-url needs {error.name}: install mooncake-lab[serve]") from error

            with progress(len(scaled)) as note:
                numbers = replay_over_http(scaled, base_url, api_key, model, note)
        else:
            spec = live_spec(
                context, prefill=prefill, decode=decode, coupled=coupled, placement=placement, admission=admission,
                ttft_slo=ttft_slo, tbt_slo=tbt_slo, seed=seed, model=model, batching=batching, device=device,
                max_model_len=max_model_len, threads=threads, transfer=transfer_backend,
                block_size_tokens=scaled.block_size_tokens, spares=0,
            )  # fmt: skip
            show_start()
            numbers = _on_own_cluster(scaled, spec, SLO(ttft_s=ttft_slo, tbt_s=tbt_slo), log)
    print_numbers({"file": str(trace), "divided_by": divide, "speed": speed, **numbers}, json_=json_)


def _scaled(trace: Trace, divide: int, most_tokens: int, requests: int, speed: float) -> Trace:
    from mooncake_lab.workload.transforms import scaled_down

    try:
        scaled = scaled_down(trace, divide, most_tokens=most_tokens).head(requests)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return replace(scaled, arrival_s=(scaled.arrival_s - scaled.arrival_s[0]) / speed)


def _on_own_cluster(trace: Trace, spec: Any, slo: SLO, log: Path | None) -> dict[str, Any]:
    """Start a cluster, replay, and close it."""
    from mooncake_lab.metrics import check_log, run_summary
    from mooncake_lab.serving import LiveCluster

    started_s = time.perf_counter()
    with LiveCluster(spec) as cluster:
        opened_s = time.perf_counter() - started_s
        with progress(len(trace)) as note:
            cluster.listen(note)
            records = cluster.run(trace.requests())
    if log is not None:
        write_log(log, records)
    violations = check_log(records)
    if violations:
        raise RuntimeError(f"the run log violates {violations[0].invariant}: {violations[0].sentence}")
    summary = run_summary(records, slo)
    summary["run_s"] = summary.pop("simulated_s")
    return {"workers": list(spec.roles), "start_s": opened_s, **summary}
