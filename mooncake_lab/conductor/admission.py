"""Whether a request is served at all, given where it would go (Algorithm 1, the last test; arXiv §3, §7)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.lengths import share_longer
from mooncake_lab.conductor.load import (
    decode_pool_load,
    predicted_decode_load,
    prefill_load,
    refuse,
    refuse_at_decode,
)
from mooncake_lab.conductor.needs import Need, needs_of
from mooncake_lab.conductor.view import ClusterView, DecodeView, ServedView
from mooncake_lab.core import SLO, Request


class AdmissionPolicy(Protocol):
    """Accepts a proposed placement or rejects it with a reason, and lets the decode instance refuse later.

    A policy that needs more than loads declares it in an attribute `needs` (`conductor.needs`).
    """

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The placement itself or a rejection, when the request arrives."""
        ...

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """Whether the decode instance refuses a request whose prefill is done (arXiv §3, step 4).

        Args:
            request: whose KVCache has just arrived.
            decode: the instance now, without this request.
            estimate: the Conductor's latency estimates.
            slo: the limits.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdmitAll:
    """Serve everything."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The placement."""
        del request, view, estimate, slo
        return proposed

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """No rejection."""
        del request, decode, estimate, slo


@dataclass(frozen=True, slots=True)
class WithinSLO:
    """Serve what is expected to meet both limits (FAST'25 Algorithm 1, lines 18-19)."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection that names the limit and the estimate, if one is exceeded."""
        del request, view, estimate
        for name, expected_s, limit_s in (
            ("TTFT", proposed.expected_ttft_s, slo.ttft_s),
            ("TBT", proposed.expected_tbt_s, slo.tbt_s),
        ):
            if expected_s > limit_s:
                return Rejection(
                    request_id=proposed.request_id,
                    stage="admission",
                    reason=f"expected {name} {expected_s:.3g} s exceeds {limit_s:g} s",
                )
        return proposed

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """No rejection: Algorithm 1 decides once, on arrival."""
        del request, decode, estimate, slo


@dataclass(frozen=True, slots=True)
class AfterPrefill:
    """The baseline (arXiv §7.2): prefill what the prefill pool can take, and check the decode instance only then.

    The prefill of a request that is refused then is wasted.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"double_check"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full."""
        del view, estimate
        load = prefill_load(proposed, slo)
        return proposed if load < self.threshold else refuse(request, "prefill", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    """Refuse on arrival when the prefill or the decode pool is full at present (arXiv §7.2).

    The present load is outdated by the time the request decodes. Requests that are still in prefill do not count
    in the load of the decode pool, so the policy admits too many requests for one prefill time and too few for the
    next. The load oscillates (arXiv §7.3).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    with_coming: bool = False
    """Count requests that are placed but not yet prefilled as decoding. Not in the paper."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill or the decode pool is full."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        load = decode_pool_load(request, view, estimate, slo, with_coming=self.with_coming)
        return proposed if load < self.threshold else refuse(request, "decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)


def full_decode_s(
    estimate: Estimator, slo: SLO, *, input_tokens: float, output_tokens: float, capacity_tokens: float
) -> float:
    """t_d of a full decode instance: mean answer times the step at its limit, or with its memory full (B22).

    The prediction matters when the pool is full, and the steps of a full instance take as long as the limit on TBT
    allows. If the memory is full before, the step is that of the largest batch of mean requests that fits, each in
    the middle of its answer.

    Args:
        estimate: the Conductor's latency estimates.
        slo: the limits.
        input_tokens: mean prompt.
        output_tokens: mean answer.
        capacity_tokens: KVCache tokens that fit into the instance.
    """
    requests = max(1.0, capacity_tokens / (input_tokens + output_tokens / 2))
    return output_tokens * min(slo.tbt_s, estimate.decode_step_s(requests, capacity_tokens))


@dataclass(frozen=True, slots=True)
class PredictiveRejection:
    """Refuse on arrival when the decode pool will be full at the moment this request's prefill ends.

    Prediction at the level of the system (arXiv §7.4): all requests have one decode time t_d.
    The decode time depends on trace, model and hardware; `full_decode_s` estimates it.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    decode_s: float = 8.5
    """t_d: the decode time of every request (assumption B22)."""
    reserving: bool = False
    """Count every request that was placed earlier, including those that will join later. Not in the paper: there,
    a short prompt can take the place of a long one that was placed earlier, which is refused after its prefill."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full, or the decode pool will be."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        then_s = max(view.taken_at_s, request.arrival_s) + proposed.expected_ttft_s
        load = predicted_decode_load(
            request, view, then_s, self._still_there, estimate, slo, reserving=self.reserving
        )
        return proposed if load < self.threshold else refuse(request, "predicted decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)

    def _still_there(self, served: ServedView, now_s: float, then_s: float) -> float:
        del now_s
        return 1.0 if then_s - served.starts_s < self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class LengthPredicting:
    """Refuse on arrival when the decode pool is expected to be full at the moment this request's prefill ends.

    The arXiv report leaves prediction at the level of requests as future work (§7.4), because lengths are hard to
    predict. This policy does not predict a single length. It counts which share of the answers to prompts of
    similar length exceeds a number of tokens, and adds up these chances over requests.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests", "lengths"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    reserving: bool = False
    """Count every request that was placed earlier, including those that will join later. Not in the paper: there,
    a short prompt can take the place of a long one that was placed earlier, which is refused after its prefill."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full, or the decode pool is expected to be."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        step_s = _mean_step_s(view, estimate)

        def still_there(served: ServedView, now_s: float, then_s: float) -> float:
            produced = max(0.0, now_s - served.starts_s) / step_s
            return share_longer(
                view.lengths, served.input_tokens, beyond=(then_s - served.starts_s) / step_s, given=produced
            )

        then_s = max(view.taken_at_s, request.arrival_s) + proposed.expected_ttft_s
        load = predicted_decode_load(request, view, then_s, still_there, estimate, slo, reserving=self.reserving)
        return proposed if load < self.threshold else refuse(request, "expected decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)


def _mean_step_s(view: ClusterView, estimate: Estimator) -> float:
    """The present mean duration of a decode step, which converts seconds into tokens."""
    steps = [estimate.decode_step_s(each.present_requests, each.present_tokens) for each in view.decode]
    return sum(steps) / len(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveThreshold:
    """Early rejection whose threshold falls with the share of recent prefills that the double check refused.

    Not in the papers.
    The view contains the share, so the policy has no state of its own.
    """

    inner: EarlyRejection = field(default_factory=EarlyRejection)
    gain: float = 1.0
    """Load by which the threshold falls when all recent prefills were refused."""
    least: float = 0.5
    """The lowest threshold."""

    @property
    def needs(self) -> frozenset[str]:
        """The double checks whose results it reads, and what early rejection needs."""
        return needs_of(self.inner) | {"double_check"}

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The decision of early rejection at the present threshold."""
        now = replace(self.inner, threshold=self.threshold_in(view))
        return now.admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance; the threshold here does not adapt."""
        return self.inner.double_check(request, decode, estimate=estimate, slo=slo)

    def threshold_in(self, view: ClusterView) -> float:
        """Load at which this view is refused."""
        recent = view.recent
        refused = recent.refused / recent.received if recent.received else 0.0
        return max(self.least, self.inner.threshold - self.gain * refused)


WithThreshold = EarlyRejection | PredictiveRejection | LengthPredicting
"""A policy that refuses requests at or above a threshold of load."""


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """Another policy with one threshold per class; the load between two thresholds is kept for the higher class.

    As load rises, requests of low priority are refused first. Not in the papers.

    Raises:
        ValueError: when there is no class, or a higher class has a lower threshold.
    """

    inner: WithThreshold = field(default_factory=EarlyRejection)
    thresholds: Sequence[float] = (0.8, 1.0)
    """The thresholds of priorities 0, 1, and so on; higher priorities have the last one."""

    @property
    def needs(self) -> frozenset[str]:
        """Classes of requests, and what the inner policy needs."""
        return needs_of(self.inner) | {"priority"}

    def __post_init__(self) -> None:
        if not self.thresholds or list(self.thresholds) != sorted(self.thresholds):
            raise ValueError(f"thresholds are {self.thresholds!r}; at least one, rising with priority, is needed")

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The decision of the inner policy at the threshold of the request's class."""
        return self._of(request).admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """The double check of the inner policy at its own threshold, which is the same for every class."""
        return self.inner.double_check(request, decode, estimate=estimate, slo=slo)

    def _of(self, request: Request) -> WithThreshold:
        return replace(self.inner, threshold=self.thresholds[min(request.priority, len(self.thresholds) - 1)])


ADMISSION_POLICIES: Final[Mapping[str, Callable[[], AdmissionPolicy]]] = MappingProxyType(
    {
        "none": AdmitAll,
        "slo": WithinSLO,
        "after_prefill": AfterPrefill,
        "early": EarlyRejection,
        "committed": partial(EarlyRejection, with_coming=True),
        "predictive": PredictiveRejection,
        "length_predicting": LengthPredicting,
        "adaptive": AdaptiveThreshold,
        "priority": PriorityClasses,
    }
)
"""Every admission policy by the name the command line uses."""


def named_admission(name: str, *, decode_s: float) -> AdmissionPolicy:
    """The admission policy of a name with its defaults, and with the given decode time t_d (s) where it has one.

    Raises:
        KeyError: when there is no policy of that name.
    """
    return PredictiveRejection(decode_s=decode_s) if name == "predictive" else ADMISSION_POLICIES[name]()
