"""What a coordinator is told about the cluster that it coordinates."""

from dataclasses import dataclass, field
from typing import Literal

from mooncake_lab.conductor import AdmissionPolicy, AdmitAll, PlacementPolicy
from mooncake_lab.core import SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """The policies of a cluster, and the rules by which requests go through it."""

    placement: PlacementPolicy
    """Where requests go."""
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    """Which of them are served."""
    slo: SLO = field(default_factory=SLO)
    schedule_s: float = 0.0
    """From a request's arrival to its decision."""
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Which stage shows the first token."""
    wait_for_workers: bool = False
    """Whether a request that finds no worker waits for one; else it is rejected."""
    max_inflight_requests: int | None = None
    """One more is rejected; None is no limit."""
    max_attempts: int | None = None
    """How often a request is placed; None is no limit."""
    reject_policy_errors: bool = False
    """Whether a policy that raises, or that names an unknown worker, costs only the request that it decides on."""
