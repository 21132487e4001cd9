"""What the playground's page runs: one simulated cluster over one trace, without numpy.

In the browser, Pyodide (CPython as WebAssembly) imports this module; the tests import it as it is.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Final, final

import msgspec

from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec
from mooncake_lab.conductor import LatencyEstimator, full_decode_s, named_admission, named_placement
from mooncake_lab.core import SLO, Finished, Record, Rejected, TracedRequest, rare_collections
from mooncake_lab.metrics import RunningSummary
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import Trace, read_trace
from mooncake_lab.workload.reader import DEFAULT_BLOCK_SIZE_TOKENS

SEPARATE: Final = "mooncake"
"""The system whose nodes do either prefill or decode; all others are coupled."""
SYSTEMS: Final = (SEPARATE, *COUPLED_SYSTEMS)
PLACEMENTS: Final = ("kvcache_centric", "cache_aware", "load_balance", "fewest_requests", "round_robin", "random")
ADMISSIONS: Final = ("none", "slo", "after_prefill", "early", "predictive")
TWINS: Final = ("conversation", "toolagent", "synthetic")
"""The workloads whose twins the page offers."""
TWIN_REQUESTS: Final = 3000
_REPORT_EVERY: Final = 50

_Nodes = Annotated[int, msgspec.Meta(ge=1, le=512)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of node with its model."""

    latency: LatencyModel
    device_tokens: int
    """KVCache tokens that fit on its GPUs beside the weights."""
    gpus: int


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reader chose; each name and number is checked when the run begins."""

    node: str
    system: str = SEPARATE
    prefill: _Nodes = 4
    """Prefill nodes, or all nodes of a coupled system."""
    decode: _Nodes = 4
    """Decode nodes; a coupled system has none."""
    placement: str = "kvcache_centric"
    """Where the nodes are separate; the requests of a coupled system go to the node with the fewest."""
    admission: str = "none"
    requests: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """How many of the trace's requests, from its beginning."""
    speed: _Positive = 1.0
    """2 lets the requests arrive twice as fast as recorded."""
    ttft_slo_s: _Positive = 30.0
    tbt_slo_s: _Positive = 0.1

    @property
    def nodes(self) -> int:
        """All nodes of the cluster."""
        return self.prefill + self.decode if self.system == SEPARATE else self.prefill


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gives back to the page."""

    numbers: dict[str, float | int | None]
    """Those of `run_summary`."""
    ttft_s: list[float]
    """Of each request that got a first token, from the shortest."""
    nodes: int
    """All nodes of the cluster; what two runs have to agree on to be comparable."""
    gpus: int
    """Those of all nodes."""
    command: str
    """Lines for a shell that compute the same numbers; where the trace is a twin, the first line generates it."""


@final
class Simulator:
    """Traces and nodes that runs may use. Mutable: traces are added.

    Args:
        nodes: JSON of `Node` by name.
    """

    def __init__(self, nodes: str) -> None:
        self._nodes = msgspec.json.decode(nodes, type=dict[str, Node])
        self._traces: dict[str, Trace] = {}
        self._files: dict[str, str] = {}

    def read(self, name: str, path: str, file: str | None = None, block_size_tokens: int | None = None) -> int:
        """Read a trace file and keep it under a name; the number of its requests.

        Args:
            name: one of `TWINS`, or any other.
            path: where the file is here.
            file: what it is called where its reader has it; the path by default.
            block_size_tokens: tokens per block of a file that does not say so; None for 512.

        Raises:
            ValueError: naming the line that is wrong.
        """
        self._traces[name] = trace = read_trace(Path(path), block_size_tokens=block_size_tokens)
        self._files[name] = file or path
        return len(trace)

    def run(self, trace: str, settings: str, progress: Callable[[int], object] = lambda _: None) -> str:
        """Simulate; JSON of the `Result`.

        Args:
            trace: the name that it was read under.
            settings: JSON of `Settings`.
            progress: called with the number of ended requests, every 50.

        Raises:
            ValueError: when a setting is not allowed, with what is.
        """
        chosen = msgspec.json.decode(settings, type=Settings)
        node = self._nodes[_one_of("node", chosen.node, self._nodes)]
        requests = list(_arriving(self._traces[trace], chosen))
        summary, ended = RunningSummary(SLO(chosen.ttft_slo_s, chosen.tbt_slo_s)), count(1)
        spec = _spec(chosen, node, requests)

        def log(record: Record) -> None:
            summary.read(record)
            if isinstance(record, Finished | Rejected) and (number := next(ended)) % _REPORT_EVERY == 0:
                progress(number)

        with rare_collections():
            Cluster(spec, node.latency, log=log).run(requests)
        result = Result(
            numbers=summary.numbers() | ({"token_hit_rate": None} if self._traces[trace].ids == "none" else {}),
            ttft_s=summary.ttfts_s(),
            nodes=chosen.nodes,
            gpus=chosen.nodes * node.gpus,
            command=command(trace, self._files[trace], chosen, self._traces[trace].block_size_tokens),
        )
        return msgspec.json.encode(result).decode()


def command(trace: str, file: str, chosen: Settings, block_size_tokens: int) -> str:
    """Lines for a shell that simulate the same with `mooncake-lab`.

    Args:
        trace: one of `TWINS`, which the first line generates, or any other name.
        file: that of any other trace.
        chosen: the settings of the run.
        block_size_tokens: of the trace; named where the file may not say it.
    """
    lines: list[list[str]] = []
    if trace in TWINS:
        file = f"{trace}-twin.jsonl"
        requests = ["--requests", str(TWIN_REQUESTS), "--seed", "0"]
        lines.append(["trace", "synth", "--like", trace, *requests, "-o", file, "--force"])
    if chosen.system == SEPARATE:
        cluster = [
            "--prefill-nodes",
            str(chosen.prefill),
            "--decode-nodes",
            str(chosen.decode),
            "--placement",
            chosen.placement,
        ]
    else:
        cluster = ["--coupled-nodes", str(chosen.prefill), "--batching", chosen.system]
    numbers = {"--speed": chosen.speed, "--ttft-slo": chosen.ttft_slo_s, "--tbt-slo": chosen.tbt_slo_s}
    options = ["--node", chosen.node, *cluster, "--admission", chosen.admission]
    options += [text for name, value in numbers.items() for text in (name, repr(value).removesuffix(".0"))]
    if block_size_tokens != DEFAULT_BLOCK_SIZE_TOKENS:
        options += ["--block-size", str(block_size_tokens)]
    shown = f"./{file}" if file.startswith("-") else file  # else an option
    lines.append(["simulate", shown, "--num-prompts", str(chosen.requests), *options])
    return "\n".join(shlex.join(["mooncake-lab", *line]) for line in lines)


def _spec(chosen: Settings, node: Node, requests: Sequence[TracedRequest]) -> ClusterSpec:
    slo = SLO(chosen.ttft_slo_s, chosen.tbt_slo_s)
    decode_s = full_decode_s(
        LatencyEstimator(node.latency),
        slo,
        input_tokens=[each.request.input_tokens for each in requests],
        output_tokens=[each.output_tokens for each in requests],
        capacity_tokens=node.device_tokens,
    )
    common: dict[str, Any] = {
        "admission": named_admission(_one_of("admission", chosen.admission, ADMISSIONS), decode_s=decode_s),
        "slo": slo,
        "device_tokens": node.device_tokens,
        "block_size_tokens": requests[0].request.block_size_tokens,
    }
    if _one_of("system", chosen.system, SYSTEMS) == SEPARATE:
        placement = named_placement(_one_of("placement", chosen.placement, PLACEMENTS), seed=0)
        return ClusterSpec.disaggregated(
            prefill_nodes=chosen.prefill, decode_nodes=chosen.decode, placement=placement, **common
        )
    batching, prefix_caching = COUPLED_SYSTEMS[chosen.system]
    return ClusterSpec.coupled(
        nodes=chosen.prefill,
        batching=batching,
        prefix_caching=prefix_caching,
        placement=named_placement("fewest_requests", seed=0),
        **common,
    )


def _arriving(trace: Trace, chosen: Settings) -> Iterable[TracedRequest]:
    """The first requests of a trace, at the chosen speed."""
    for traced in islice(trace.requests(), chosen.requests):
        request = replace(traced.request, arrival_s=traced.request.arrival_s / chosen.speed)
        yield replace(traced, request=request)


def _one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    names = tuple(allowed)
    if value not in names:
        raise ValueError(f"{field} is {value!r}; allowed are {', '.join(names)}")
    return value
