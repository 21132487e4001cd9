"""`mooncake-lab simulate`: replay a trace on a simulated cluster."""

import resource
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from mooncake_lab.cli.reading import read_or_fail
from mooncake_lab.cli.simulate_policies import (
    AdmissionName,
    BatchingName,
    PlacementName,
    coupled_spec,
    disaggregated_spec,
    made_placement,
    settings_of,
    trace_decode_s,
)
from mooncake_lab.cli.simulate_usage import (
    check_failures,
    check_memory,
    check_policies,
    check_usage,
    named_failures,
)
from mooncake_lab.conductor import named_admission
from mooncake_lab.core import SLO, Record, TracedRequest, log_writer, rare_collections
from mooncake_lab.perf import LatencyModel, LinkLatency, check_floor, hardware
from mooncake_lab.simulation import DEFAULT_MAX_TOKENS, Cluster, ClusterSpec
from mooncake_lab.workload import Trace, in_class


def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace, plain or gzipped.", exists=True, dir_okay=False)],
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill nodes.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode nodes.")] = None,
    coupled: Annotated[
        int | None, typer.Option(min=1, help="Nodes that do both prefill and decode, instead of separate nodes.")
    ] = None,
    batching: Annotated[
        BatchingName | None, typer.Option(help="Batching system of coupled nodes; vllm by default.")
    ] = None,
    placement: Annotated[
        PlacementName | None,
        typer.Option(help="Placement policy; by default kvcache_centric, or fewest_requests with --coupled."),
    ] = None,
    admission: Annotated[
        AdmissionName,
        typer.Option(help="Admission policy; --coupled does not allow after_prefill and adaptive."),
    ] = "none",
    decode_s: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            help="Decode time per request that --admission predictive assumes (s); by default the mean answer"
            " length of the trace times a decode step of a full node.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Limit of the answer for requests that have no max_tokens in the trace,"
            f" {DEFAULT_MAX_TOKENS} by default; request_level, orca, sarathi and tensorrt_llm reserve it.",
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=1e-6, help="Speed of the replay; 2 is twice as fast as recorded.")
    ] = 1.0,
    node: Annotated[str, typer.Option(help="Hardware of every node.")] = "a800-node",
    model: Annotated[str, typer.Option(help="The model that the nodes serve.")] = "llama3-70b",
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of KVCache per node: in the DRAM of a prefill node, or on the GPUs of a coupled node.",
        ),
    ] = None,
    ssd_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of KVCache on the SSDs of a prefill node; needs --ssd-gb-per-s.")
    ] = 0,
    ssd_gb_per_s: Annotated[
        float | None, typer.Option(min=1e-3, help="Read bandwidth of a node's SSDs (GB/s); no paper states it.")
    ] = None,
    prefill_group: Annotated[
        int, typer.Option(min=1, help="Prefill nodes that compute each prompt together, as a pipeline of chunks.")
    ] = 1,
    view_age: Annotated[
        float, typer.Option(min=0, help="Age of the loads that the placement policy sees (s).")
    ] = 0.0,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            help="Let an instance fail: NAME@SECONDS, such as decode-0@600; may be repeated.",
            callback=check_failures,
        ),
    ] = None,
    ttft_slo: Annotated[float, typer.Option(min=1e-9, help="Limit of the time to first token (s).")] = 30.0,
    tbt_slo: Annotated[float, typer.Option(min=1e-9, help="Limit of the time between tokens (s).")] = 0.1,
    urgent_share: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of requests in the higher class, drawn at random; for --admission priority."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of --placement random and --urgent-share; 0 by default.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the run log here, as JSON lines, while it runs.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a timeline here, for ui.perfetto.dev.")
    ] = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Skip bad lines and report how many.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace on a simulated cluster in virtual time, and print a summary.

    The TBT of a request is the mean of the longest tenth of its gaps between tokens (FAST'25 §5.1). A request is
    effective if it meets both limits.

    Example: mooncake-lab simulate data/traces/conversation_trace.jsonl --prefill 8 --decode 8 --json
    """
    # here and not above: no other command reads what the papers say
    from mooncake_lab.metrics import RunningSummary, write_perfetto

    check_usage(prefill, decode, coupled, batching, placement, max_tokens)
    check_memory(coupled, ssd_tokens, ssd_gb_per_s, prefill_group)
    check_policies(admission, decode_s, urgent_share, placement, seed)
    started = time.perf_counter(), time.process_time()
    slo = SLO(ttft_s=ttft_slo, tbt_s=tbt_slo)
    latency, on_device = _node(node, model, ssd_gb_per_s)
    requests = read_or_fail("simulate", trace, lenient=lenient)
    full_tokens = cache_tokens or on_device if coupled else on_device
    policies: dict[str, Any] = {
        "placement": made_placement(placement, seed or 0, coupled=coupled is not None),
        "admission": named_admission(
            admission, decode_s=decode_s or trace_decode_s(requests, latency, slo, full_tokens)
        ),
        "slo": slo,
        "block_size_tokens": requests.block_size_tokens,
        "view_age_s": view_age,
        "failures": named_failures(fail or ()),
    }
    summary, kept = RunningSummary(slo, prefill_group=prefill_group), list[Record]()
    sinks = [summary.read, *([kept.append] if perfetto else [])]
    spec: ClusterSpec
    try:
        if coupled is None:
            policies |= {"ssd_tokens": ssd_tokens, "prefill_group": prefill_group, "decode_tokens": on_device}
            spec = disaggregated_spec(prefill or 0, decode or 0, cache_tokens, policies)
        else:
            policies |= {"default_max_tokens": max_tokens or DEFAULT_MAX_TOKENS, "device_tokens": full_tokens}
            spec = coupled_spec(coupled, batching or "vllm", policies)
        cluster = Cluster(spec, latency, log=_to_all(sinks))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _run(cluster, _arriving(requests, speed, urgent_share, seed or 0), log, sinks)
    if perfetto:
        _written(lambda: write_perfetto(perfetto, kept))
    asked = {"node": node, "model": model, "speed": speed, "ssd_gb_per_s": ssd_gb_per_s, "lenient": lenient}
    settings = settings_of(spec, **asked, urgent_share=urgent_share, seed=seed or 0)
    of_run: dict[str, Any] = {"file": str(trace), "latency_model": latency.name, "settings": settings}
    _print(of_run | summary.numbers() | _spent(*started), json_=json_)


def _node(node: str, model: str, ssd_gb_per_s: float | None) -> tuple[LatencyModel, int]:
    """The latency model of a node, with the speed of its SSDs, and the KVCache tokens that its GPUs hold.

    Raises:
        typer.BadParameter: when node or model is unknown, or the SSD is faster than the node allows.
    """
    from mooncake_lab.testbeds.other_nodes import device_tokens, node_latency

    try:
        latency = replace(node_latency(node, model), ssd=LinkLatency(ssd_gb_per_s * 1e9) if ssd_gb_per_s else None)
        check_floor(latency, hardware(node))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return latency, device_tokens(hardware(node), latency.shape)


def _to_all(sinks: list[Callable[[Record], None]]) -> Callable[[Record], None]:
    def keep(record: Record) -> None:
        for sink in sinks:
            sink(record)

    return keep


def _spent(wall_s: float, cpu_s: float) -> dict[str, float]:
    """The time since those readings of the clocks, and the peak memory."""
    return {
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _run(
    cluster: Cluster,
    arriving: Iterable[TracedRequest],
    log: Path | None,
    sinks: list[Callable[[Record], None]],
) -> None:
    """Run the cluster; if a log file is given, write the log during the run."""

    def run() -> None:
        with rare_collections(), log_writer(log) if log else nullcontext() as write:
            sinks.extend([write] if write else [])
            cluster.run(arriving)

    _written(run)


def _written(write: Callable[[], object]) -> None:
    """Call a function that writes a file; exit with the reason if the file cannot be written."""
    try:
        write()
    except OSError as error:
        typer.echo(f"mooncake-lab simulate: the log cannot be written: {error}", err=True)
        raise typer.Exit(1) from error


def _print(numbers: dict[str, Any], *, json_: bool) -> None:
    if json_:
        typer.echo(msgspec.json.encode(numbers))
        return
    for name, value in numbers.items():
        if isinstance(value, dict):
            continue  # settings are what was asked for
        typer.echo(f"{name:28} {value:,.4f}" if isinstance(value, float) else f"{name:28} {value}")


def _arriving(trace: Trace, speed: float, urgent_share: float | None, seed: int) -> Iterable[TracedRequest]:
    """The requests of a trace at another speed; if a share is given, some of them are urgent."""
    requests = (trace if speed == 1 else replace(trace, arrival_s=trace.arrival_s / speed)).requests()
    if urgent_share is None:
        return requests
    return (in_class(traced, urgent_share, seed=seed) for traced in requests)
