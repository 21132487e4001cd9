"""Chapter 06: pipelines of micro-batches, their bubbles, and their timelines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from mooncake_lab import simulation
from mooncake_lab.batching import BatchingPolicy, Limits, Orca, Sarathi
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.book.paper import fact
from mooncake_lab.book.testbeds.sarathi import llama_13b_on_a6000
from mooncake_lab.core import Request, TracedRequest, gbps
from mooncake_lab.metrics.pipeline_bubbles import CAUSES, account, gap_causes, gaps_s, idle_share
from mooncake_lab.perf import IterationCost, LinkLatency, hardware, model_shape, transferred
from mooncake_lab.workload.transforms import poisson_arrivals_s

SKETCH = ((900, 8), (350, 8), (600, 8), (250, 8), (500, 6), (300, 6))
"""Prompt and output tokens of the requests of the sketch: unequal prompts, a few decodes each."""


def two_stages(scheme: str) -> simulation.PipelineRun:
    """Six requests through two stages of GPT-3, two micro-batches of up to two requests in flight."""
    spec = simulation.PipelineSpec(
        clock=replace(Gpt3().clock(8), stages=2),
        policy=policy_of(scheme, 256),
        limits=limits_of(2, request_tokens=2048, batch_tokens=4096),
        micro_batches=2,
    )
    return simulation.run_pipeline(
        spec, [traced(i, 0.0, prompt, output) for i, (prompt, output) in enumerate(SKETCH)]
    )


@tabulated
def timeline(run: simulation.PipelineRun) -> Iterator[dict[str, Any]]:
    """Iterations and the gaps between them."""
    gaps, causes = gaps_s(run), gap_causes(run)
    for index, batch in enumerate(run.micro_batch):
        prompts, decodes = run.prompt_tokens[index], run.decodes[index]
        what = "both" if prompts and decodes else "prompts" if prompts else "decodes"
        for stage, (start_s, end_s) in enumerate(zip(run.start_s[index], run.end_s[index], strict=True)):
            shared = {"stage": stage, "micro_batch": batch, "prompt_tokens": prompts, "decodes": decodes}
            yield (shared | {"start_ms": 1000 * start_s, "end_ms": 1000 * end_s, "what": what})
            gap_s = float(gaps[index, stage])
            if gap_s > 1e-9:
                times = {"start_ms": 1000 * (start_s - gap_s), "end_ms": 1000 * start_s}
                yield (shared | times | {"what": CAUSES[int(causes[index, stage])]})


def quantiles(runs: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """The columns `prefix_p0` to `prefix_p100` of runs as rows: scheme, share, value."""
    found = [name for name in runs.columns if str(name).startswith(f"{prefix}_p")]
    rows = [
        {"scheme": row["scheme"], "share": int(name.removeprefix(f"{prefix}_p")) / 100, "value": row[name]}
        for _, row in runs.iterrows()
        for name in found
    ]
    return pd.DataFrame(rows)


def shares_by_cause(runs: pd.DataFrame) -> pd.DataFrame:
    """Percent of all stage time by scheme and what it was spent on; 100 a row."""
    names = ("busy", *CAUSES)
    spent = {name: runs[f"spent_{name}_s"].to_numpy() for name in names}
    table = pd.DataFrame(spent, index=pd.Index(runs["scheme"], name="scheme"))
    return 100 * table.div(table.sum(axis=1), axis=0)


@tabulated
def sensitivity(runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The paper's three ratios, and Orca's completion time over that of the replicas, by the cost of decodes."""
    for attention, overhead in sorted({*zip(runs["decode_attention"], runs["overhead_ms_a_layer"], strict=True)}):
        chosen = (runs["decode_attention"] == attention) & (runs["overhead_ms_a_layer"] == overhead)
        by_scheme = runs[chosen].set_index("scheme")
        done: dict[str, float] = by_scheme["completion_s"].to_dict()
        idle: dict[str, float] = by_scheme["median_bubble_s"].to_dict()
        stage: dict[str, float] = by_scheme.loc["SARATHI", ["decode_ms", "prompt_ms", "fused_ms"]].to_dict()
        yield (
            {"decode_attention": attention, "overhead_ms_a_layer": overhead}
            | {"requests": min(by_scheme["requests"].tolist())}
            | stage
            | {
                "prompt_over_decode": stage["prompt_ms"] / stage["decode_ms"],
                "orca_over_sarathi": done["Orca-best"] / done["SARATHI"],
                "replicas_over_sarathi": done["TP8 replicas"] / done["SARATHI"],
                "orca_over_replicas": done["Orca-best"] / done["TP8 replicas"],
                "bubbles_orca_over_sarathi": idle["Orca-best"] / idle["SARATHI"],
            }
        )


SCHEMES: Final = ("Orca-best", "SARATHI", "TP8 replicas")
"""The scenarios of SARATHI Fig. 12: two pipelines of eight stages, and eight nodes on their own."""
SHORTEST, LONGEST, RATIO, ZIPF = 1024, 4096, 10, 0.4
"""Lengths of the requests, their P:D ratio, and the exponent of the lengths (SARATHI §5.3)."""
TEXT, MACHINE = "sarathi_text_constants", "GPT-3/64 A100"
STAGES: Final = 8
BLOCK_TOKENS: Final = 16
GPUS: Final = 8
"""GPUs per node: they share each layer (TP8)."""
CARD_GBPS: Final = 200.0
"""Of each of the eight InfiniBand cards between nodes (assumption B40)."""
PERCENTS: Final = tuple(range(0, 101, 5))
REQUESTS: Final = {"smoke": 250, "classroom": 2000, "full": 10_000, "gpu": 10_000}
"""Requests of the three schemes, by scale; the paper has 10,000, and 216 are in flight."""
SWEPT: Final = {"smoke": 80, "classroom": 500, "full": 10_000, "gpu": 10_000}
"""Requests per run of a sweep: ramps weigh more in a short run, and ratios are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt3:
    """10,000 requests, all there at the start, served by one of the paper's schemes."""

    scheme: str = "SARATHI"
    requests: int = 1000
    fused_tokens: int = 256
    decode_attention: float = 1.0
    """Seconds of decode attention over those that the roofline carries over from the A6000."""
    overhead_ms_a_layer: float = 0.0
    """Added to the roofline in every iteration: kernels that wait to be launched, collectives, Python."""
    spread: float = 1.0
    """Spread of the lengths about their mean; 0 makes all requests alike."""
    chunk: Literal["filled", "fixed"] = "filled"
    """Whether chunks take what the present decodes leave, or have one length (assumption B35)."""
    rate: float = 0.0
    """Requests a second, as a Poisson process; with 0, all are there at the start (assumption B36)."""
    card_gbps: float = CARD_GBPS
    """Bandwidth of each of the eight cards between nodes (assumption B40)."""
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row: completion, idle share, stage-seconds by cause, quantiles of bubbles and of completion."""
        work = self.work()
        runs = [simulation.run_pipeline(spec, share) for spec, share in self.pipelines(work)]
        finished = [request.token_s[-1] for run in runs for request in run.requests]
        bubbles = [request.bubble_s for run in runs for request in run.requests]
        spent = pd.DataFrame([dict(account(run)) for run in runs]).sum()
        yield {
            "completion_s": max(run.makespan_s for run in runs),
            "idle_share": float(np.average([idle_share(run) for run in runs])),
            "median_bubble_s": float(np.median(bubbles)),
            "iterations": sum(len(run.start_s) for run in runs),
            **{f"spent_{name}_s": seconds for name, seconds in spent.items()},
            **{f"bubble_p{q}": float(np.percentile(bubbles, q)) for q in PERCENTS},
            **{f"done_p{q}": float(np.percentile(finished, q)) for q in PERCENTS},
            **self.stage_ms(),
        }

    def work(self) -> list[TracedRequest]:
        """The requests as they arrive."""
        alike = zipf_requests(self.requests, seed=self.seed, spread=self.spread)
        if not self.rate:
            return alike
        times_s = poisson_arrivals_s(self.requests, self.rate, seed=self.seed).tolist()
        return [
            replace(each, request=replace(each.request, arrival_s=at_s))
            for each, at_s in zip(alike, times_s, strict=True)
        ]

    def pipelines(
        self, work: Sequence[TracedRequest]
    ) -> list[tuple[simulation.PipelineSpec, Sequence[TracedRequest]]]:
        """What runs, and its share of the requests: one pipeline, or eight nodes in turn."""
        if self.scheme != "TP8 replicas":
            places = int(fact(TEXT, series=MACHINE, x="largest_batch_tp8_pp8").value)
            return [(self._spec(STAGES, places), work)]
        places = int(fact(TEXT, series=MACHINE, x="largest_batch_tp8").value)
        return [(self._spec(1, places), work[node::STAGES]) for node in range(STAGES)]

    def clock(self, stages: int) -> simulation.StageClock:
        """What an iteration costs."""
        cost, shape = gpt3_on_a_node(), model_shape("gpt3-175b")
        return simulation.StageClock(
            cost=replace(cost, per_context_token_s=cost.per_context_token_s * self.decode_attention),
            stages=stages,
            link=LinkLatency(8 * gbps(self.card_gbps), 10e-6),
            hop_bytes_per_token=shape.width * shape.bytes_per_element,
            overhead_s=self.overhead_ms_a_layer / 1000 * shape.layers,
        )

    def stage_ms(self) -> Mapping[str, float]:
        """Milliseconds of a stage: a full batch that decodes, a prompt of 2K, and a fused iteration."""
        clock, places = self.clock(STAGES), int(fact(TEXT, series=MACHINE, x="largest_batch_tp8_pp8").value)
        context, chunk = places * 2048, self.fused_tokens - places + 1
        whole = {
            "decode_ms": clock.cost.step_s(0, 0, places, context),
            "prompt_ms": clock.cost.step_s(2048, 0),
            "fused_ms": clock.cost.step_s(chunk, 1024, places - 1, (places - 1) * 2048),
        }
        return {name: 1000 * (seconds + clock.overhead_s) / STAGES for name, seconds in whole.items()}

    def _spec(self, stages: int, places: int) -> simulation.PipelineSpec:
        return simulation.PipelineSpec(
            clock=self.clock(stages),
            policy=policy_of(self.scheme, self.fused_tokens, self.chunk),
            limits=limits_of(places, request_tokens=LONGEST, batch_tokens=2 * LONGEST),
            micro_batches=stages,
        )


def limits_of(
    requests: int, *, request_tokens: int, batch_tokens: int, capacity_tokens: int | None = None
) -> Limits:
    """Of an instance with room for a number of requests at their longest, unless it holds other tokens."""
    held = requests * request_tokens if capacity_tokens is None else capacity_tokens
    return Limits(
        max_batch_tokens=batch_tokens,
        max_requests=requests,
        block_size_tokens=BLOCK_TOKENS,
        capacity_blocks=held // BLOCK_TOKENS,
        free_blocks=held // BLOCK_TOKENS,
        max_request_tokens=request_tokens,
    )


def policy_of(scheme: str, fused_tokens: int, chunk: Literal["filled", "fixed"] = "filled") -> BatchingPolicy:
    """The batching policy behind a scheme; the replicas run Orca-best.

    Raises:
        ValueError: naming those there are.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"no scheme {scheme!r}; allowed are {', '.join(SCHEMES)}")
    return Sarathi(chunk_tokens=fused_tokens, chunk=chunk) if scheme == "SARATHI" else Orca(max_prefills=1)


def gpt3_on_a_node() -> IterationCost:
    """GPT-3 on eight A100s that share each layer: LLaMA-13B on an A6000, carried over by the roofline."""
    return transferred(
        llama_13b_on_a6000(),
        source=(model_shape("llama-13b"), hardware("a6000")),
        target=(model_shape("gpt3-175b"), replace(hardware("a100"), name="8 x a100", devices=GPUS)),
        name="GPT-3 on 8 A100s, carried over from LLaMA-13B on an A6000 by the roofline",
    )


def zipf_requests(count: int, *, seed: int = 0, spread: float = 1.0) -> list[TracedRequest]:
    """Requests of 1K to 4K tokens, short ones more often (`rank**-0.4`), ten prompt tokens for every decode."""
    lengths = np.arange(SHORTEST, LONGEST + 1)
    weights = np.arange(1, len(lengths) + 1, dtype=np.float64) ** -ZIPF
    drawn = np.random.default_rng(seed).choice(lengths, count, p=weights / weights.sum())
    drawn = np.rint(drawn.mean() + spread * (drawn - drawn.mean())).astype(np.int64)
    return [
        traced(index, 0.0, int(n) - int(n) // (RATIO + 1), int(n) // (RATIO + 1)) for index, n in enumerate(drawn)
    ]


def traced(index: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> TracedRequest:
    """A request that shares nothing with any other."""
    request = Request(
        id=index,
        arrival_s=arrival_s,
        input_tokens=prompt_tokens,
        block_keys=(index,),
        block_size_tokens=prompt_tokens,
    )
    return TracedRequest(request, output_tokens)


def with_policy(policy: BatchingPolicy) -> tuple[float, float]:
    """Seconds until 150 requests are done in the pipeline under any batching policy, and its idle share."""
    (spec, work), *_ = Gpt3().pipelines(zipf_requests(150, seed=0))
    run = simulation.run_pipeline(replace(spec, policy=policy), work)
    return run.makespan_s, idle_share(run)
