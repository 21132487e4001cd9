"""`mooncake-lab simulate`: replay a trace on a simulated cluster."""

import resource
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_lab.cli.field_names import by_option
from mooncake_lab.cli.options import (
    TBT,
    TTFT,
    Admission,
    BlockSize,
    Format,
    Json,
    Lenient,
    Placement,
    Speed,
    TraceFile,
    at_least,
    bad_usage_if,
    fail,
    file_to_write,
    one_of,
    print_numbers,
    read_or_fail,
    refuse_same_file,
    without_hit_rate,
)
from mooncake_lab.cli.sessions import (
    AnswerPatience,
    Concurrency,
    FirstTokenPatience,
    KeepAnswers,
    Retries,
    Sessions,
    numbers_of,
    rules_of,
)
from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec
from mooncake_lab.conductor import (
    FewestRequests,
    KVCacheCentric,
    LatencyEstimator,
    full_decode_s,
    named_admission,
    named_placement,
)
from mooncake_lab.core import SLO, Record, TracedRequest, log_writer, rare_collections
from mooncake_lab.perf import LatencyModel, LinkLatency, check_floor
from mooncake_lab.simulation import DEFAULT_MAX_TOKENS, Cluster, Failure, SimulatedClients, SimulationOptions
from mooncake_lab.workload import ClientRules, Trace, in_class, sessions_of

TESTBEDS = ("fast", "arxiv")
"""The editions of the paper whose clusters are known."""
_ASKED = (
    "node", "prefill_node_type", "decode_node_type", "model", "speed", "ssd_gb_per_s", "lenient", "num_prompts",
    "urgent_share", "sessions", "concurrency", "retries", "first_token_patience", "answer_patience",
)  # fmt: skip
"""Options that the settings of a result repeat, beside the fields of spec and options."""


def _failure(text: str) -> Failure:
    """A failure from `NAME@SECONDS`; the cluster checks whether the instance exists."""
    name, _, at_s = text.partition("@")
    try:
        return Failure(name, float(at_s))
    except ValueError as error:
        raise typer.BadParameter(
            f"--fail {text}: {error if at_s else 'no time'}; give NAME@SECONDS, such as prefill-0@600"
        ) from error


def simulate(
    context: typer.Context,
    trace: TraceFile,
    prefill_nodes: Annotated[int | None, at_least(1, "Prefill nodes.")] = None,
    decode_nodes: Annotated[int | None, at_least(1, "Decode nodes.")] = None,
    coupled_nodes: Annotated[
        int | None, at_least(1, "Nodes that do both prefill and decode, instead of separate nodes.")
    ] = None,
    batching: Annotated[
        str | None,
        typer.Option(
            parser=one_of(COUPLED_SYSTEMS),
            metavar="NAME",
            help=f"Batching of coupled nodes, vllm by default. Allowed are {', '.join(COUPLED_SYSTEMS)}.",
        ),
    ] = None,
    placement: Placement = None,
    admission: Admission = "none",
    decode_s: Annotated[
        float | None,
        at_least(
            1e-9,
            "Decode time per request that --admission predictive assumes (s); by default a decode step of a full"
            " node times the length-biased mean answer of the trace (sum of squares over sum).",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        at_least(
            1,
            "Limit of the answer for requests that have no max_tokens in the trace,"
            f" {DEFAULT_MAX_TOKENS} by default; request_level, orca, sarathi and tensorrt_llm reserve it.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, at_least(1, "Number of requests to replay, from the start of the trace; all by default.")
    ] = None,
    speed: Speed = 1.0,
    node: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Hardware of every node, such as h100, h200, b200 or l40s (eight of them), or a TOML file, or"
            " what calibrate --json printed.",
        ),
    ] = "a800-node",
    prefill_node_type: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Hardware of prefill nodes, if not that of --node.")
    ] = None,
    decode_node_type: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Hardware of decode nodes, if not that of --node.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model that the nodes serve.")] = "llama3-70b",
    testbed: Annotated[
        str | None,
        typer.Option(
            parser=one_of(TESTBEDS),
            metavar="NAME",
            help="The edition of the paper whose nodes are simulated: fast, the default, or arxiv, whose nodes are"
            " slower. arxiv needs the default --node and --model.",
        ),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        at_least(
            1,
            "Tokens of KVCache per node: in the DRAM of a prefill node, or on the GPUs of a coupled node.",
        ),
    ] = None,
    ssd_tokens: Annotated[
        int, at_least(0, "Tokens of KVCache on the SSDs of a prefill node; needs --ssd-gb-per-s.")
    ] = 0,
    ssd_gb_per_s: Annotated[
        float | None, at_least(1e-3, "Read bandwidth of a node's SSDs (GB/s); no paper states it.")
    ] = None,
    prefill_group: Annotated[
        int, at_least(1, "Prefill nodes that compute each prompt together, as a pipeline of chunks.")
    ] = 1,
    view_age: Annotated[float, at_least(0, "Age of the loads that the placement policy sees (s).")] = 0.0,
    sessions: Sessions = False,
    concurrency: Concurrency = None,
    retries: Retries = 0,
    first_token_patience: FirstTokenPatience = None,
    answer_patience: AnswerPatience = None,
    keep_answers: KeepAnswers = False,
    failures: Annotated[
        list[Any] | None,
        typer.Option(
            "--fail",
            parser=_failure,
            metavar="NAME@SECONDS",
            help="Let an instance fail so long after the first request, such as decode-0@600; may be repeated.",
        ),
    ] = None,
    ttft_slo: TTFT = 30.0,
    tbt_slo: TBT = 0.1,
    urgent_share: Annotated[
        float | None,
        at_least(0, "Share of requests in the higher class, drawn at random; for --admission priority.", most=1),
    ] = None,
    seed: Annotated[
        int | None, at_least(0, "Seed of --placement random and --urgent-share; 0 by default.")
    ] = None,
    log: Annotated[Path | None, file_to_write("Write the run log here, as JSON lines, while it runs.")] = None,
    perfetto: Annotated[Path | None, file_to_write("Write a timeline here, for ui.perfetto.dev.")] = None,
    format_: Format = None,
    block_size: BlockSize = None,
    lenient: Lenient = False,
    json_: Json = False,
) -> None:
    """Replay a trace on a simulated cluster in virtual time, and print a summary.

    All times, such as those of --fail, of the log and simulated_s, count from the first request. The TBT of a
    request is the mean of the longest tenth of its gaps between tokens (FAST'25 §5.1); an answer of one token has
    none. A request is effective if it meets both limits. A number that no request decides is null.

    Requests arrive at their recorded times, unless --sessions lets clients wait for their answers.

    Example: mooncake-lab simulate data/traces/conversation_trace.jsonl --prefill-nodes 8 --decode-nodes 8 --json
    """
    # here and not above: no other command reads what the papers say
    from mooncake_lab.metrics import RunningSummary, write_perfetto

    # read from the context below
    del prefill_nodes, decode_nodes, batching, ssd_tokens, placement, admission, keep_answers
    del node, prefill_node_type, decode_node_type, model, ssd_gb_per_s
    del retries, first_token_patience, answer_patience
    rules = _check(context.params)
    started = time.perf_counter(), time.process_time()
    slo = SLO(ttft_s=ttft_slo, tbt_s=tbt_slo)
    latency, apart, on_device = _nodes(context.params)
    requests = read_or_fail("simulate", trace, lenient=lenient, block_size_tokens=block_size, format=format_)
    requests = requests if num_prompts is None else requests.head(num_prompts)
    full_tokens = cache_tokens or on_device if coupled_nodes else on_device
    assumed_s = decode_s or _trace_decode_s(requests, apart or latency, slo, full_tokens)
    policies = _policies(context.params, slo, requests.block_size_tokens, assumed_s)
    summary, kept = RunningSummary(slo, prefill_group=prefill_group), list[Record]()
    sinks = [summary.read, *([kept.append] if perfetto else [])]
    try:
        spec = _spec(context.params, on_device, policies)
        most = max_tokens or DEFAULT_MAX_TOKENS
        options = SimulationOptions(failures=tuple(failures or ()), view_age_s=view_age, default_max_tokens=most)
        cluster = Cluster(spec, latency, options, decode_model=apart, log=_to_all(sinks))
    except ValueError as error:
        raise typer.BadParameter(by_option(str(error), context.params)) from error
    with _writing("--log", log):
        arriving = _arriving(requests, speed, urgent_share, seed or 0)
        played = sessions_of(arriving) if sessions else None
        clients = None if played is None else SimulatedClients(cluster, played, rules, concurrency=concurrency)
        _run(cluster, () if clients else arriving, log, sinks)
    if perfetto:
        with _writing("--perfetto", perfetto):
            write_perfetto(perfetto, kept)
    asked = {name: context.params[name] for name in _ASKED} | {"testbed": testbed or "fast", "seed": seed or 0}
    told = {each.name: _plain(getattr(held, each.name)) for held in (spec, options) for each in fields(held)}
    of_run: dict[str, Any] = {"file": str(trace), "latency_model": latency.name}
    of_run |= ({} if apart is None else {"decode_latency_model": apart.name}) | {"settings": asked | told}
    of_run |= numbers_of(clients)
    print_numbers(of_run | without_hit_rate(summary.numbers(), requests) | _spent(*started), json_=json_)


def _policies(said: dict[str, Any], slo: SLO, block_size_tokens: int, assumed_s: float) -> dict[str, Any]:
    """The policies of the spec, and what is the same for each kind of cluster."""
    placement = said["placement"]
    default = KVCacheCentric() if said["coupled_nodes"] is None else FewestRequests()
    return {
        "placement": default if placement is None else named_placement(placement, said["seed"] or 0),
        "admission": named_admission(said["admission"], decode_s=assumed_s),
        "slo": slo,
        "block_size_tokens": block_size_tokens,
    }


def _check(said: dict[str, Any]) -> ClientRules:
    """How clients behave; options that contradict each other or would have no effect are refused.

    Whether the pools give a policy what it needs is checked where their spec is built.
    """
    refuse_same_file(said["trace"], log=said["log"], perfetto=said["perfetto"])
    apart, admission = said["coupled_nodes"] is None, said["admission"]
    both = said["prefill_nodes"] is not None and said["decode_nodes"] is not None
    either = said["prefill_nodes"] is not None or said["decode_nodes"] is not None
    of_pool = said["prefill_node_type"] is not None or said["decode_node_type"] is not None
    _check_kind(said)
    bad_usage_if(
        (apart and not both, "give --prefill-nodes and --decode-nodes, or --coupled-nodes"),
        (not apart and either, "coupled nodes do both stages; leave out --prefill-nodes and --decode-nodes"),
        (
            bool(said["ssd_tokens"]) != (said["ssd_gb_per_s"] is not None),
            "give --ssd-tokens and --ssd-gb-per-s together, or neither",
        ),
        (
            said["testbed"] == "arxiv"
            and (of_pool or (said["node"], said["model"]) != ("a800-node", "llama3-70b")),
            "--testbed arxiv is fitted to --node a800-node and --model llama3-70b; leave both out",
        ),
        (said["decode_s"] is not None and admission != "predictive", "--decode-s is for --admission predictive"),
        (
            (said["urgent_share"] is not None) != (admission == "priority"),
            "give --admission priority and --urgent-share together, or neither",
        ),
    )
    if said["seed"] is not None and said["placement"] != "random" and said["urgent_share"] is None:
        typer.echo("mooncake-lab simulate: nothing in this run is random, so --seed changes nothing", err=True)
    return rules_of(said)


def _check_kind(said: dict[str, Any]) -> None:
    """Refuse options of the other kind of cluster."""
    apart = said["coupled_nodes"] is None
    ssd = said["ssd_tokens"] or said["ssd_gb_per_s"]
    of_pool = said["prefill_node_type"] is not None or said["decode_node_type"] is not None
    bad_usage_if(
        (
            apart and said["batching"] is not None,
            "--batching is for coupled nodes; prefill and decode nodes have their own",
        ),
        (
            not apart and said["placement"] == "kvcache_centric",
            "coupled nodes have no store to fetch from; the nearest policy is cache_aware",
        ),
        (
            apart and said["max_tokens"] is not None,
            "--max-tokens is for coupled nodes; decode nodes reserve nothing",
        ),
        (
            not apart and bool(ssd or said["prefill_group"] > 1),
            "--ssd-tokens, --ssd-gb-per-s and --prefill-group are for prefill nodes; --coupled-nodes has none",
        ),
        (
            not apart and said["keep_answers"],
            "--keep-answers is for decode nodes; coupled nodes keep no answers",
        ),
        (
            not apart and of_pool,
            "--prefill-node-type and --decode-node-type are for separate nodes; coupled nodes are of --node",
        ),
    )


def _spec(said: dict[str, Any], on_device: int, policies: dict[str, Any]) -> ClusterSpec:
    """The cluster that the options describe, on nodes whose GPUs hold this many tokens of KVCache."""
    if said["coupled_nodes"] is None:
        sized = {} if said["cache_tokens"] is None else {"cache_tokens": said["cache_tokens"]}
        return ClusterSpec.disaggregated(
            prefill_nodes=said["prefill_nodes"], decode_nodes=said["decode_nodes"], device_tokens=on_device,
            ssd_tokens=said["ssd_tokens"], prefill_group=said["prefill_group"],
            keep_answers=said["keep_answers"], **sized, **policies,
        )  # fmt: skip
    policy, prefix_caching = COUPLED_SYSTEMS[said["batching"] or "vllm"]
    return ClusterSpec.coupled(
        nodes=said["coupled_nodes"], batching=policy, prefix_caching=prefix_caching,
        device_tokens=said["cache_tokens"] or on_device, **policies,
    )  # fmt: skip


def _nodes(said: dict[str, Any]) -> tuple[LatencyModel, LatencyModel | None, int]:
    """How long everything takes, on decode nodes too where they differ, and the KVCache tokens that GPUs hold."""
    prefill, decode = said["prefill_node_type"] or said["node"], said["decode_node_type"] or said["node"]
    latency, on_device = _node(prefill, said["model"], said["ssd_gb_per_s"], said["testbed"])
    if decode == prefill:
        return latency, None, on_device
    return latency, *_node(decode, said["model"], None, said["testbed"])


def _node(node: str, model: str, ssd_gb_per_s: float | None, testbed: str | None) -> tuple[LatencyModel, int]:
    """The latency model of a node, with the speed of its SSDs, and the KVCache tokens that its GPUs hold.

    Raises:
        typer.BadParameter: when node or model is unknown, or the SSD is faster than the node allows.
    """
    from mooncake_lab.book.testbeds import arxiv_testbed_latency
    from mooncake_lab.book.testbeds.nodes import find_node

    try:
        found = find_node(node, model)
        known = arxiv_testbed_latency() if testbed == "arxiv" else found.latency
        latency = replace(known, ssd=LinkLatency(ssd_gb_per_s * 1e9) if ssd_gb_per_s else None)
        if found.hardware is not None:
            check_floor(latency, found.hardware)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    return latency, found.device_tokens


def _to_all(sinks: list[Callable[[Record], None]]) -> Callable[[Record], None]:
    def keep(record: Record) -> None:
        for sink in sinks:
            sink(record)

    return keep


@contextmanager
def _writing(option: str, path: Path | None) -> Generator[None]:
    """Name the option whose file cannot be written, and exit with code 1."""
    try:
        yield
    except OSError as error:
        fail("simulate", f"{option} {path} cannot be written: {error.strerror}")


def _spent(wall_s: float, cpu_s: float) -> dict[str, float]:
    """The time since those readings of the clocks, and the peak memory."""
    return {
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _run(
    cluster: Cluster, arriving: Iterable[TracedRequest], log: Path | None, sinks: list[Callable[[Record], None]]
) -> None:
    """Run the cluster; if a log file is given, write the log during the run."""
    with rare_collections(), log_writer(log) if log else nullcontext() as write:
        sinks.extend([write] if write else [])
        cluster.run(arriving)


def _trace_decode_s(trace: Trace, latency: LatencyModel, slo: SLO, capacity_tokens: int) -> float:
    """How long the requests of a trace decode on a full node, as assumption B22 has it."""
    requests = list(trace.requests())
    return full_decode_s(
        LatencyEstimator(latency),
        slo,
        input_tokens=[each.request.input_tokens for each in requests],
        output_tokens=[each.output_tokens for each in requests],
        capacity_tokens=capacity_tokens,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if not is_dataclass(value):
        return value
    return {
        "type": type(value).__name__,
        **{each.name: _plain(getattr(value, each.name)) for each in fields(value)},
    }


def _arriving(trace: Trace, speed: float, urgent_share: float | None, seed: int) -> Iterable[TracedRequest]:
    """The requests of a trace at another speed; if a share is given, some of them are urgent."""
    requests = (trace if speed == 1 else trace.at_speed(speed)).requests()
    if urgent_share is None:
        return requests
    return (in_class(traced, urgent_share, seed=seed) for traced in requests)
