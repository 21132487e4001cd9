"""The Conductor's latency estimates.

The simulated clock and the Conductor's estimates are two latency models of one type. They are equal unless an
experiment makes them differ on purpose.
"""

from dataclasses import dataclass
from typing import Protocol

from mooncake_lab.core import keyed_uniform
from mooncake_lab.perf import CppGroup, LatencyModel, cpp_prefill_s


class Estimator(Protocol):
    """Predicts the terms of Algorithm 1; all results in seconds."""

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """Computing a prompt of which a prefix is reused (T_prefill)."""
        ...

    def transfer_s(self, tokens: int, flows: int) -> float:
        """Copying KVCache from a sender that already has `flows` transfers under way (T_transfer)."""
        ...

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """One decode step of a batch (the TBT it will show)."""
        ...


@dataclass(frozen=True, slots=True)
class LatencyEstimator:
    """Estimates with a latency model fitted offline (FAST'25 §4.1: a polynomial regression)."""

    model: LatencyModel

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """Computing a prompt of which a prefix is reused."""
        del request_id
        return self.model.prefill.seconds(input_tokens, reused_tokens)

    def transfer_s(self, tokens: int, flows: int) -> float:
        """Copying KVCache when the sender's bandwidth is shared fairly with the transfers under way."""
        return self.model.transfer_s(tokens * (flows + 1))

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """One decode step of a batch."""
        return self.model.decode.step_s(requests, context_tokens)


@dataclass(frozen=True, slots=True)
class GroupEstimator:
    """`LatencyEstimator` where groups of nodes prefill by chunked pipeline parallelism (arXiv §5.1)."""

    model: LatencyModel
    group: CppGroup

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """Computing a prompt on an idle group."""
        del request_id
        return cpp_prefill_s(self.group, input_tokens, reused_tokens)

    def transfer_s(self, tokens: int, flows: int) -> float:
        """As between single nodes, because the receiver may have only one network card."""
        return LatencyEstimator(self.model).transfer_s(tokens, flows)

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """One decode step of a batch."""
        return self.model.decode.step_s(requests, context_tokens)


@dataclass(frozen=True, slots=True)
class NoisyEstimator:
    """Another estimator whose prefill estimates err by a factor uniform in 1 ± `relative_error`.

    The draw depends on the seed and the request alone, so that decisions replay.
    """

    inner: Estimator
    relative_error: float = 0.05
    seed: int = 0

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """The inner estimate times the request's error."""
        draw = keyed_uniform(self.seed, request_id)
        return self.inner.prefill_s(request_id, input_tokens, reused_tokens) * (
            1 + self.relative_error * (2 * draw - 1)
        )

    def transfer_s(self, tokens: int, flows: int) -> float:
        """The inner estimate."""
        return self.inner.transfer_s(tokens, flows)

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """The inner estimate."""
        return self.inner.decode_step_s(requests, context_tokens)
