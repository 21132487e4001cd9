"""Whether a request is served at all, given where it would go (Algorithm 1, the last test; arXiv §7)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.view import ClusterView
from mooncake_lab.core import SLO


class AdmissionPolicy(Protocol):
    """Lets a proposed placement pass, or rejects it with a reason."""

    def admit(self, proposed: Placement, view: ClusterView, slo: SLO) -> Decision:
        """The placement itself, or a rejection."""
        ...


@dataclass(frozen=True, slots=True)
class AdmitAll:
    """Serve everything."""

    def admit(self, proposed: Placement, view: ClusterView, slo: SLO) -> Decision:
        """The placement."""
        del view, slo
        return proposed


@dataclass(frozen=True, slots=True)
class WithinSLO:
    """Serve what is expected to meet both limits (FAST'25 Algorithm 1, lines 18-19)."""

    def admit(self, proposed: Placement, view: ClusterView, slo: SLO) -> Decision:
        """A rejection that names the limit and the estimate, if one is exceeded."""
        del view
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


ADMISSION_POLICIES: Final[Mapping[str, Callable[[], AdmissionPolicy]]] = MappingProxyType(
    {"none": AdmitAll, "slo": WithinSLO}
)
"""Every admission policy by the name the command line uses."""
