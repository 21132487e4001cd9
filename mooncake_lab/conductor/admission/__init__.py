"""Whether a request is served at all, given where it would go (Algorithm 1, the last test; arXiv §7)."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from mooncake_lab.conductor.admission.adaptive import AdaptiveThreshold
from mooncake_lab.conductor.admission.after_prefill import AfterPrefill
from mooncake_lab.conductor.admission.early import EarlyRejection
from mooncake_lab.conductor.admission.length_predicting import LengthPredicting
from mooncake_lab.conductor.admission.load import (
    decode_load,
    decode_pool_load,
    prefill_load,
    refuse,
    refuse_at_decode,
)
from mooncake_lab.conductor.admission.load_prediction import StillThere, predicted_decode_load
from mooncake_lab.conductor.admission.predictive import PredictiveRejection, full_decode_s
from mooncake_lab.conductor.admission.priority import PriorityClasses
from mooncake_lab.conductor.admission.protocol import AdmissionPolicy
from mooncake_lab.conductor.admission.simple import AdmitAll, WithinSLO

__all__ = [
    "ADMISSION_POLICIES",
    "AdaptiveThreshold",
    "AdmissionPolicy",
    "AdmitAll",
    "AfterPrefill",
    "EarlyRejection",
    "LengthPredicting",
    "PredictiveRejection",
    "PriorityClasses",
    "StillThere",
    "WithinSLO",
    "decode_load",
    "decode_pool_load",
    "full_decode_s",
    "named_admission",
    "predicted_decode_load",
    "prefill_load",
    "refuse",
    "refuse_at_decode",
]

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
