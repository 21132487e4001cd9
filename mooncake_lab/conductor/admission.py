"""Whether a request is served at all, given where it would go (Algorithm 1, the last test; arXiv §3, §7).

Load as arXiv §7.1 defines it is a predicted latency divided by its limit. The time of a decode step is linear in
requests and context, so the mean load over decode instances is that of the mean instance (assumption B24). Every
check counts the arriving request whole.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Final, TypeAlias

from mooncake_lab.conductor.decide import AdmissionPolicy, Decision, Need, Placement, Rejection, needs_of
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.history import share_longer
from mooncake_lab.conductor.view import ClusterView, DecodeView, ServedView
from mooncake_lab.core import SLO, Request, sum_in_order


@dataclass(frozen=True, slots=True)
class AdmitAll:
    """Serve everything."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The placement."""
        del request, view, estimate, slo
        return proposed

    def double_check(self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO) -> None:
        """No rejection."""
        del request, decode, estimate, slo


@dataclass(frozen=True, slots=True)
class WithinSLO(AdmitAll):
    """Serve what is expected to meet both limits (FAST'25 Algorithm 1, lines 18-19).

    No double check: Algorithm 1 decides once, on arrival.
    """

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection that names the limit and the estimate, if one is exceeded."""
        del view, estimate
        for name, expected_s, limit_s in (
            ("TTFT", proposed.expected_ttft_s, slo.ttft_s),
            ("TBT", proposed.expected_tbt_s, slo.tbt_s),
        ):
            if expected_s > limit_s:
                reason = f"expected {name} {expected_s:.3g} s exceeds {limit_s:g} s"
                return Rejection(request_id=request.id, stage="admission", reason=reason)
        return proposed


def load_with(request: Request, requests: float, tokens: float, *, estimate: Estimator, slo: SLO) -> float:
    """The load of a decode instance of so many requests and KVCache tokens if this request joined it."""
    return estimate.decode_step_s(requests + 1, tokens + request.input_tokens) / slo.tbt_s


@dataclass(frozen=True, slots=True)
class RejectByLoad:
    """What the policies of arXiv §7 have in common: each request that would fill a pool is refused.

    On arrival, a subclass may also look at the load of the decode pool: `decode_load`.
    """

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    arrival_threshold: float | None = field(default=None, kw_only=True)
    """Load at which a request is refused on arrival; None is `threshold`, which the second check uses."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full, or the decode pool at the moment that the policy looks at."""
        threshold = self.threshold_in(view)
        load, pool = proposed.expected_ttft_s / slo.ttft_s, "prefill"
        if load < threshold:
            load, pool = self.decode_load(request, proposed, view, estimate, slo)
        if load < threshold:
            return proposed
        reason = f"{pool} load {load:.3g} reaches {threshold:.3g}"
        return Rejection(request_id=request.id, stage="admission", reason=reason)

    def threshold_in(self, view: ClusterView) -> float:
        """Load at which a request is refused on arrival."""
        del view
        return self.threshold if self.arrival_threshold is None else self.arrival_threshold

    def decode_load(
        self, request: Request, proposed: Placement, view: ClusterView, estimate: Estimator, slo: SLO
    ) -> tuple[float, str]:
        """The load of the decode pool on arrival, and its name in a rejection; here it is ignored."""
        del request, proposed, view, estimate, slo
        return 0.0, "decode"

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance (arXiv §3, step 4)."""
        load = load_with(request, decode.present_requests, decode.present_tokens, estimate=estimate, slo=slo)
        if load < self.threshold:
            return None
        reason = f"load of {decode.name} {load:.3g} reaches {self.threshold:.3g}"
        return Rejection(request_id=request.id, stage="decode", reason=reason)


@dataclass(frozen=True, slots=True)
class AfterPrefill(RejectByLoad):
    """The baseline (arXiv §7.2): prefill what the prefill pool can take, and check the decode instance only then.

    The prefill of a request that is refused then is wasted.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"double_check"})


@dataclass(frozen=True, slots=True)
class EarlyRejection(RejectByLoad):
    """Refuse on arrival a request that would fill the prefill or the decode pool at present (arXiv §7.2).

    It asks the mean decode instance what the second check asks the chosen one: with one decode instance and no
    prefill time, both refuse the same requests. But the present load is outdated by the time the request decodes.
    Requests that are still in prefill do not count in the load of the decode pool, so the policy admits too many
    requests for one prefill time and too few for the next. The load oscillates (arXiv §7.3).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    with_coming: bool = False
    """Count requests that are placed but not yet prefilled as decoding. Not in the paper."""

    def decode_load(
        self, request: Request, proposed: Placement, view: ClusterView, estimate: Estimator, slo: SLO
    ) -> tuple[float, str]:
        """The load of the mean decode instance if this request decoded there now."""
        del proposed
        requests, tokens, instances = 0, 0, len(view.decode)
        for each in view.decode:
            requests += each.requests if self.with_coming else each.present_requests
            tokens += each.context_tokens if self.with_coming else each.present_tokens
        load = load_with(request, requests / instances, tokens / instances, estimate=estimate, slo=slo)
        return load, "decode"


StillDecodes: TypeAlias = Callable[[ServedView, float], float]
"""The chance from 0 to 1 that a request still decodes at a later moment."""


def mean_step_s(view: ClusterView, estimate: Estimator) -> float:
    """The present mean duration of a decode step, which converts seconds into tokens."""
    total_s = 0.0
    for each in view.decode:
        total_s += estimate.decode_step_s(each.present_requests, each.present_tokens)
    return total_s / len(view.decode)


@dataclass(frozen=True, slots=True)
class PredictedLoad(RejectByLoad):
    """Refuse on arrival a request that would fill the decode pool when its prefill ends (arXiv §7.4).

    A subclass states the chance that another request still decodes then. Tokens that will be generated by then are
    left out, because answers are short compared with prompts.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})
    load_name: ClassVar[str] = "predicted decode"
    """What a rejection calls the load."""

    def still_decodes(self, view: ClusterView, estimate: Estimator) -> StillDecodes:
        """What a subclass adds; here each request decodes for ever."""
        del view, estimate
        return lambda _served, _then_s: 1.0

    def decode_load(
        self, request: Request, proposed: Placement, view: ClusterView, estimate: Estimator, slo: SLO
    ) -> tuple[float, str]:
        """The load of the mean decode instance with this request then; others on their way are spread evenly."""
        chance = self.still_decodes(view, estimate)
        then_s = max(view.taken_at_s, request.arrival_s) + proposed.expected_ttft_s
        requests, tokens, instances = 0.0, 0.0, len(view.decode)
        for instance in view.decode:
            for served in (*instance.decoding, *instance.coming):
                if served.starts_s <= then_s:
                    share = chance(served, then_s)
                    requests += share
                    tokens += share * served.input_tokens
        load = load_with(request, requests / instances, tokens / instances, estimate=estimate, slo=slo)
        return load, self.load_name


@dataclass(frozen=True, slots=True)
class PredictiveRejection(PredictedLoad):
    """Prediction at the level of the system (arXiv §7.4): all requests have one decode time t_d.

    The decode time depends on trace, model and hardware; `full_decode_s` estimates it.
    """

    decode_s: float = 51.4
    """t_d: the decode time of every request (assumption B22), by default that of the tool&agent trace at 0.1 s."""

    def still_decodes(self, view: ClusterView, estimate: Estimator) -> StillDecodes:
        """1 until t_d is over, then 0."""
        del view, estimate
        return lambda served, then_s: 1.0 if then_s - served.starts_s < self.decode_s else 0.0


def length_biased_mean(values: Iterable[float], output_tokens: Sequence[float]) -> float:
    """The mean of a value over the requests that decode at a moment: each weighs as much as its answer is long.

    A request is present for as long as its answer takes, so long answers are more frequent among the requests that
    are present than among those that arrive. The length-biased mean answer is sum(o * o) / sum(o).
    """
    return sum_in_order(map(operator.mul, values, output_tokens)) / sum(output_tokens)


def full_decode_s(
    estimate: Estimator,
    slo: SLO,
    *,
    input_tokens: Sequence[float],
    output_tokens: Sequence[float],
    capacity_tokens: float,
) -> float:
    """t_d of a full decode instance: the length-biased mean answer times its step (assumption B22).

    The prediction matters when the pool is full, and the steps of a full instance take as long as the limit on TBT
    allows. If the memory is full before, the step is that of the largest batch that fits. Its requests have the
    mean lengths of those that decode at a moment, and are in the middle of their answers.

    Args:
        estimate: the Conductor's latency estimates.
        slo: the limits.
        input_tokens: the prompt of each request.
        output_tokens: the answer of each request.
        capacity_tokens: KVCache tokens that fit into the instance.
    """
    prompt, answer = (length_biased_mean(each, output_tokens) for each in (input_tokens, output_tokens))
    requests = max(1.0, capacity_tokens / (prompt + answer / 2))
    return answer * min(slo.tbt_s, estimate.decode_step_s(requests, capacity_tokens))


@dataclass(frozen=True, slots=True)
class LengthPredicting(PredictedLoad):
    """Prediction at the level of requests, which the arXiv report leaves as future work (§7.4).

    Lengths are hard to predict, so no single length is predicted: the policy counts which share of the answers to
    prompts of similar length exceeds a number of tokens, and adds up these chances over requests.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests", "lengths"})
    load_name: ClassVar[str] = "expected decode"

    def still_decodes(self, view: ClusterView, estimate: Estimator) -> StillDecodes:
        """The share of answers as long as this one is by now that are as long as it would be then."""
        step_s = mean_step_s(view, estimate)

        def chance(served: ServedView, then_s: float) -> float:
            produced = max(0.0, view.taken_at_s - served.starts_s) / step_s
            beyond = (then_s - served.starts_s) / step_s
            return share_longer(view.lengths, served.input_tokens, beyond=beyond, given=produced)

        return chance


@dataclass(frozen=True, slots=True)
class AdaptiveThreshold(EarlyRejection):
    """Early rejection whose threshold on arrival falls with the share of recent prefills that were refused.

    Not in the papers. The view contains the share that the second check refused, so the policy has no state of its
    own. The threshold of the second check stays.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests", "double_check"})

    gain: float = 1.0
    """Load by which the arrival threshold falls when all recent prefills were refused."""
    least: float = 0.5
    """How low it falls at most."""

    def threshold_in(self, view: ClusterView) -> float:
        """Load at which a request is refused on arrival."""
        recent = view.recent
        refused = recent.refused / recent.received if recent.received else 0.0
        highest = RejectByLoad.threshold_in(self, view)
        return max(min(self.least, highest), highest - self.gain * refused)


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """Another policy with one threshold per class; the load between two thresholds is kept for the higher class.

    As load rises, requests of low priority are refused first. Not in the papers.

    Raises:
        ValueError: when there is no class, or a higher class has a lower threshold.
    """

    inner: RejectByLoad = field(default_factory=EarlyRejection)
    thresholds: Sequence[float] = (0.8, 1.0)
    """The thresholds of priorities 0, 1, and so on, for both checks; higher priorities have the last one."""

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
        return self._of_class(request).admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """The second check of the inner policy at the threshold of the request's class."""
        return self._of_class(request).double_check(request, decode, estimate=estimate, slo=slo)

    def _of_class(self, request: Request) -> RejectByLoad:
        threshold = self.thresholds[min(request.priority, len(self.thresholds) - 1)]
        return replace(self.inner, threshold=threshold, arrival_threshold=None)


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
