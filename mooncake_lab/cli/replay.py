"""`mooncake-lab replay`: a scaled-down trace through a live cluster."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_lab.cli.live import (
    AdmissionName,
    BatchingName,
    PlacementName,
    TransferName,
    live_spec,
    refuse_typed,
    show_start,
)
from mooncake_lab.cli.progress import watched
from mooncake_lab.cli.reading import read_or_fail
from mooncake_lab.core import SLO, write_log
from mooncake_lab.workload import Trace

_OF_A_CLUSTER = (
    "prefill", "decode", "coupled", "batching", "placement", "admission", "ttft_slo", "tbt_slo", "transfer",
    "device", "threads", "seed", "log",
)  # fmt: skip
"""Parameters without effect on a server that is already running."""


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="A trace, plain or gzipped.", exists=True, dir_okay=False)],
    requests: Annotated[
        int, typer.Option(min=1, help="Number of requests to replay, from the start of the trace.")
    ] = 100,
    speed: Annotated[
        float, typer.Option(min=1e-6, help="Speed of the replay; 2 is twice as fast as recorded.")
    ] = 1.0,
    divide: Annotated[int, typer.Option(min=1, help="Divide all lengths and the block size by this number.")] = 32,
    url: Annotated[
        str | None, typer.Option(help="Replay against this server (http://host:port) instead of a new cluster.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="MOONCAKE_LAB_TOKEN", help="Bearer token of that server.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="DIR|random:SHAPE", help="The model to serve.")
    ] = "random:lab-tiny",
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill workers; 1 by default.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode workers; 1 by default.")] = None,
    coupled: Annotated[
        int | None,
        typer.Option(min=1, help="Workers that do both prefill and decode, instead of separate workers."),
    ] = None,
    batching: Annotated[BatchingName, typer.Option(help="Batching policy of coupled workers.")] = "sarathi_serve",
    placement: Annotated[
        PlacementName | None, typer.Option(help="Placement policy; Algorithm 1 by default.")
    ] = None,
    admission: Annotated[AdmissionName, typer.Option(help="Admission policy.")] = "none",
    ttft_slo: Annotated[float, typer.Option(min=1e-9, help="Limit of the time to first token (s).")] = 30.0,
    tbt_slo: Annotated[float, typer.Option(min=1e-9, help="Limit of the time between tokens (s).")] = 0.1,
    transfer: Annotated[
        TransferName, typer.Option(help="How KVCache is transferred; mooncake needs the extra of that name.")
    ] = "tcp",
    max_request_tokens: Annotated[
        int, typer.Option(min=2, help="Longest context; longer requests are left out.")
    ] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights and of random placement.")] = 0,
    log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the run log here, as JSON lines.")
    ] = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Skip bad lines and report how many.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay the beginning of a trace on a live cluster in real time, and print a summary.

    All lengths are divided by `--divide`. Equal blocks become equal tokens, so what could be reused in the trace
    can be reused here. With `--url` a client measures the numbers; otherwise they come from the run log of the
    cluster, as in `simulate`.

    Example: mooncake-lab replay data/traces/conversation_trace.jsonl --requests 50 --speed 10 --prefill 2 --json
    """
    if url is None:
        refuse_typed(context, ["token"], "it is for the server of --url; a new cluster needs no token")
    else:
        refuse_typed(context, _OF_A_CLUSTER, "the server of --url has its own settings")
    scaled = _scaled(read_or_fail("replay", trace, lenient=lenient), divide, max_request_tokens, requests, speed)
    slo = SLO(ttft_s=ttft_slo, tbt_s=tbt_slo)
    try:
        if url is not None:
            try:
                from mooncake_lab.serving.openai_api.client import replay_over_http
            except ModuleNotFoundError as error:
                raise RuntimeError(f"--url needs {error.name}: install mooncake-lab[serve]") from error

            with watched(len(scaled)) as note:
                numbers = replay_over_http(scaled, url, token, model, note)
        else:
            spec = live_spec(
                context, prefill=prefill, decode=decode, coupled=coupled, placement=placement, admission=admission,
                ttft_slo=ttft_slo, tbt_slo=tbt_slo, seed=seed, model=model, batching=batching, device=device,
                max_request_tokens=max_request_tokens, threads=threads, transfer=transfer,
                block_size_tokens=scaled.block_size_tokens, spares=0,
            )  # fmt: skip
            show_start()
            numbers = _on_own_cluster(scaled, spec, slo, log)
    except (ValueError, OSError, RuntimeError) as error:
        typer.echo(f"mooncake-lab replay: {error}", err=True)
        raise typer.Exit(1) from error
    numbers = {"file": str(trace), "divided_by": divide, "speed": speed, **numbers}
    if json_:
        typer.echo(msgspec.json.encode(numbers))
        return
    for name, value in numbers.items():
        typer.echo(f"{name:28} {value:,.4f}" if isinstance(value, float) else f"{name:28} {value}")


def _scaled(trace: Trace, divide: int, most_tokens: int, requests: int, speed: float) -> Trace:
    from mooncake_lab.workload.prompts import scaled_down

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
        with watched(len(trace)) as note:
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
