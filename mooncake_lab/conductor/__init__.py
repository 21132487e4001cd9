"""Who serves which request: views in, decisions out, nothing remembered in between (FAST'25 §4, arXiv §6-7)."""

from mooncake_lab.conductor.admission import ADMISSION_POLICIES, AdmissionPolicy, AdmitAll, WithinSLO
from mooncake_lab.conductor.decide import decide
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator, LatencyEstimator, NoisyEstimator
from mooncake_lab.conductor.placement import (
    PLACEMENT_POLICIES,
    CacheAware,
    KVCacheCentric,
    LoadBalance,
    LongestPrefix,
    PlacementPolicy,
    PrefixAffinity,
    Random,
)
from mooncake_lab.conductor.view import ClusterView, DecodeView, PrefillView

__all__ = [
    "ADMISSION_POLICIES",
    "PLACEMENT_POLICIES",
    "AdmissionPolicy",
    "AdmitAll",
    "CacheAware",
    "ClusterView",
    "Decision",
    "DecodeView",
    "Estimator",
    "KVCacheCentric",
    "LatencyEstimator",
    "LoadBalance",
    "LongestPrefix",
    "NoisyEstimator",
    "Placement",
    "PlacementPolicy",
    "PrefillView",
    "PrefixAffinity",
    "Random",
    "Rejection",
    "WithinSLO",
    "decide",
]
