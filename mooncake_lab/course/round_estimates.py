"""The estimator of the laws of admission policies, which students and their graders use alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundEstimator:
    """An estimator of round numbers, for views made by hand."""

    fetches_by_layer: bool = False

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        """A millisecond per token that is computed."""
        del request_id
        return (input_tokens - reused_tokens) * 1e-3

    def beside_ssd_s(self, compute_s: float, ssd_tokens: int) -> float:
        """The longer of the two."""
        return max(compute_s, ssd_tokens * 1e-5)

    def beside_load_s(self, compute_s: float, load_s: float) -> float:
        """The longer of the two."""
        return max(compute_s, load_s)

    def transfer_s(self, tokens: int, flows: int) -> float:
        """A microsecond per token and flow."""
        return tokens * 1e-6 * (flows + 1)

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        """20 ms, and a millisecond per request."""
        return 0.02 + 1e-3 * requests + 1e-8 * context_tokens
