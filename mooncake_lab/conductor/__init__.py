"""Which instances serve a request: pure functions from views to decisions (FAST'25 §4, arXiv §6-7)."""

from typing import TYPE_CHECKING

from mooncake_lab.conductor.admission import (
    ADMISSION_POLICIES,
    AdaptiveThreshold,
    AdmissionPolicy,
    AdmitAll,
    AfterPrefill,
    EarlyRejection,
    LengthPredicting,
    PredictiveRejection,
    PriorityClasses,
    WithinSLO,
    full_decode_s,
    named_admission,
)
from mooncake_lab.conductor.decide import Decided, decide
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import (
    Estimator,
    GroupEstimator,
    LatencyEstimator,
    NoisyEstimator,
)
from mooncake_lab.conductor.history import History
from mooncake_lab.conductor.lengths import LengthHistogram, share_longer
from mooncake_lab.conductor.needs import NEEDS, Need, check_needs, needs_of
from mooncake_lab.conductor.placement import (
    PLACEMENT_POLICIES,
    CacheAware,
    FewestRequests,
    KVCacheCentric,
    LoadBalance,
    LongestPrefix,
    PlacementPolicy,
    PrefixAffinity,
    Random,
    RoundRobin,
    named_placement,
)
from mooncake_lab.conductor.view import ClusterView, DecodeView, PrefillView, RecentView, ServedView
from mooncake_lab.core.lazy import lazy_names

if TYPE_CHECKING:
    from mooncake_lab.conductor.regression import PolynomialEstimator

__all__ = [
    "ADMISSION_POLICIES",
    "NEEDS",
    "PLACEMENT_POLICIES",
    "AdaptiveThreshold",
    "AdmissionPolicy",
    "AdmitAll",
    "AfterPrefill",
    "CacheAware",
    "ClusterView",
    "Decided",
    "Decision",
    "DecodeView",
    "EarlyRejection",
    "Estimator",
    "FewestRequests",
    "GroupEstimator",
    "History",
    "KVCacheCentric",
    "LatencyEstimator",
    "LengthHistogram",
    "LengthPredicting",
    "LoadBalance",
    "LongestPrefix",
    "Need",
    "NoisyEstimator",
    "Placement",
    "PlacementPolicy",
    "PolynomialEstimator",
    "PredictiveRejection",
    "PrefillView",
    "PrefixAffinity",
    "PriorityClasses",
    "Random",
    "RecentView",
    "Rejection",
    "RoundRobin",
    "ServedView",
    "WithinSLO",
    "check_needs",
    "decide",
    "full_decode_s",
    "named_admission",
    "named_placement",
    "needs_of",
    "share_longer",
]

__getattr__ = lazy_names(
    __name__,
    {
        "regression": ("PolynomialEstimator",),
    },
)
