"""What an hour of traffic costs to simulate: CPU seconds, growth with requests, the ratio to a bare event loop.

One run is reading the trace's requests, the simulation with every token accounted for, and the numbers of the run.
Medians of several rounds are shown; all rounds must give the same bytes, or the benchmark fails. The bare loop is
simpy with as many timeouts as the run has log records, and nothing else.
"""  # noqa: INP001  # scripts, not a package

import hashlib
import resource
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import simpy
import typer

from mooncake_lab.core import SLO
from mooncake_lab.experiments.paper_node import paper_node_latency
from mooncake_lab.metrics import run_summary
from mooncake_lab.simulation import COUPLED_SYSTEMS, Cluster, ClusterSpec, CoupledCluster, CoupledSpec
from mooncake_lab.workload import Trace, load


def main(
    workload: Annotated[str, typer.Option(help="Trace by name.")] = "conversation",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    sizes: Annotated[str, typer.Option(help="Requests, with commas.")] = "1000,4000,12031",
    nodes: Annotated[int, typer.Option(min=2, help="Half of them prefill; coupled systems take all.")] = 16,
) -> None:
    """Print medians of CPU seconds for the disaggregated cluster and the coupled systems of FAST'25."""
    trace, model, half = load(workload), paper_node_latency(), nodes // 2
    systems: dict[str, Callable[[], Cluster | CoupledCluster]] = {
        "kvcache_centric": lambda: Cluster(ClusterSpec(prefill_nodes=half, decode_nodes=half), model)
    }
    for name in ("vllm", "vllm_prefix", "vllm_chunked"):
        policy, caching = COUPLED_SYSTEMS[name]
        spec = CoupledSpec(nodes=nodes, batching=policy, prefix_caching=caching)
        systems[name] = lambda spec=spec: CoupledCluster(spec, model)
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


def measured(make: Callable[[], Cluster | CoupledCluster], trace: Trace, rounds: int) -> str:
    """One line of the table; `SystemExit` when two rounds differ in a byte."""
    simulating: list[float] = []
    counting: list[float] = []
    bare: list[float] = []
    digests: set[str] = set()
    tokens, records = 0, 0
    for _ in range(rounds):
        start_s = time.process_time()
        log = make().run(trace.requests())
        middle_s = time.process_time()
        tokens, records = int(run_summary(log, SLO())["output_tokens"] or 0), len(log)
        simulating.append(middle_s - start_s)
        counting.append(time.process_time() - middle_s)
        digests.add(hashlib.sha256(msgspec.json.encode(log)).hexdigest())
        del log
        bare.append(bare_loop_s(records))
    if len(digests) > 1:
        raise SystemExit(f"{len(digests)} different logs in {rounds} rounds of the same run")
    run_s, numbers_s = statistics.median(simulating), statistics.median(counting)
    per_s = len(trace) / (run_s + numbers_s)
    ratio = run_s / statistics.median(bare)
    return f"{len(trace):9,} {tokens:10,} {run_s:9.2f} {numbers_s:8.2f} {per_s:11,.0f} {ratio:6.1f}"


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
