"""Who serves which request: views in, decisions out, nothing remembered in between (FAST'25 §4, arXiv §6-7)."""

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
    named_admission,
)
from mooncake_lab.conductor.decide import decide
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import (
    Estimator,
    GroupEstimator,
    LatencyEstimator,
    NoisyEstimator,
)
from mooncake_lab.conductor.experience import Experience
from mooncake_lab.conductor.lengths import LengthBook, share_longer
from mooncake_lab.conductor.needs import NEEDS, Need, check_needs, needs_of
from mooncake_lab.conductor.placement import (
    PLACEMENT_POLICIES,
    CacheAware,
    KVCacheCentric,
    LoadBalance,
    LongestPrefix,
    PlacementPolicy,
    PrefixAffinity,
    Random,
    named_placement,
)
from mooncake_lab.conductor.regression import PolynomialEstimator
from mooncake_lab.conductor.view import ClusterView, DecodeView, PrefillView, RecentView, ServedView

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
    "Decision",
    "DecodeView",
    "EarlyRejection",
    "Estimator",
    "Experience",
    "GroupEstimator",
    "KVCacheCentric",
    "LatencyEstimator",
    "LengthBook",
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
    "ServedView",
    "WithinSLO",
    "check_needs",
    "decide",
    "named_admission",
    "named_placement",
    "needs_of",
    "share_longer",
]
