"""Checks the contract of an admission policy, ours or a student's, and computes its goodput."""

import dataclasses
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import (
    AdmissionPolicy,
    AfterPrefill,
    CacheAware,
    ClusterView,
    DecodeView,
    EarlyRejection,
    Estimator,
    Placement,
    PrefillView,
    Rejection,
    ServedView,
    decide,
)
from mooncake_lab.core import SLO, Request, TracedRequest, blocks_for
from mooncake_lab.course import PolicyFindings, contract, examine, require
from mooncake_lab.course.round_estimates import RoundEstimator
from mooncake_lab.metrics import effective, request_table
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation import Cluster

if TYPE_CHECKING:
    import pandas as pd

CROWD_SEED: Final = 20_240_709
"""The default seed of the crowd. Grading draws its own crowd with the teacher's seed."""
_LIMITS: Final = SLO(ttft_s=10.0, tbt_s=0.04)
"""Limits for the views made by hand."""
_CROWD_LIMITS: Final = SLO(ttft_s=25.0, tbt_s=0.05)
_CROWD_REQUESTS: Final = 2000
_CALM_REQUESTS: Final = 400


def crowd(seed: int | random.Random) -> list[TracedRequest]:
    """More than one decode node can serve, and nearly more than three can prefill.

    Prompts have 1,000 to 16,000 tokens, answers 200 to 800, and every other hundred requests comes twice as fast.
    Decode is the bottleneck: a request that is rejected after its prefill took prefill time from another request
    that could have been served. The seed may be the draws themselves.
    """
    draw = seed if isinstance(seed, random.Random) else random.Random(seed)  # noqa: S311  # a workload
    found: list[TracedRequest] = []
    at_s = 0.0
    for i in range(_CROWD_REQUESTS):
        at_s += (0.14 if (i // 100) % 2 else 0.32) * 2 * draw.random()
        tokens = int(1000 * 16 ** draw.random())
        keys = tuple(range(100 * i, 100 * i + blocks_for(tokens, 512)))
        request = Request(id=i, arrival_s=at_s, input_tokens=tokens, block_keys=keys)
        found.append(TracedRequest(request, int(200 * 4 ** draw.random())))
    return found


def calm(seed: int | random.Random) -> list[TracedRequest]:
    """Requests of the same kind as in a crowd, but so few that the cluster can serve all of them in time."""
    draw = seed if isinstance(seed, random.Random) else random.Random(seed)  # noqa: S311  # a workload
    at_s = 0.0
    found: list[TracedRequest] = []
    for traced in crowd(draw)[:_CALM_REQUESTS]:
        at_s += 1.0 + draw.random()
        request = dataclasses.replace(traced.request, arrival_s=at_s)
        found.append(dataclasses.replace(traced, request=request))
    return found


def goodput(policy: AdmissionPolicy, model: LatencyModel, *, seed: int | random.Random = CROWD_SEED) -> float:
    """The share of a crowd that finishes within both limits on three prefill nodes and one decode node."""
    return float(effective(_served(policy, model, crowd(seed)), _CROWD_LIMITS).mean())


def calm_goodput(policy: AdmissionPolicy, model: LatencyModel, *, seed: int | random.Random = CROWD_SEED) -> float:
    """The same of a calm stretch. A policy that rejects without looking at the load loses here."""
    return float(effective(_served(policy, model, calm(seed)), _CROWD_LIMITS).mean())


def calm_rejected_share(
    policy: AdmissionPolicy, model: LatencyModel, *, seed: int | random.Random = CROWD_SEED
) -> float:
    """The share of a calm stretch that a policy rejects, on arrival or later."""
    ends = _served(policy, model, calm(seed))["end"].to_list()
    return ends.count("rejected") / len(ends)


def _served(policy: AdmissionPolicy, model: LatencyModel, requests: list[TracedRequest]) -> "pd.DataFrame":
    spec = ClusterSpec.disaggregated(
        prefill_nodes=3, decode_nodes=1, placement=CacheAware(), admission=policy, slo=_CROWD_LIMITS
    )
    return request_table(Cluster(spec, model).run(requests))


def answers_about_this_request(policy: AdmissionPolicy) -> None:
    """It returns the placement it was given, unchanged, or a rejection of the same request with a reason."""
    for request, view in _cases():
        decision = _decide(policy, request, view)
        if isinstance(decision, Rejection):
            require(
                decision.request_id == request.id,
                f"request {request.id} arrived, but request {decision.request_id} was refused",
            )
            require(bool(decision.reason), f"request {request.id} was refused without a reason")
        else:
            proposed = CacheAware().place(request, view, RoundEstimator())
            require(decision == proposed, f"the placement of request {request.id} was changed")


def decisions_replay(policy: AdmissionPolicy) -> None:
    """The same request and view get the same decision, also after others were asked about."""
    first = [_decide(policy, request, view) for request, view in _cases()]
    second = [_decide(policy, request, view) for request, view in reversed(_cases())]
    require(first == second[::-1], "the same requests and views got different decisions the second time")


def holds_no_state(policy: AdmissionPolicy) -> None:
    """It is a frozen dataclass of knobs."""
    require(dataclasses.is_dataclass(policy), f"{type(policy).__name__} is not a dataclass")
    parameters = getattr(type(policy), "__dataclass_params__", None)
    require(bool(parameters and parameters.frozen), f"{type(policy).__name__} is not frozen")


def serves_an_idle_cluster(policy: AdmissionPolicy) -> None:
    """An idle cluster refuses no request."""
    request, view = _cases()[0]
    decision = _decide(policy, request, view)
    require(isinstance(decision, Placement), f"an idle cluster refused a request: {decision}")


def checks_twice(policy: AdmissionPolicy) -> None:
    """The decode instance's answer is a rejection at stage `decode`, or None."""
    for request, view in _cases():
        answer = policy.double_check(request, view.decode[0], estimate=RoundEstimator(), slo=_LIMITS)
        fine = answer is None or (answer.request_id == request.id and answer.stage == "decode")
        require(fine, f"double_check returned {answer!r} for request {request.id}")


ADMISSION_LAWS: Final = contract(
    answers_about_this_request, decisions_replay, holds_no_state, serves_an_idle_cluster, checks_twice
)
"""The contract of `AdmissionPolicy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionReport(PolicyFindings):
    """What `check_admission` found."""

    goodput: float | None
    """On the crowd of the seed; `None` when the policy could not be run."""
    baseline_goodput: float
    early_goodput: float
    coming_goodput: float
    """Goodput of early rejection that counts the requests on their way to decode."""
    calm_rejected_share: float | None
    """The share of a calm stretch that the policy rejects; `None` when it could not be run."""

    def __str__(self) -> str:
        ours = "none" if self.goodput is None else f"{self.goodput:.3f}"
        calm = "none" if self.calm_rejected_share is None else f"{self.calm_rejected_share:.1%}"
        return self.told(
            ADMISSION_LAWS,
            f"requests rejected in a calm stretch: {calm}\ngoodput in a crowd {ours}; rejecting after prefill has"
            f" {self.baseline_goodput:.3f},"
            f" early rejection {self.early_goodput:.3f}, counting prefills {self.coming_goodput:.3f}",
        )


def check_admission(policy: AdmissionPolicy, model: LatencyModel, *, seed: int = CROWD_SEED) -> AdmissionReport:
    """Run a policy through the contract, and compare its goodput on a crowd with that of three of our policies."""
    blamed = "answers about this request"
    broken, served = examine(ADMISSION_LAWS, policy, lambda: goodput(policy, model, seed=seed), blamed)
    _, calm_share = examine({}, policy, lambda: calm_rejected_share(policy, model, seed=seed), blamed)
    return AdmissionReport(
        broken=broken,
        goodput=served,
        calm_rejected_share=calm_share,
        baseline_goodput=goodput(AfterPrefill(), model, seed=seed),
        early_goodput=goodput(EarlyRejection(), model, seed=seed),
        coming_goodput=goodput(EarlyRejection(with_coming=True), model, seed=seed),
    )


_CASES: Final = 64
"""So many that a policy that counts, and rejects each fiftieth request, is noticed."""


def _cases() -> list[tuple[Request, ClusterView]]:
    """An idle cluster, and some that are fuller and fuller; then the same again for other requests."""
    cases: list[tuple[Request, ClusterView]] = []
    for i in range(_CASES):
        full, at_s = i % 8, 10.0 * i
        request = Request(id=i, arrival_s=at_s, input_tokens=500, block_keys=(i,))
        decoding = tuple(ServedView(100 + k, 900, at_s - k) for k in range(4 * full))
        coming = tuple(ServedView(200 + k, 900, at_s + k) for k in range(2 * full))
        tokens = 900 * len((*decoding, *coming))
        decode = DecodeView("decode-0", len(decoding) + len(coming), tokens, 10**6, decoding, coming)
        cases.append(
            (request, ClusterView(at_s, (PrefillView("prefill-0", 2.0 * full, full, full, 0),), (decode,)))
        )
    return cases


def _decide(policy: AdmissionPolicy, request: Request, view: ClusterView) -> Placement | Rejection:
    estimate: Estimator = RoundEstimator()
    return decide(request, view, placement=CacheAware(), admission=policy, estimate=estimate, slo=_LIMITS)
