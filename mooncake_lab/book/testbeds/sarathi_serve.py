"""Sarathi-Serve's machines: Yi-34B anchored to what its authors ship, three others carried over by the roofline.

The artifact has iteration times of one machine only. Mistral-7B, LLaMA2-70B and Falcon-180B are assumed to reach
the same share of their rooflines, and their engine to cost the same for each running request (assumption B48).
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab import perf
from mooncake_lab.book.paper import assumption, curve, fact
from mooncake_lab.core import entry, gbps
from mooncake_lab.simulation import StageClock

DECODES, PREFILLS = "sarathi_serve_artifact_yi34b_decode", "sarathi_serve_artifact_yi34b_prefill"
TEXT, LIMITS = "sarathi_serve_text_constants", "sarathi_serve_slo"
CONTEXT_TOKENS: Final = 1024
"""Context of the decodes that the artifact timed; the artifact does not state it (assumption B41)."""
_NOTHING_S: Final = 1e-9
"""What a cost of decodes is at least: costs are positive."""
ATTENTION_SHARE: Final = 0.77
"""Share of the memory bandwidth that decode attention reaches, as on SARATHI's A6000 (Table 2)."""
BLOCK_TOKENS: Final = 16
"""Tokens per block of vLLM in the paper's runs."""
DecodeRows = Literal["all", "from 8", "first and last"]
"""Which decode times of the artifact a model goes through. Those of up to 4 requests lie on another line than
those of 8 or more, and another file of the artifact has 68 ms for 4 requests, on the line of the latter."""
LAYER_SUMS: Final = 2
"""All-reduces of a layer whose matrices are cut: after attention and after the feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A model on devices of Sarathi-Serve §5: how many share each layer, and how many runs of layers there are."""

    model: str
    device: str
    tensor: int
    """Devices that share each layer."""
    stages: int = 1
    """Runs of layers, each on devices of its own."""
    split: int = 1
    """Nodes over which those that share a layer are spread."""

    @property
    def sum_ms(self) -> float:
        """Latency of an all-reduce between nodes (assumption B50); 0 where none is needed."""
        return float(assumption("B50").value or 0) if self.split > 1 else 0.0

    def node(self) -> perf.Hardware:
        """The devices of one stage."""
        return replace(perf.hardware(self.device), name=f"{self.tensor} x {self.device}", devices=self.tensor)

    def clock(
        self,
        sum_s: float = 0.0,
        *,
        context_tokens: int = CONTEXT_TOKENS,
        decode_rows: DecodeRows = "first and last",
        decode_s: float | None = None,
    ) -> StageClock:
        """What an iteration costs on it.

        Args:
            sum_s: latency of an all-reduce between nodes.
            context_tokens: at which the decodes of the artifact were timed (assumption B41).
            decode_rows: which of its decode times the model goes through (assumption B59).
            decode_s: of an iteration of 32 decodes with 4K of context each; None takes what Yi-34B's gives
                (assumption B48).
        """
        cost = cost_of(self, context_tokens, decode_rows)
        if decode_s is not None and cost.per_decode:
            decodes, engine_s = 32, cost.decodes_s(32)
            beside_s = cost.step_s(0, 0, decodes, decodes * 4096) - engine_s
            left_s = max(_NOTHING_S, decode_s - beside_s)  # weights and attention may take all of it
            cost = replace(cost, per_decode=cost.per_decode.scaled(left_s / engine_s))
        shape = perf.model_shape(self.model)
        network = perf.LinkLatency(gbps(fact(TEXT, series="network", x="ethernet_gbps").value))
        activations = shape.width * shape.bytes_per_element
        sums = LAYER_SUMS * shape.layers if self.split > 1 else 0
        crossing = 2 * (self.split - 1) / self.split * activations / network.bytes_per_s
        return StageClock(
            cost=cost,
            stages=self.stages,
            link=network,
            hop_bytes_per_token=activations if self.stages > 1 else 0,
            overhead_s=sums * sum_s,
            collective_s_per_token=sums * crossing,
        )

    def capacity_tokens(self) -> int:
        """Tokens of KVCache that fit beside the weights: 0.9 of the memory, as vLLM takes by default."""
        shape, memory = perf.model_shape(self.model), self.stages * self.node().memory_bytes
        return int((0.9 * memory - shape.weight_bytes) / shape.kv_bytes_per_token)


TESTBEDS: Final = {
    "Mistral-7B": Testbed(model="mistral-7b", device="a100", tensor=1),
    "Yi-34B": Testbed(model="yi-34b", device="a100", tensor=2),
    "LLaMA2-70B": Testbed(model="llama2-70b", device="a40", tensor=4, stages=2),
    "Falcon-180B": Testbed(model="falcon-180b", device="a100", tensor=4, stages=2),
    "Falcon-180B, TP8": Testbed(model="falcon-180b", device="a100", tensor=8, split=2),
}
"""The machines of Sarathi-Serve Table 1, and the one that its Fig. 13 compares with."""


def testbed(name: str) -> Testbed:
    """A machine of the paper; a name that is not in `TESTBEDS` is a ValueError."""
    return entry(TESTBEDS, name, "no testbed")


def slo_s(name: str, which: str) -> float:
    """The strict or relaxed limit on P99 TBT of a machine; both layouts of Falcon have the same."""
    return fact(LIMITS, series=name.split(",", maxsplit=1)[0], x=which).value


def cost_of(
    bed: Testbed, context_tokens: int = CONTEXT_TOKENS, decode_rows: DecodeRows = "first and last"
) -> perf.IterationCost:
    """Iterations over all layers of a machine's model, by the devices of one stage; B41 is the context."""
    anchored = yi_34b_on_two_a100s(context_tokens, decode_rows)
    yi = TESTBEDS["Yi-34B"]
    if (bed.model, bed.device, bed.tensor) == (yi.model, yi.device, yi.tensor):
        return anchored
    return perf.transferred(
        anchored,
        source=(perf.model_shape(yi.model), yi.node()),
        target=(perf.model_shape(bed.model), bed.node()),
        name=f"{bed.model} on {bed.node().name}, carried over from Yi-34B on two A100s by the roofline",
    )


def yi_34b_on_two_a100s(
    context_tokens: int = CONTEXT_TOKENS, decode_rows: DecodeRows = "first and last"
) -> perf.IterationCost:
    """The machine of the artifact: linear operators through its prefills, and decodes through its decode times.

    What decodes cost beside their matrices is mostly not attention: at most a tenth of it would be, at SARATHI's
    share of the bandwidth. So most of it is charged to the engine, by the number of requests, whatever their
    context. The first request costs the engine what the second one does.
    """
    lengths, seconds = _points(PREFILLS)
    per_token = seconds / lengths
    # attention is what makes long prompts dear
    slope, _ = perf.as_told(np.polyfit(lengths[-3:], per_token[-3:], 1))
    per_pair_s = 2 * float(slope)
    batches, steps = _points(DECODES)
    memory = 2 * perf.hardware("a100").memory_bytes_per_s
    per_context_s = perf.model_shape("yi-34b").kv_bytes_per_token / (ATTENTION_SHARE * memory)
    linear = seconds - per_pair_s * lengths * (lengths + 1) / 2
    batches, steps = _chosen(batches, steps, decode_rows)
    beside_s = steps - per_context_s * context_tokens * batches  # matrices and engine
    first_s = float(np.interp(1, batches, beside_s) - (beside_s[1] - beside_s[0]) / (batches[1] - batches[0]))
    anchors = ((1.0, min(first_s, float(linear[0]))), *zip(lengths.tolist(), linear.tolist(), strict=True))
    matrices = perf.LinearCost(anchors)
    engine = [(n, s - matrices.seconds(n)) for n, s in zip(batches.tolist(), beside_s.tolist(), strict=True)]
    return perf.IterationCost(
        name="Yi-34B on two A100s, anchored to the Sarathi-Serve artifact",
        linear=matrices,
        per_pair_s=per_pair_s,
        per_context_token_s=float(per_context_s),
        per_decode=perf.LinearCost(tuple(engine)),
        rereads=False,
    )


def _chosen(
    batches: npt.NDArray[np.float64], steps: npt.NDArray[np.float64], rows: DecodeRows
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The decode times that a model goes through, the one of a single request first."""
    if rows == "first and last":
        return batches[[0, -1]], steps[[0, -1]]
    if rows == "from 8":  # extended to one request along a straight line
        many = batches >= 8
        slope, start = np.polyfit(batches[many], steps[many], 1)
        return np.concatenate([[1.0], batches[many]]), np.concatenate([[start + slope], steps[many]])
    return batches, steps


def calibration() -> pd.DataFrame:
    """Every row of the artifact beside the model: what, size, paper_ms, model_ms, miss_percent."""
    cost, mixed = yi_34b_on_two_a100s(), "1021 prefill tokens + 3 decodes"
    rows = [("prefill", n, 1000 * s, 1000 * cost.step_s(n, 0)) for n, s in zip(*_points(PREFILLS), strict=True)]
    rows += [
        ("decode", b, 1000 * s, 1000 * cost.step_s(0, 0, b, b * CONTEXT_TOKENS))
        for b, s in zip(*_points(DECODES), strict=True)
    ]
    printed_ms = fact("sarathi_serve_artifact_mixed_batch", series=mixed, x="total_ms").value
    rows.append((mixed, 1024, printed_ms, 1000 * cost.step_s(1021, 0, 3, 3 * CONTEXT_TOKENS)))
    table = pd.DataFrame(rows, columns=["what", "size", "paper_ms", "model_ms"])
    return table.assign(miss_percent=100 * (table["model_ms"] / table["paper_ms"] - 1))


def machines_beside_paper(
    decode_rows: DecodeRows = "first and last",
    context_tokens: int = CONTEXT_TOKENS,
    *,
    printed_decodes: bool = False,
) -> pd.DataFrame:
    """What the strict limits, five decode iterations of 32 requests of 4K, say of each machine, and our model.

    The paper prints the time of a prompt of 4K of Falcon only. With `printed_decodes`, decodes take what the limit
    says (assumption B48).
    """
    prompt_ms = {"Falcon-180B": fact(TEXT, series="Falcon-180B", x="prompt_4k_ms").value}
    costs = {
        name: bed.clock(
            context_tokens=context_tokens,
            decode_rows=decode_rows,
            decode_s=slo_s(name, "strict") / 5 if printed_decodes else None,
        ).cost
        for name, bed in TESTBEDS.items()
    }
    return pd.DataFrame(
        {
            "testbed": name,
            "paper_decode_ms": 1000 * slo_s(name, "strict") / 5,
            "model_decode_ms": 1000 * costs[name].step_s(0, 0, 32, 32 * 4096),
            "paper_prompt_ms": prompt_ms.get(name, np.nan),
            "model_prompt_ms": 1000 * costs[name].step_s(4096, 0),
            "capacity_tokens": bed.capacity_tokens(),
        }
        for name, bed in TESTBEDS.items()
        if bed.split == 1
    )


def _points(name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    table = curve(name)
    return np.asarray(table["x"], dtype=float), np.asarray(table["y"], dtype=float) / 1000
