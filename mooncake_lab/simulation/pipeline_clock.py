"""What a planned iteration costs a stage of a pipeline, and the network between two stages."""

from dataclasses import dataclass

from mooncake_lab.batching import Plan
from mooncake_lab.perf import IterationCost, LinkLatency


def plan_s(cost: IterationCost, plan: Plan) -> float:
    """Seconds of one planned iteration: all tokens through the matrices together, attention one by one."""
    tokens = context = decodes = 0
    attention_s = 0.0
    for segment in plan.segments:
        tokens += segment.new_tokens
        if segment.kind == "decode":
            decodes += 1
            context += segment.cached_tokens + 1
        else:
            attention_s += cost.chunk_attention_s(segment.new_tokens, segment.cached_tokens)
    beside_s = cost.beside_s if 0 < decodes < len(plan.segments) else 0.0
    decode_s = cost.decode_attention_s(context) + cost.per_decode_s * decodes
    return cost.linear.seconds(tokens) + attention_s + decode_s + beside_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClock:
    """A model cut into stages of equally many layers, and the links between them.

    Raises:
        ValueError: when there is no stage, or a cost is negative.
    """

    cost: IterationCost
    """One iteration over all layers, on the devices of one stage."""
    stages: int
    link: LinkLatency
    """From a stage to the next; it works beside the stages."""
    hop_bytes_per_token: float
    """Activations of a token at a boundary."""
    overhead_s: float = 0.0
    """Added to every iteration, over all layers."""
    collective_s_per_token: float = 0.0
    """What the devices of a stage exchange for a token, over all layers (tensor parallelism)."""
    apart: bool = False
    """Whether the prompts and the decodes of a plan run one after the other and share nothing."""

    def __post_init__(self) -> None:
        costs = (self.hop_bytes_per_token, self.overhead_s, self.collective_s_per_token)
        if self.stages < 1 or min(costs) < 0:
            raise ValueError(f"{self} has no stage or a negative cost; at least 1 stage and 0 s are needed")

    def stage_s(self, plan: Plan) -> float:
        """Seconds of a plan on one stage."""
        parts = [plan]
        if self.apart and plan.prefills and plan.decodes:
            parts = [Plan(segments=plan.prefills), Plan(segments=plan.decodes)]
        whole_s = sum(plan_s(self.cost, part) + self.overhead_s for part in parts)
        return (whole_s + self.collective_s_per_token * plan.new_tokens) / self.stages

    def growth_s(self, plan: Plan) -> float:
        """Seconds by which a plan of decodes takes longer each time: every context has grown by a token."""
        return self.cost.per_context_token_s * len(plan.segments) / self.stages

    def hop_s(self, plan: Plan) -> float:
        """Seconds until the activations of a plan are on the next stage."""
        return self.link.seconds(self.hop_bytes_per_token * plan.new_tokens)
