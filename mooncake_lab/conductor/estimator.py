"""The Conductor's latency estimates.

The simulated clock and the Conductor's estimates are two latency models of one type. They are equal unless an
experiment makes them differ on purpose.
"""

from dataclasses import dataclass
from typing import Protocol

from mooncake_lab.perf import CppGroup, LatencyModel, cpp_prefill_s


class Estimator(Protocol):
    """Predicts the terms of Algorithm 1; all results in seconds."""

    @property
    def fetches_by_layer(self) -> bool:
        """Whether a prefix from elsewhere comes layer by layer while the rest of the prompt is computed."""
        ...

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """Computing a prompt of which a prefix is reused (T_prefill)."""
        ...

    def beside_ssd_s(self, compute_s: float, ssd_tokens: int) -> float:
        """A computation beside which the KVCache of so many tokens is read from SSD, layer by layer."""
        ...

    def beside_load_s(self, compute_s: float, load_s: float) -> float:
        """A computation beside which its prefix comes layer by layer, which takes `load_s` alone."""
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
    group: CppGroup | None = None
    """The nodes that prefill one prompt together by chunked pipeline parallelism (arXiv §5.1)."""
    fetches_by_layer: bool = False
    """Whether instances compute while a prefix comes from elsewhere; Algorithm 1 as printed adds the two times."""
    decode_model: LatencyModel | None = None
    """Of the nodes that decode, where they differ."""

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """Computing a prompt on an idle node or group."""
        del request_id
        if self.group is not None:
            return cpp_prefill_s(self.group, input_tokens, reused_tokens)
        return self.model.prefill.seconds(input_tokens, reused_tokens)

    def beside_ssd_s(self, compute_s: float, ssd_tokens: int) -> float:
        """A computation beside which the KVCache of so many tokens is read from SSD, layer by layer."""
        return self.model.beside_ssd_s(compute_s, ssd_tokens)

    def beside_load_s(self, compute_s: float, load_s: float) -> float:
        """A computation beside which its prefix comes layer by layer, which takes `load_s` alone."""
        return self.model.beside_load_s(compute_s, load_s)

    def transfer_s(self, tokens: int, flows: int) -> float:
        """Copying KVCache when the bandwidth of one network card is shared fairly by the transfers under way."""
        return self.model.transfer_s(tokens * (flows + 1))

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """One decode step of a batch."""
        return (self.decode_model or self.model).decode.step_s(requests, context_tokens)
