"""Latency over request rate on four nodes, with the SLOs of the arXiv edition (v3 §8.1, Figs. 11 and 12)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from mooncake_lab.batching import VLLM, VLLMChunked
from mooncake_lab.book.chapters.endtoend.experiment import RouterName, latencies
from mooncake_lab.book.chapters.placement.experiment import estimator
from mooncake_lab.book.chapters.placement.readings import DecodeChoice, Transfers, with_decode_choice
from mooncake_lab.book.experiments import where
from mooncake_lab.book.paper import constant, curve, fact
from mooncake_lab.book.testbeds.arxiv import TestbedName, latency_of
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.cluster.spec import DEVICE_TOKENS
from mooncake_lab.conductor import KVCacheCentric, named_placement
from mooncake_lab.core import Record, blocks_for
from mooncake_lab.metrics import request_table, reused_share, token_times_s
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import SharedPrefix, Trace, poisson_arrivals_s

REQUESTS: Final = {"smoke": 24, "classroom": 1000, "full": 1000, "gpu": 1000}
"""Requests at each rate, by scale."""
PUBLIC: Final = ("ArXiv Summarization", "L-Eval")
SIMULATED: Final = ("16k", "32k", "64k", "128k")
SYSTEMS: Final = {"3P+1D": "Mooncake-[3P+1D]", "2P+2D": "Mooncake-[2P+2D]", "4M": "vLLM-[4M]"}
"""Our names of the systems, and the papers'."""
ROUND_OF_QUESTIONS: Final = 9
"""Questions about each document of L-Eval: with nine tenths of a prompt shared, four fifths of all are reused."""
_NODES: Final = {"3P+1D": (3, 1), "2P+2D": (2, 2), "4M": (4, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRate:
    """One dataset arriving as a Poisson process at one system of four nodes."""

    dataset: str
    """A name in `PUBLIC` or `SIMULATED`."""
    system: str = "3P+1D"
    requests_per_s: float = 1.0
    requests: int = 120
    cached: bool = True
    """Whether prompts share what arXiv Table 2 says; otherwise no two have anything in common."""
    spread: float = 0.5
    """Standard deviation of the log of prompt lengths in the public datasets (assumption B43)."""
    host_s: float = 0.0
    """What the host adds to a decode step for each request of it beyond `host_free` (assumption B37)."""
    host_free: float = 0.0
    testbed: TestbedName = "fast"
    """Whose nodes (assumption B58)."""
    device_tokens: int = DEVICE_TOKENS
    """KVCache in the GPU memory of a node that decodes (assumption B15)."""
    router: RouterName = "fewest_requests"
    """What spreads requests over vLLM instances (assumption B39)."""
    chunk_tokens: int = 0
    """Tokens per iteration of vLLM with chunked prefill; with 0 its prompts are whole (assumption B16)."""
    threshold: float = 1.5
    """This and what follows of Mooncake as of `EndToEnd`."""
    transfers: Transfers = "shared"
    offline_tests: int = 0
    decode_choice: DecodeChoice = "least_tbt"
    first_shown_by: Literal["decode", "prefill"] = "decode"
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: the latencies at this rate."""
        trace = self.trace()
        log = self._serve(trace)
        yield {
            **latencies(request_table(log)),
            "gap_p90_s": gap_p90_s(log),
            "token_hit_rate": reused_share(log),
            "source": trace.source,
        }

    def trace(self) -> Trace:
        """The requests: like the named dataset in the numbers that arXiv Table 2 prints."""
        if self.dataset in SIMULATED:
            return self._simulated()
        if self.dataset not in PUBLIC:
            raise ValueError(f"unknown dataset {self.dataset!r}; allowed are {', '.join(PUBLIC + SIMULATED)}")
        mean, answer = (_printed(self.dataset, f"avg_{what}_tokens") for what in ("input", "output"))
        questions = ROUND_OF_QUESTIONS if _printed(self.dataset, "cache_ratio_percent") and self.cached else 1
        documents = -(-self.requests // questions)
        noise = np.random.default_rng([self.seed, 2]).normal(size=documents)
        lengths = np.exp(self.spread * noise - self.spread**2 / 2) * mean
        return self._asked(lengths.clip(16).astype(np.int64), int(answer), questions)

    def _simulated(self) -> Trace:
        tokens = int(_printed("Simulated data", f"input_tokens_{SIMULATED.index(self.dataset) + 1}"))
        share = _printed("Simulated data", "cache_ratio_percent") / 100 if self.cached else 0.0
        return SharedPrefix(
            requests=self.requests,
            requests_per_s=self.requests_per_s,
            input_tokens=tokens,
            shared_tokens=int(share * tokens) // 512 * 512,
            output_tokens=int(_printed("Simulated data", "avg_output_tokens")),
        ).make(seed=self.seed)

    def _asked(self, lengths: Any, answer_tokens: int, questions: int) -> Trace:
        """Documents with several questions each, in random order; the first nine tenths of a prompt are shared."""
        document = np.repeat(np.arange(len(lengths)), questions)
        np.random.default_rng([self.seed, 3]).shuffle(document)
        ids: list[int] = []
        starts, fresh = [0], len(lengths) << 20
        for which in document[: self.requests].tolist():
            blocks = blocks_for(int(lengths[which]), 512)
            shared = blocks * 9 // 10 if questions > 1 else 0
            ids += [(which << 20) + k for k in range(shared)]
            ids += range(fresh, fresh + blocks - shared)
            fresh += blocks - shared
            starts.append(len(ids))
        return Trace(
            name=self.dataset,
            origin="generated",
            arrival_s=poisson_arrivals_s(self.requests, self.requests_per_s, seed=self.seed),
            input_tokens=lengths[document[: self.requests]],
            output_tokens=np.full(self.requests, answer_tokens),
            block_ids=np.array(ids),
            block_starts=np.array(starts),
            source=f"generated like {self.dataset} in arXiv Table 2, seed {self.seed}",
        )

    def _serve(self, trace: Trace) -> list[Record]:
        model = latency_of(self.testbed).with_host(self.host_s, self.host_free)
        prefill, decode = _NODES[self.system]
        if decode:
            spec = ClusterSpec.disaggregated(
                prefill_nodes=prefill,
                decode_nodes=decode,
                device_tokens=self.device_tokens,
                first_shown_by=self.first_shown_by,
                placement=with_decode_choice(KVCacheCentric(self.threshold), self.decode_choice),
            )
            believed = estimator(model, self.transfers, self.offline_tests, self.seed)
            return Cluster(spec, model, estimate=believed).run(trace.requests())
        alone = self.dataset in SIMULATED  # vLLM served these one at a time (arXiv v3 §8.1.2)
        coupled = ClusterSpec.coupled(
            nodes=prefill,
            batching=VLLMChunked(chunk_tokens=self.chunk_tokens) if self.chunk_tokens else VLLM(),
            max_requests=1 if alone else 256,
            device_tokens=self.device_tokens,
            placement=named_placement(self.router, self.seed),
        )
        return Cluster(coupled, model).run(trace.requests())


def gap_p90_s(log: list[Record]) -> float:
    """The P90 of the gaps between tokens, over all tokens and not over requests (assumption B19)."""
    return float(np.percentile(np.concatenate([np.diff(times) for _, times in token_times_s(log)]), 90))


def printed_rates(dataset: str) -> tuple[float, ...]:
    """The rates that the papers tested on a dataset, requests a second."""
    table = curve("arxiv_fig12_simulated_data" if dataset in SIMULATED else "arxiv_fig11_public_datasets")
    mine = table["series"].astype(str).str.startswith(f"{dataset}/")
    return tuple(sorted({float(x) for x in table[mine]["x"]}))


def points(dataset: str, base: AtRate) -> tuple[AtRate, ...]:
    """Every system at every rate that the paper tested."""
    return tuple(
        replace(base, dataset=dataset, system=system, requests_per_s=rate)
        for system in SYSTEMS
        for rate in printed_rates(dataset)
    )


def normalised(rows: pd.DataFrame, tbt_column: str = "tbt_arxiv_p90_s") -> pd.DataFrame:
    """Latencies over their SLOs, as arXiv Figs. 11 and 12 draw them: columns `ttft` and `tbt`, 1.0 is the limit.

    The limits are 10 and 5 times the mean over the three systems of the P90 at the lowest rate (assumption B32).
    What the P90 of TBT is taken over is a choice (assumption B19): `gap_p90_s` is over tokens.
    """
    parts: list[pd.DataFrame] = []
    for _, part in rows.groupby("dataset", sort=False):
        lowest = part[part["requests_per_s"] == part["requests_per_s"].min()]
        ttft = constant("slo_ttft_p90_factor_arxiv").value * lowest["ttft_p90_s"].mean()
        tbt = constant("slo_tbt_p90_factor_arxiv").value * lowest[tbt_column].mean()
        parts.append(part.assign(ttft=part["ttft_p90_s"] / ttft, tbt=part[tbt_column] / tbt))
    return pd.concat(parts, ignore_index=True)


def highest_rate(rows: pd.DataFrame, dataset: str, system: str, *, both: bool = False) -> float:
    """The highest tested rate up to which a system keeps its TTFT SLO, or `both` SLOs; 0 where it keeps none."""
    mine = where(rows, dataset=dataset, system=system).sort_values("requests_per_s")
    kept = (mine["ttft"] <= 1) & ((mine["tbt"] <= 1) | (not both))
    return float(max(mine["requests_per_s"][kept.cummin()], default=0.0))


def _printed(dataset: str, x: str) -> float:
    return fact("arxiv_table2_datasets", series=dataset, x=x).value
