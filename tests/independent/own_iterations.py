"""By-hand cost models of iterations: SARATHI on an A6000, Sarathi-Serve on its artifact, KV-Runahead on A100s.

Every constant is printed in a paper, shipped with the artifact, or a data sheet's; nothing is fitted to a claim.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np

from mooncake_lab.book import paper

# --- SARATHI: LLaMA-13B on an A6000, milliseconds ---


@functools.cache
def table_2(row: str, column: str) -> float:
    """A cell of SARATHI Table 2."""
    return paper.fact("sarathi_table2_per_token_time", series=row, x=column).value


@functools.cache
def figure_7(tokens: int) -> float:
    """A printed iteration time of SARATHI Figure 7."""
    return paper.fact("sarathi_fig07_tile_quantisation", series="iteration time", x=tokens).value


ALONE = table_2("decode only, batch 4, context 1024", "attention_ms") / 4 / 1024
"""Attention of a decode per token of context, in a batch of decodes."""
BESIDE = (
    table_2("1021 prefill tokens + 3 decodes", "attention_ms")
    - table_2("prefill only", "attention_ms")
    - 3 * 1024 * ALONE
)
"""What attention of decodes beside a prefill costs once an iteration, however many there are.

Table 2 has one such row, so this could as well be a share of each decode. Figure 8 decides: at batch 2 and 18 it
prints 9.8 and 2.7 times; a cost for each iteration gives 9.8 and 2.7, a share of each decode 13.6 and 2.3.
"""
PAIR = table_2("prefill only", "attention_ms") / (1024 * 1025 / 2)
"""Attention of a prefill for each pair of a token and one that it sees."""


def prompt_attention(tokens: int, cached: int = 0) -> float:
    """Attention of a piece of a prompt, behind so many cached tokens."""
    return PAIR * tokens * (cached + (tokens + 1) / 2)


def linear(tokens: int) -> float:
    """Matrix products of an iteration: whole tiles of 128 tokens, straight lines between printed points.

    Few tokens wait for the weights, so a batch of decodes is on the line from Table 2's four decodes to one tile.
    """
    points = {
        4: table_2("decode only, batch 4, context 1024", "linear_ms"),
        1024: table_2("prefill only", "linear_ms"),
    }
    for tile, measured in ((128, figure_7(128)), (256, figure_7(256)), (384, figure_7(257))):
        points[tile] = measured - prompt_attention(min(tile, 257))
    if tokens > 1024:
        return points[1024] * math.ceil(tokens / 128) / 8
    at = tokens if tokens < 128 else 128 * math.ceil(tokens / 128)
    sizes = sorted(points)
    return float(np.interp(at, sizes, [points[size] for size in sizes]))


def prefill_alone(prompt: int) -> float:
    """A whole prompt in one iteration."""
    return linear(prompt) + prompt_attention(prompt)


def decodes_alone(batch: int, context: float) -> float:
    """One token for each of `batch` requests."""
    return linear(batch) + batch * context * ALONE


def decode_speedup(length: int, batch: int, chunk: int = 256) -> float:
    """Time of a decode alone over what it adds to a chunk that fills the same tiles."""
    alone = decodes_alone(batch, length) / batch
    decodes = batch - 1
    added = linear(chunk) + decodes * length * ALONE + BESIDE - linear(chunk - decodes)
    return alone / (added / decodes)


def sarathi_gain(length: int, batch: int, chunk: int = 256) -> float:
    """Throughput over separate prefills and decodes at the balanced P:D ratio, where every chunk is full.

    In one round each of the batch's requests is prefilled once and decodes once. The prompt is cut so that prompt
    and answer together have the printed length and every piece is whole.
    """
    piece = chunk - (batch - 1)
    pieces = round(length * piece / (piece + batch - 1) / piece)
    prompt, answer = pieces * piece, pieces * (batch - 1)
    context = prompt + answer / 2
    apart = batch * prefill_alone(prompt) + answer * decodes_alone(batch, context)
    together = batch * (
        pieces * (linear(chunk) + (batch - 1) * context * ALONE + BESIDE) + prompt_attention(prompt)
    )
    return apart / together


def orca_gain(length: int, batch: int) -> float:
    """The best case of Orca, at its best P:D ratio: whole prompts with decodes, then decodes alone."""

    def gain(answer: int) -> float:
        prompt, context = length - answer, length - answer / 2
        apart = batch * prefill_alone(prompt) + answer * decodes_alone(batch, context)
        beside = min(answer, batch - 1)
        mixed = linear(prompt + beside) + prompt_attention(prompt) + beside * context * ALONE + BESIDE
        return apart / (batch * mixed + (answer - beside) * decodes_alone(batch, context))

    return max(gain(answer) for answer in range(4, length // 4))


def chunked_over_whole(prompt: int, chunk: int) -> float:
    """Time of a prefill in chunks over that of an unchunked one; attention of a narrow chunk costs more.

    Figure 13 prints three times the attention for chunks of 64.
    """
    worse = paper.fact("sarathi_fig13_chunk_overhead", series="attention", x=64).value if chunk == 64 else 1.0
    return (prompt // chunk * linear(chunk) + worse * prompt_attention(prompt)) / prefill_alone(prompt)


# --- Sarathi-Serve: Yi-34B on two A100s, seconds ---


@dataclass(frozen=True)
class Yi34B:
    """Iteration times from the rows that the authors ship."""

    batches: tuple[float, ...]
    decode: tuple[float, ...]
    lengths: tuple[float, ...]
    prefill: tuple[float, ...]

    @property
    def request(self) -> float:
        """What one more decode costs, the slope of the shipped rows from 1 to 128."""
        return (self.decode[-1] - self.decode[0]) / (self.batches[-1] - self.batches[0])

    def prompt(self, tokens: int) -> float:
        """A prompt of any length, straight lines between the rows."""
        if tokens < self.lengths[0]:
            return self.prefill[0]
        if tokens > self.lengths[-1]:
            return self.prefill[-1] * (tokens / self.lengths[-1]) ** 1.24
        return float(np.interp(tokens, self.lengths, self.prefill))

    @functools.cached_property
    def again(self) -> float:
        """What a token of a chunk costs for each cached token: mean of the shipped chunks of 4K, 8K and 16K."""
        found: list[float] = []
        for length in (4096, 8192, 16384):
            overhead = paper.fact("sarathi_serve_artifact_chunk_overhead", series="chunk 512", x=length).value
            chunks = length // 512
            extra = overhead * self.prompt(length) - chunks * self.prompt(512)
            found.append(extra / (512 * 512 * chunks * (chunks - 1) / 2))
        return mean(found)

    def reread(self, tokens: int, cached: int) -> float:
        """A chunk looks at what is cached."""
        return self.again * tokens * cached

    def iteration(self, pieces: Sequence[tuple[int, int]], decodes: int) -> float:
        """Pieces of prompts, each with the tokens before it, and decodes beside them."""
        if not pieces:
            return float(np.interp(decodes, self.batches, self.decode))
        work = self.prompt(sum(tokens for tokens, _ in pieces))
        return work + sum(self.reread(*piece) for piece in pieces) + decodes * self.request


def yi34b() -> Yi34B:
    """The shipped rows, in seconds."""
    decode = paper.points("sarathi_serve_artifact_yi34b_decode", "decode iteration")
    prefill = paper.points("sarathi_serve_artifact_yi34b_prefill", "prefill")
    in_seconds = [[ms / 1000 for ms in times] for _, times in (decode, prefill)]
    return Yi34B(tuple(decode[0]), tuple(in_seconds[0]), tuple(prefill[0]), tuple(in_seconds[1]))


@dataclass
class Call:
    """A request that is being served."""

    at: float
    prompt: int
    answer: int
    done: int = 0
    tokens: list[float] = field(default_factory=list)
    """When each token was there."""
    scheduled: float = math.nan


def drawn(workload: str, requests: int, rate: float, seed: int) -> list[Call]:
    """Poisson arrivals with log-normal lengths through the printed median and 90th percentile."""
    draw = random.Random(f"{workload} {seed}")

    def length(kind: str) -> int:
        middle, p90 = (
            paper.fact("sarathi_serve_table2_workloads", series=workload, x=f"{kind}_{x}").value
            for x in ("median", "p90")
        )
        return max(1, round(middle * (p90 / middle) ** (draw.gauss(0, 1) / 1.2816)))

    most = paper.fact("sarathi_serve_table2_workloads", series=workload, x="total_at_most").value
    calls: list[Call] = []
    at = 0.0
    while len(calls) < requests:
        prompt, answer = length("prompt"), length("output")
        if prompt + answer <= most:
            at += draw.expovariate(rate)
            calls.append(Call(at, prompt, answer))
    return calls


Plan = tuple[list[tuple[Call, int]], list[Call]]
"""Pieces of prompts, and the requests that decode."""


def hybrid(running: list[Call], budget: float, last: Plan) -> Plan:
    """Decodes first, then prompts in order of arrival as far as the budget goes (Sarathi-Serve)."""
    del last
    decodes = [call for call in running if call.done == call.prompt]
    room = budget - len(decodes)
    pieces: list[tuple[Call, int]] = []
    for call in running:
        if call.done < call.prompt and room > 0:
            tokens = int(min(call.prompt - call.done, room))
            pieces.append((call, tokens))
            room -= tokens
    return pieces, decodes


def whole_prompts(running: list[Call], budget: float, last: Plan) -> Plan:
    """Hybrid batches alone: every waiting prompt joins whole (Orca)."""
    del budget
    return hybrid(running, math.inf, last)


def chunks_alone(running: list[Call], budget: float, last: Plan) -> Plan:
    """Chunked prefill alone: chunks and decodes take turns, never in one iteration."""
    pieces, _ = hybrid([call for call in running if call.done < call.prompt], budget, last)
    decodes = [call for call in running if call.done == call.prompt]
    return ([], decodes) if decodes and (last[0] or not pieces) else (pieces, [])


def prompts_first(running: list[Call], budget: float, last: Plan) -> Plan:
    """vLLM: waiting prompts, whole, up to so many tokens; decodes only when none waits."""
    del last
    pieces: list[tuple[Call, int]] = []
    for call in running:
        if not call.done and (not pieces or sum(n for _, n in pieces) + call.prompt <= budget):
            pieces.append((call, call.prompt))
    return (pieces, []) if pieces else ([], [call for call in running if call.done == call.prompt])


Policy = Callable[[list[Call], float, Plan], Plan]


def serve(calls: list[Call], model: Yi34B, policy: Policy, budget: float, most: int) -> None:
    """Run one instance until every request is answered; `most` requests are in it at a time."""
    clock, plan = 0.0, (list[tuple[Call, int]](), list[Call]())
    waiting, running = list(calls), list[Call]()
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].at)
        while waiting and waiting[0].at <= clock and len(running) < most:
            running.append(waiting.pop(0))
        plan = pieces, decodes = policy(running, budget, plan)
        for call, _ in pieces:
            if math.isnan(call.scheduled):
                call.scheduled = clock
        clock += model.iteration([(tokens, call.done) for call, tokens in pieces], len(decodes))
        for call, tokens in pieces:
            call.done += tokens
            if call.done == call.prompt:
                call.tokens.append(clock)
        for call in decodes:
            call.tokens.append(clock)
        running = [call for call in running if len(call.tokens) < call.answer]


def p99_gap(calls: Sequence[Call]) -> float:
    """99th percentile of the gaps between tokens."""
    return float(np.percentile(np.concatenate([np.diff(call.tokens) for call in calls]), 99))


def median_ttft(calls: Sequence[Call]) -> float:
    """Half of the requests wait no longer for their first token."""
    return median(call.tokens[0] - call.at for call in calls)


# --- KV-Runahead: LLaMA-7B on the A100s of one node, seconds ---


@dataclass(frozen=True)
class Llama7B:
    """A layer on one of several A100s at half of their peak (B42)."""

    flops: float = 0.5 * 312e12
    link: float = 300e9
    message: float = 10e-6
    layers: int = 32
    width: int = 4096
    ffn: int = 11008

    def project(self, tokens: float) -> float:
        """Queries, keys and values."""
        return 2 * 3 * self.width**2 * tokens / self.flops

    def rest(self, tokens: float) -> float:
        """The other matrices of the layer."""
        return 2 * (self.width**2 + 3 * self.width * self.ffn) * tokens / self.flops

    def attend(self, tokens: float, seen: float) -> float:
        """A slice against all that it sees, as a rectangle."""
        return 4 * self.width * tokens * seen / self.flops

    def send(self, tokens: float) -> float:
        """Keys and values of so many tokens to a neighbour."""
        return self.message + 4 * self.width * tokens / self.link

    def even(self, tokens: int, gpus: int) -> float:
        """Tensor and sequence parallel: equal slices, everybody gathers everything."""
        share = tokens / gpus
        gather = (gpus - 1) * self.send(share)
        return self.layers * (self.project(share) + gather + self.attend(share, tokens) + self.rest(share))

    def chain(self, slices: Sequence[float]) -> float:
        """KV-Runahead: each GPU hands the prefix to the next one before it attends."""
        ends = [0.0] * len(slices)
        seen = list(itertools.accumulate(slices))
        for _ in range(self.layers):
            handed = 0.0
            for i, tokens in enumerate(slices):
                ready = max(ends[i] + self.project(tokens), handed)
                handed = ready + self.send(seen[i])
                ends[i] = ready + self.attend(tokens, seen[i]) + self.rest(tokens)
        return ends[-1]

    def best_chain(self, tokens: int, gpus: int) -> float:
        """The best slices: tokens move between neighbours as long as that helps, in ever smaller amounts."""
        slices = [tokens / gpus] * gpus
        best = self.chain(slices)
        step = tokens / gpus / 2
        while step >= 8:
            tried = [
                [n - step * (i == giver) + step * (i == taker) for i, n in enumerate(slices)]
                for giver, taker in itertools.permutations(range(gpus), 2)
                if slices[giver] > step
            ]
            times = [self.chain(each) for each in tried]
            if times and min(times) < best:
                best = min(times)
                slices = tried[times.index(best)]
            else:
                step /= 2
        return best


# --- SARATHI's pipeline: GPT-3 on 64 A100s, seconds ---


@dataclass(frozen=True)
class Gpt3:
    """Layers of GPT-3 on eight A100s, at the shares of the peaks that LLaMA-13B reaches on SARATHI's A6000.

    Table 2: 1024 tokens take 224.8 ms, four decodes 44.3 ms, and 1.42 ms to read 1024 tokens of KVCache.
    """

    layers: int
    width: int = 12288
    gpus: int = 8

    @property
    def weights(self) -> float:
        """Weights on one GPU."""
        return 12 * self.width**2 * self.layers / self.gpus

    def iteration(self, tokens: int, decoded_context: int, prompt_pairs: float) -> float:
        """So many tokens through the layers; decodes read their context, prompts attend."""
        share = 0.747
        flops, memory = share * 312e12, share * 2039e9
        matrices = max(2 * self.weights / memory, 2 * self.weights * 128 * math.ceil(tokens / 128) / flops)
        if tokens <= 128:
            matrices = max(2 * self.weights / memory, 2 * self.weights * tokens / flops)
        read = 4 * self.width * self.layers / self.gpus * decoded_context / memory
        return matrices + read + 4 * self.width * self.layers / self.gpus * prompt_pairs / flops


def zipf_lengths(requests: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and answer of requests with 1K to 4K tokens, ten prompt tokens for each of the answer (theta 0.4)."""
    lengths = range(1024, 4097)
    weights = [rank**-0.4 for rank in range(1, len(lengths) + 1)]
    totals = random.Random(seed).choices(lengths, weights, k=requests)
    return [(total - round(total / 11), round(total / 11)) for total in totals]


@dataclass
class MicroBatch:
    """Requests that pass through the pipeline together."""

    most: int
    calls: list[Call] = field(default_factory=list)

    def step(self, queue: list[Call], chunk: float, cost: Gpt3) -> float:
        """Refill, then one iteration: at most one prompt or piece, and all decodes. Its seconds a stage."""
        self.calls = [call for call in self.calls if len(call.tokens) < call.answer]
        while queue and len(self.calls) < self.most:
            self.calls.append(queue.pop())
        decodes = [call for call in self.calls if call.done == call.prompt]
        context = sum(call.prompt + len(call.tokens) for call in decodes)
        first = next((call for call in self.calls if call.done < call.prompt), None)
        piece = int(min(first.prompt - first.done, chunk - len(decodes))) if first else 0
        pairs = piece * (first.done + (piece + 1) / 2) if first else 0.0
        for call in decodes:
            call.tokens.append(0.0)
        if first:
            first.done += piece
            if first.done == first.prompt:
                first.tokens.append(0.0)
        return cost.iteration(piece + len(decodes), context, pairs)


def pipeline(lengths: list[tuple[int, int]], stages: int, most: int, chunk: float) -> tuple[float, float]:
    """Completion time, and the median over requests of the idle time of stages in front of their iterations."""
    cost = Gpt3(96 // stages)
    queue = [Call(0.0, *each) for each in reversed(lengths)]
    batches = [MicroBatch(most) for _ in range(stages)]
    free, back = [0.0] * stages, [0.0] * stages
    waited: dict[int, float] = {}
    turn = 0
    while queue or any(len(call.tokens) < call.answer for batch in batches for call in batch.calls):
        i = turn % stages
        turn += 1
        seconds = batches[i].step(queue, chunk, cost)
        if not batches[i].calls:
            continue
        ready, idle = back[i], 0.0
        for stage in range(stages):
            start = max(ready, free[stage])
            idle += start - free[stage]
            ready = free[stage] = start + seconds
        back[i] = ready
        for call in batches[i].calls:
            waited[id(call)] = waited.get(id(call), 0.0) + idle
    return max(back), median(waited.values())
