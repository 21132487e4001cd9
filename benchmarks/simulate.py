"""What an hour of traffic costs to simulate: CPU seconds, growth with requests, the ratio to a bare event loop.

One run is reading the trace's requests, the simulation with every token accounted for, and the numbers of the run.
Medians of several rounds are shown; all rounds must give the same bytes, or the benchmark fails. The bare loop is
simpy with as many timeouts as the run had events, and nothing else.

With `--stream` the trace is replayed over and over, an hour later and with other blocks each time: requests come
out of a generator, records go into running numbers, and memory must not grow with either but for the 16 bytes of a
request's two latencies. Each size runs in a process of its own, so that its peak of memory is its own.

With `--clients`, so many clients wait for their answers and think, 30 turns each, and the turns per CPU second are
shown.
"""  # noqa: INP001  # scripts, not a package

import hashlib
import itertools
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Annotated

import msgspec
import simpy
import typer

from mooncake_lab.bench.rounds import alternating_rounds, paired_rounds
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec
from mooncake_lab.core import SLO, TracedRequest, rare_collections
from mooncake_lab.metrics import RunningSummary, run_summary
from mooncake_lab.simulation import Cluster, SimulatedClients
from mooncake_lab.workload import Trace, chat_sessions, load


def main(
    workload: Annotated[str, typer.Option(help="Trace by name.")] = "conversation",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    sizes: Annotated[str, typer.Option(help="Requests, with commas.")] = "1000,4000,12031",
    nodes: Annotated[int, typer.Option(min=2, help="Half of them prefill; coupled systems take all.")] = 16,
    stream: Annotated[str, typer.Option(help="Stream so many requests instead, with commas.")] = "",
    clients: Annotated[int, typer.Option(min=0, help="Let so many clients play sessions instead.")] = 0,
) -> None:
    """Print medians of CPU seconds for the disaggregated cluster and the coupled systems of FAST'25."""
    if stream:
        stream_all(workload, nodes // 2, [int(size) for size in stream.split(",")])
        return
    if clients:
        play_all(nodes // 2, clients, rounds)
        return
    trace, model, half = load(workload), paper_node_latency(), nodes // 2
    systems: dict[str, Callable[[], Cluster]] = {
        "kvcache_centric": lambda: Cluster(ClusterSpec.disaggregated(prefill_nodes=half, decode_nodes=half), model)
    }
    for name in ("vllm", "vllm_prefix", "vllm_chunked"):
        policy, caching = COUPLED_SYSTEMS[name]
        spec = ClusterSpec.coupled(nodes=nodes, batching=policy, prefix_caching=caching)
        systems[name] = lambda spec=spec: Cluster(spec, model)
    typer.echo(f"{trace.source}, {nodes} nodes, median of {rounds} rounds, CPU seconds of this process")
    typer.echo(
        f"{'system':16} {'requests':>9} {'tokens':>10} {'simulate':>9} {'numbers':>8}"
        f" {'requests/s':>11} {'/bare':>6}"
    )
    for name, make in systems.items():
        for size in map(int, sizes.split(",")):
            typer.echo(f"{name:16} {measured(make, trace.head(size), rounds)}")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    typer.echo(f"peak memory of all of it: {peak_mib:.0f} MiB")


def measured(make: Callable[[], Cluster], trace: Trace, rounds: int) -> str:
    """One line of the table; `SystemExit` when two rounds differ in a byte."""
    digests: set[str] = set()
    tokens = 0

    def once(_round: int) -> dict[str, float]:
        nonlocal tokens
        start_s = time.process_time()
        with rare_collections():
            cluster = make()
            log = cluster.run(trace.requests())
        middle_s = time.process_time()
        tokens = int(run_summary(log, SLO())["output_tokens"] or 0)
        end_s = time.process_time()
        digests.add(hashlib.sha256(msgspec.json.encode(log)).hexdigest())
        return {"run": middle_s - start_s, "count": end_s - middle_s, "bare": bare_loop_s(events_of(cluster))}

    taken = paired_rounds(once, rounds, warm_up=0)
    if len(digests) > 1:
        raise SystemExit(f"{len(digests)} different logs in {rounds} rounds of the same run")
    run_s, numbers_s = taken.median_s("run"), taken.median_s("count")
    per_s, ratio = len(trace) / (run_s + numbers_s), taken.ratio("run", "bare").median
    return f"{len(trace):9,} {tokens:10,} {run_s:9.2f} {numbers_s:8.2f} {per_s:11,.0f} {ratio:6.1f}"


def play_all(half: int, clients: int, rounds: int) -> None:
    """Print what sessions of 30 turns cost, the median of the rounds."""
    sessions = chat_sessions(clients, 30, sessions_per_s=10.0)
    spec = ClusterSpec.disaggregated(prefill_nodes=half, decode_nodes=half)
    turns = 0

    def once(_round: int) -> float:
        nonlocal turns
        cluster = Cluster(spec, paper_node_latency())
        start_s = time.process_time()
        with rare_collections():
            played = SimulatedClients(cluster, sessions)
            cluster.run()
        run_s = time.process_time() - start_s
        turns = len(played.served)
        return run_s

    taken = alternating_rounds({"play": once}, rounds, warm_up=0)
    run_s = taken.median_s("play")
    typer.echo(
        f"{clients} clients, {turns} turns, {run_s:.2f} CPU s, {turns / run_s:,.0f} turns per CPU second,"
        f" median of {rounds} rounds, load average {taken.load_average:.1f}"
    )


def stream_all(workload: str, half: int, sizes: list[int]) -> None:
    """Print a line for each size, as soon as it is known."""
    typer.echo(f"{workload} over and over, {half} + {half} nodes, nothing kept, CPU seconds of a process a line")
    typer.echo(
        f"{'requests':>10} {'tokens':>13} {'events':>11} {'CPU s':>8} {'requests/s':>11} {'/bare':>6}"
        f" {'peak MiB':>9}"
    )
    alone = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with alone as pool:
        for size in sizes:
            typer.echo(pool.submit(streamed, workload, half, size).result())


def streamed(workload: str, half: int, size: int) -> str:
    """One line: what so many requests cost when nothing of them is kept."""
    trace, numbers = load(workload), RunningSummary(SLO())
    spec = ClusterSpec.disaggregated(prefill_nodes=half, decode_nodes=half)
    start_s = time.process_time()
    with rare_collections():
        cluster = Cluster(spec, paper_node_latency(), log=numbers.read)
        cluster.run(itertools.islice(over_and_over(trace), size))
    run_s = time.process_time() - start_s
    events, found = events_of(cluster), numbers.numbers()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{size:10,} {found['output_tokens']:13,} {events:11,} {run_s:8.2f} {size / run_s:11,.0f}"
        f" {run_s / bare_loop_s(events):6.1f} {peak_mib:9.0f}"
    )


def over_and_over(trace: Trace) -> Iterator[TracedRequest]:
    """A trace without end: each repetition starts when the last one ended, with blocks of its own."""
    requests, blocks = len(trace), int(trace.block_ids.max()) + 1
    lasts_s = float(trace.arrival_s[-1]) + 3.0
    for again in itertools.count():
        for traced in trace.requests():
            request = traced.request
            yield replace(
                traced,
                request=replace(
                    request,
                    id=request.id + again * requests,
                    arrival_s=request.arrival_s + again * lasts_s,
                    block_keys=tuple(key + again * blocks for key in request.block_keys),
                ),
            )


def events_of(cluster: Cluster) -> int:
    """How many callbacks a run scheduled."""
    return cluster._loop.scheduled  # noqa: SLF001


def bare_loop_s(events: int) -> float:
    """CPU seconds of simpy for so many timeouts of one process."""
    env = simpy.Environment()

    def tick() -> simpy.events.ProcessGenerator:
        for _ in range(events):
            yield env.timeout(1.0)

    env.process(tick())
    start_s = time.process_time()
    env.run()
    return time.process_time() - start_s


if __name__ == "__main__":
    typer.run(main)
