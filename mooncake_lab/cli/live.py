"""`mooncake-lab serve` and `replay`: a live cluster behind an OpenAI-compatible API, or under a smaller trace."""

import contextlib
import inspect
import logging
import math
import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from mooncake_lab.batching import CHUNKED_POLICIES, named_policy
from mooncake_lab.cli.field_names import FIELDS as _FIELDS
from mooncake_lab.cli.field_names import by_option
from mooncake_lab.cli.options import (
    TBT,
    TTFT,
    Admission,
    Backend,
    Batching,
    BlockSize,
    CoupledNodes,
    DecodeNodes,
    DecodeSeconds,
    Device,
    DType,
    Format,
    Json,
    Lenient,
    LiveSeed,
    Model,
    Placement,
    PrefillNodes,
    Speed,
    Threads,
    TraceFile,
    Transfer,
    at_least,
    bad_usage_if,
    fail,
    file_to_write,
    print_numbers,
    read_or_fail,
    refuse_same_file,
    refuse_typed,
    without_hit_rate,
)
from mooncake_lab.cli.run_log import GrowingFile as _GrowingFile
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
from mooncake_lab.cluster import ClusterSpec, CoupledPool, DecodePool, PrefillPool
from mooncake_lab.conductor import named_admission, named_placement
from mooncake_lab.core import SLO, Finished, Record, Rejected, write_log
from mooncake_lab.workload import ClientRules, Trace, sessions_of

if TYPE_CHECKING:
    from mooncake_lab.serving.spec import LiveOptions


def serve(
    context: typer.Context,
    model: Model,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests and answers; --model by default.")
    ] = None,
    prefill_nodes: PrefillNodes = None,
    decode_nodes: DecodeNodes = None,
    coupled_nodes: CoupledNodes = None,
    batching: Batching = "sarathi_serve",
    placement: Placement = None,
    admission: Admission = "none",
    keep_answers: KeepAnswers = False,
    decode_s: DecodeSeconds = None,
    ttft_slo: TTFT = 30.0,
    tbt_slo: TBT = 0.1,
    device: Device = "auto",
    dtype: DType = None,
    backend: Backend = "auto",
    cache_tokens: Annotated[int, at_least(1, "Tokens of KVCache in the DRAM of a prefill worker.")] = 65_536,
    ssd_dir: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for KVCache that is evicted from DRAM.")
    ] = None,
    ssd_tokens: Annotated[int, at_least(0, "Tokens of KVCache on the SSD of a prefill worker.")] = 0,
    shared_store: Annotated[
        Literal["remote", "mooncake"] | None,
        typer.Option(
            help="Store that all prefill workers share: our block server, or Mooncake Store (its extra)."
        ),
    ] = None,
    shared_store_tokens: Annotated[int, at_least(1, "Tokens of KVCache in the shared store.")] = 65_536,
    shared_store_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Mooncake Store that runs already; by default one is started."),
    ] = None,
    device_tokens: Annotated[
        int, at_least(1, "Tokens of KVCache in the engine of a decode or coupled worker.")
    ] = 65_536,
    transfer: Transfer = "tcp",
    chunk_tokens: Annotated[int, at_least(1, "Maximum number of prompt tokens per iteration.")] = 512,
    pack_tokens: Annotated[
        int,
        at_least(1, "Tokens up to which a prefill worker computes waiting prompts together; 1: one at a time."),
    ] = 1,
    max_requests: Annotated[int, at_least(1, "Maximum number of requests that decode at once on a worker.")] = 256,
    max_model_len: Annotated[int, at_least(1, "Maximum number of prompt and output tokens per request.")] = 8192,
    max_inflight_requests: Annotated[
        int, at_least(1, "Maximum number of unfinished requests; further ones are refused.")
    ] = 1024,
    threads: Threads = 1,
    spares: Annotated[
        int,
        at_least(
            0, "Processes that wait with the model loaded to replace a worker; started only where memory is left."
        ),
    ] = 1,
    worker_timeout: Annotated[
        float,
        at_least(1e-9, "How long a request may wait for a worker when none is up, before it gets 503 (s)."),
    ] = 60.0,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback by default.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 lets the system choose one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MOONCAKE_LAB_API_KEY",
            help="Key that clients send as bearer token; the variable hides it from other users of this machine.",
        ),
    ] = None,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help="Require no key from clients.")] = False,
    shutdown_timeout: Annotated[
        float, at_least(0, "Time for unfinished requests after a signal (s).", most=86_400)
    ] = 30.0,
    seed: LiveSeed = 0,
    log: Annotated[
        Path | None, file_to_write("Append the run log to this file, as JSON lines.", appends=True)
    ] = None,
    record: Annotated[
        Path | None,
        file_to_write(
            "Write the traffic to this file as a trace without text: lengths, times, sessions, hashed blocks."
        ),
    ] = None,
    json_: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object when the server listens: url, model, workers, key."),
    ] = False,
) -> None:
    """Serve a model behind OpenAI's completions and chat API; each prefill or decode worker is a process.

    Clients need a key, printed at the start unless --api-key gives one; /health needs none, nor does /metrics from
    this machine. After SIGTERM or SIGINT unfinished requests may finish. A rejected one gets 429 with Retry-After.

    Example: mooncake-lab serve --model random:lab-tiny --prefill-nodes 2 --decode-nodes 2 --port 8000
    """
    options = locals()
    import asyncio

    from mooncake_lab.serving.launch import WorkerError
    from mooncake_lab.serving.openai_api.server import Address
    from mooncake_lab.serving.openai_api.server import serve as serve_until_told

    bad_usage_if((served_model_name == "", "--served-model-name is empty; give a name, or leave the option out"))
    if admission == "none":
        refuse_typed(context, ["ttft_slo", "tbt_slo"], "--admission none uses no limits")
    spec, live = live_spec(context, options)
    show_start()
    key = _key(context, api_key, no_api_key=no_api_key)
    name = served_model_name or model
    same = record is not None and log is not None and record.resolve() == log.resolve()
    bad_usage_if((same, "--record and --log name the same file; give each its own"))
    address = Address(host=host, port=port, token=key, drain_s=shutdown_timeout, model=name)

    def opened(url: str) -> None:
        shown = model if name == model else f"{model} as {name}"
        made = [] if key is None or api_key is not None else [f"API key: {key}"]
        first = f"serving {shown} at {url}/v1 with {', '.join(spec.roles)}"
        typer.echo("\n".join([first, *_warnings(host, key, {transfer, shared_store}), *made]), err=True)
        if json_:
            open_at = {"url": f"{url}/v1", "model": name, "workers": list(spec.roles)}
            typer.echo(msgspec.json.encode({**open_at, "api_key": key}))

    def ending(requests: int) -> None:
        typer.echo(f"stopping; {requests} requests under way have {shutdown_timeout:g} s to finish", err=True)

    try:
        with _failing("serve", WorkerError), _growing(log=log, trace=record) as files:
            writes = {name: None if file is None else file.write for name, file in files.items()}
            outputs = {"write": writes["log"], "record": writes["trace"]}
            asyncio.run(serve_until_told(spec, live, address, opened=opened, ending=ending, **outputs))
        if any(file is not None and file.is_broken for file in files.values()):
            raise typer.Exit(1)  # what was lost is said already
    except asyncio.CancelledError:
        raise typer.Exit(1) from None  # told to stop before it was open


@contextlib.contextmanager
def _growing(**paths: Path | None) -> Generator[dict[str, _GrowingFile | None]]:
    """The files that grow while a server runs, open and by what they are; a log goes on, others begin anew."""
    with contextlib.ExitStack() as opening:
        yield {
            what: None if path is None else opening.enter_context(_GrowingFile(path, what, replaces=what != "log"))
            for what, path in paths.items()
        }


def live_spec(context: typer.Context, options: dict[str, Any], **others: Any) -> "tuple[ClusterSpec, LiveOptions]":
    """The cluster that the options describe; by default it has one prefill and one decode worker.

    Args:
        context: of the command.
        options: its parameters by name; those that set nothing of a cluster are ignored.
        **others: further fields of the spec or of `LiveOptions`.

    Raises:
        typer.BadParameter: when options contradict each other, or one of them would have no effect.
    """
    from mooncake_lab.serving.spec import LiveOptions, check_live  # other commands do without the live cluster

    coupled = options["coupled_nodes"]
    _check_roles(context, coupled, options["batching"], options["placement"])
    if options.get("shared_store") is None:
        refuse_typed(context, ["shared_store_tokens", "shared_store_address"], "there is no --shared-store")
    if options.get("shared_store_address") is not None:
        refuse_typed(context, ["shared_store_tokens"], "the store at --shared-store-address has its own size")
    _check_admission(coupled, options["admission"], options["decode_s"])
    model, placement, seed = options["model"], options["placement"], options["seed"]
    if placement != "random" and not model.startswith("random:"):
        refuse_typed(context, ["seed"], f"{model} has its own weights, and nothing else in this run is random")
    settings = {_FIELDS.get(name, name): value for name, value in (options | others).items() if value is not None}
    settings |= {
        "admission": named_admission(options["admission"], decode_s=options["decode_s"] or math.nan),
        "slo": SLO(ttft_s=options["ttft_slo"], tbt_s=options["tbt_slo"]),
    }
    if placement is not None:
        settings["placement"] = named_placement(placement, seed)
    if "ssd_dir" in settings:
        settings["ssd_dir"] = str(settings["ssd_dir"])
    if coupled is not None:
        cuts = options["batching"] in CHUNKED_POLICIES
        chunk_tokens = settings.get("chunk_tokens", 512) if cuts else None
        settings["batching"] = named_policy(options["batching"], chunk_tokens=chunk_tokens)
        settings.pop("pack_tokens", None)  # of prefill workers
        make, of_spec = ClusterSpec.small_coupled, _names(ClusterSpec, CoupledPool)
    else:
        make, of_spec = ClusterSpec.small, _names(ClusterSpec, PrefillPool, DecodePool)
        of_spec |= {"prefill_nodes", "decode_nodes"}
    of_runtime = _names(LiveOptions)
    try:
        spec = make(**{name: value for name, value in settings.items() if name in of_spec})
        live = LiveOptions(**{name: value for name, value in settings.items() if name in of_runtime})
        check_live(spec, live)
    except ValueError as error:
        raise typer.BadParameter(by_option(str(error), options)) from error
    return spec, live


@contextlib.contextmanager
def _failing(command: str, *more: type[Exception]) -> Generator[None]:
    """`failing`, also for errors of storage, and with the names of options in the reason."""
    from mooncake_lab.store.backends.base import StorageError

    try:
        yield
    except (ValueError, OSError, StorageError, *more) as error:
        options = inspect.signature({"serve": serve, "replay": replay}[command]).parameters
        fail(command, by_option(str(error) or type(error).__name__, options))


def _names(*kinds: Any) -> set[str]:
    """The names of the fields of dataclasses."""
    return {each.name for kind in kinds for each in fields(kind)}


def show_start() -> None:
    """Report on stderr which workers start, what they load, and when they are ready."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("supervisor", "runtime", "pending_calls", "launch.shared_store"):
        logging.getLogger(f"mooncake_lab.serving.{name}").setLevel(logging.INFO)


def _check_roles(context: typer.Context, coupled: int | None, batching: str, placement: str | None) -> None:
    """Refuse options of the other kind of cluster."""
    if coupled is None:
        why = "it is for coupled workers; prefill and decode workers have their own batching"
        return refuse_typed(context, ["batching"], why)
    if placement == "kvcache_centric":
        raise typer.BadParameter("coupled workers share no store to fetch from; the nearest policy is cache_aware")
    refuse_typed(context, ["prefill_nodes", "decode_nodes"], "coupled workers do both stages")
    refuse_typed(context, ["transfer"], "coupled workers do not transfer KVCache")
    refuse_typed(context, ["keep_answers"], "coupled workers keep no answers")
    refuse_typed(context, ["pack_tokens"], "it is for prefill workers; coupled workers pack by --batching")
    store = ["cache_tokens", "ssd_dir", "ssd_tokens", "shared_store"]
    refuse_typed(context, store, "coupled workers have no store; --device-tokens sets the size of their KVCache")
    if batching not in CHUNKED_POLICIES:
        refuse_typed(context, ["chunk_tokens"], f"--batching {batching} never cuts a prompt")
    return None


def _check_admission(coupled: int | None, admission: str, decode_s: float | None) -> None:
    """Refuse policies that need what this cluster does not have, as `simulate` does."""
    if admission == "priority":
        raise typer.BadParameter(
            "--admission priority needs classes of requests, and live requests have none; use early"
        )
    if coupled is not None and admission not in {"none", "slo", "early"}:
        raise typer.BadParameter(
            f"--admission {admission} needs separate prefill and decode pools;"
            " with --coupled-nodes use none, slo or early"
        )
    bad_usage_if(
        (
            admission == "predictive" and decode_s is None,
            "--admission predictive needs --decode-s: how long a request of yours decodes on a full worker",
        ),
        (admission != "predictive" and decode_s is not None, "--decode-s is for --admission predictive"),
    )


def _warnings(host: str, key: str | None, used: set[str | None]) -> list[str]:
    """What an operator should know before clients connect."""
    found: list[str] = []
    if key is None and not _is_loopback(host):
        found.append(f"--no-api-key at {host}: every client that can reach this address can use the server")
    if "mooncake" in used:
        found.append("Mooncake's Transfer Engine listens on all interfaces without authentication")
    return found


def _is_loopback(host: str) -> bool:
    from mooncake_lab.serving.openai_api.app import is_loopback

    return is_loopback(host.removeprefix("[").removesuffix("]"))


def _key(context: typer.Context, given: str | None, *, no_api_key: bool) -> str | None:
    if no_api_key:
        refuse_typed(context, ["api_key"], "--no-api-key uses no key")
        return None
    if given is None:
        return secrets.token_urlsafe(24)
    if not given.isascii() or len(given) < 16 or any(character.isspace() for character in given):
        raise typer.BadParameter(
            f"the API key has {len(given)} characters; allowed are at least 16 ASCII characters without spaces"
        )
    return given


def replay(
    context: typer.Context,
    trace: TraceFile,
    num_prompts: Annotated[int, at_least(1, "Number of requests to replay, from the start of the trace.")] = 100,
    speed: Speed = 1.0,
    divide: Annotated[int, at_least(1, "Divide all lengths and the block size by this number.")] = 32,
    model: Annotated[
        str, typer.Option(metavar="DIR|random:SHAPE", help="The model to serve.")
    ] = "random:lab-tiny",
    prefill_nodes: PrefillNodes = None,
    decode_nodes: DecodeNodes = None,
    coupled_nodes: CoupledNodes = None,
    batching: Batching = "sarathi_serve",
    placement: Placement = None,
    admission: Admission = "none",
    keep_answers: KeepAnswers = False,
    decode_s: DecodeSeconds = None,
    ttft_slo: TTFT = 30.0,
    tbt_slo: TBT = 0.1,
    transfer: Transfer = "tcp",
    max_model_len: Annotated[
        int, at_least(2, "Longest context, as far as the model has it; longer requests are left out.")
    ] = 8192,
    sessions: Sessions = False,
    concurrency: Concurrency = None,
    retries: Retries = 0,
    first_token_patience: FirstTokenPatience = None,
    answer_patience: AnswerPatience = None,
    device: Device = "auto",
    threads: Threads = 1,
    seed: LiveSeed = 0,
    log: Annotated[Path | None, file_to_write("Write the run log here, as JSON lines.")] = None,
    format_: Format = None,
    block_size: BlockSize = None,
    lenient: Lenient = False,
    json_: Json = False,
) -> None:
    """Replay the beginning of a trace on a live cluster in real time, and print a summary.

    All lengths are divided by `--divide`. Equal blocks become equal tokens, so what could be reused in the trace
    can be reused here. The numbers come from the run log of the cluster, as in `simulate`.

    With --sessions, clients wait for their answers, and the next turn contains the tokens that were answered.

    Example: mooncake-lab replay data/traces/conversation_trace.jsonl --num-prompts 50 --speed 10 --prefill-nodes 2
    """
    options = locals()
    del retries, first_token_patience, answer_patience  # read from the options
    rules = rules_of(options)
    play = partial(_play, rules=rules, concurrency=concurrency) if sessions else _replay
    refuse_same_file(trace, log=log)
    read = read_or_fail("replay", trace, lenient=lenient, block_size_tokens=block_size, format=format_)
    with _failing("replay", RuntimeError):
        from mooncake_lab.engine import check_model  # takes seconds to import

        longest = min(max_model_len, check_model(model).max_positions)
        scaled = _scaled(read, divide, longest, num_prompts, speed)
        spec, live = live_spec(context, options, block_size_tokens=scaled.block_size_tokens, spares=0)
        show_start()
        numbers = _replayed(scaled, spec, live, SLO(ttft_s=ttft_slo, tbt_s=tbt_slo), log, play)
    numbers = without_hit_rate(numbers, read)
    print_numbers({"file": str(trace), "divided_by": divide, "speed": speed, **numbers}, json_=json_)


def _scaled(trace: Trace, divide: int, most_tokens: int, requests: int, speed: float) -> Trace:
    from mooncake_lab.workload.transforms import scaled_down

    try:
        scaled = scaled_down(trace, divide, most_tokens=most_tokens).head(requests)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return replace(scaled, arrival_s=scaled.arrival_s - scaled.arrival_s[0]).at_speed(speed)


def _replay(cluster: Any, trace: Trace) -> list[Record]:
    """Requests arrive at their times."""
    return cluster.run(trace.requests())


def _play(cluster: Any, trace: Trace, *, rules: ClientRules, concurrency: int | None) -> list[Record]:
    """Clients wait for their answers."""
    return cluster.play(sessions_of(trace.requests()), rules, concurrency=concurrency)


def _replayed(
    trace: Trace,
    spec: ClusterSpec,
    live: Any,
    slo: SLO,
    log: Path | None,
    play: Callable[[Any, Trace], list[Record]] = _replay,
) -> dict[str, Any]:
    """Start a cluster, replay, and close it."""
    from mooncake_lab.metrics import check_log, run_summary
    from mooncake_lab.serving import LiveCluster

    started_s = time.perf_counter()
    with LiveCluster(spec, live) as cluster:
        opened_s = time.perf_counter() - started_s
        with _progress(len(trace)) as note:
            cluster.on_record = note
            try:
                records = play(cluster, trace)
            finally:
                if (
                    log is not None and cluster.log
                ):  # also of a run in which a request failed, but of no refused one
                    write_log(log, cluster.log)
    violations = check_log(records)
    if violations:
        raise RuntimeError(f"the run log violates {violations[0].invariant}: {violations[0].sentence}")
    summary = run_summary(records, slo)
    summary["run_s"] = summary.pop("simulated_s")
    return {"workers": list(spec.roles), "start_s": opened_s, **numbers_of(cluster.clients), **summary}


@contextlib.contextmanager
def _progress(requests: int) -> Generator[Callable[[Record], None]]:
    """A progress bar on a terminal's stderr over the requests of a run; call what is yielded with each record."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=requests)
        yield lambda record: bar.advance(task, isinstance(record, Finished | Rejected))
