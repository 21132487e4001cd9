"""The decision of the Conductor: its types, the policies that make it, and `decide`, which both runtimes call."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Final, Literal, Protocol, TypeAlias

from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Serve this request here."""

    request_id: int
    prefill: str
    """Name of the prefill instance."""
    decode: str
    """Name of the decode instance."""
    reused_tokens: int
    """Prefix tokens that need no computation, fetched ones included."""
    fetch_from: str | None = None
    """The prefill instance to copy missing prefix blocks from; the copy stays (hot-block replication)."""
    fetched_tokens: int = 0
    """Prefix tokens to copy from there."""
    ssd_tokens: int = 0
    """Prefix tokens to read from the SSD of the prefill instance."""
    expected_ttft_s: float
    """The Conductor's estimate of the time to first token (s)."""
    expected_tbt_s: float
    """Its estimate of the time between tokens on the decode instance (s); infinite if the KVCache does not fit."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Do not serve this request (HTTP 429)."""

    request_id: int
    stage: str
    """Where it was refused, as in `Rejected`: here `capacity`, `admission`, `decode` or `failed`."""
    reason: str


Decision: TypeAlias = Placement | Rejection


class PlacementPolicy(Protocol):
    """Chooses instances for a request; the admission policy decides whether it is served.

    A policy that needs more than loads declares it in an attribute `needs`, a set of `Need`.
    """

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """Where to prefill and to decode, what to reuse and what to fetch."""
        ...


class AdmissionPolicy(Protocol):
    """Accepts a proposed placement or rejects it with a reason, and lets the decode instance refuse later.

    A policy that needs more than loads declares it in an attribute `needs`, a set of `Need`.
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
class Decided:
    """A decision and what it rests on: `decide` gives it again."""

    request: Request
    view: ClusterView
    decision: Decision
    is_first: bool
    """Whether admission was asked: a request that was accepted once is accepted."""


def decide(
    request: Request,
    view: ClusterView,
    *,
    placement: PlacementPolicy,
    admission: AdmissionPolicy,
    estimate: Estimator,
    slo: SLO,
) -> Decision:
    """Place a request, then ask whether to admit it there (FAST'25 Algorithm 1).

    The same request, view and policies give the same decision, also when a log is replayed. A prompt whose KVCache
    fits on no decode instance is rejected before the policies are asked, because it can never be decoded.

    Raises:
        ValueError: when the view has no prefill or no decode instance.
    """
    if not view.prefill or not view.decode:
        raise ValueError(
            f"request {request.id} cannot be placed: the view has {len(view.prefill)} prefill and"
            f" {len(view.decode)} decode instances; at least one of each is needed"
        )
    most = max([instance.capacity_tokens for instance in view.decode])
    if request.input_tokens > most:
        reason = f"a prompt of {request.input_tokens} tokens; no decode instance holds more than {most}"
        return Rejection(request_id=request.id, stage="capacity", reason=reason)
    proposed = placement.place(request, view, estimate)
    return admission.admit(request, proposed, view, estimate=estimate, slo=slo)


def mistake_in(decision: object, request: Request, view: ClusterView) -> str:
    """Why nobody can carry out the decision of a user's policy; empty where it can be carried out.

    The text goes on after "the policy", and names the one field that is wrong.
    """
    if isinstance(decision, Placement):
        return (
            _wrong_instance(decision, view)
            or _wrong_tokens(decision, request, view)
            or _wrong_value(decision, {"expected_ttft_s": Real, "expected_tbt_s": Real, "reason": str})
        )
    if isinstance(decision, Rejection):
        return _wrong_value(decision, {"stage": str, "reason": str})
    return f"returns {decision!r}; allowed are a Placement and a Rejection"


def mistake_in_check(refusal: object) -> str:
    """What is wrong with the result of a user's `double_check`, as in `mistake_in`; empty where nothing is."""
    if refusal is None:
        return ""
    if isinstance(refusal, Rejection):
        return _wrong_value(refusal, {"stage": str, "reason": str})
    return f"returns {refusal!r} for the double check; allowed are None and a Rejection"


def _wrong_instance(placement: Placement, view: ClusterView) -> str:
    """Check the names of instances. A coupled instance decodes what it prefills, and fetches nothing."""
    prefill, decode = ([one.name for one in instances] for instances in (view.prefill, view.decode))
    coupled = placement.prefill in decode
    others = [name for name in prefill if name != placement.prefill]
    for field, allowed in (
        ("prefill", prefill),
        ("decode", [placement.decode] if coupled else decode),
        ("fetch_from", [None] if coupled else [None, *others]),
    ):
        name = getattr(placement, field)
        if name not in allowed:
            return f"sets {field} to {name!r}; allowed are {', '.join(map(str, allowed))}"
    return ""


def _wrong_tokens(placement: Placement, request: Request, view: ClusterView) -> str:
    """Check the counts of tokens: what is fetched or on an SSD is a part of what is reused."""
    for field, most in (
        ("reused_tokens", request.input_tokens),
        ("fetched_tokens", placement.reused_tokens),
        ("ssd_tokens", placement.reused_tokens),
    ):
        tokens = getattr(placement, field)
        if type(tokens) is not int or not 0 <= tokens <= most:
            return f"sets {field} to {tokens!r}; allowed are Python ints from 0 to {most}"
    if placement.ssd_tokens and not any(one.matched_on_ssd for one in view.prefill):
        return f"sets ssd_tokens to {placement.ssd_tokens}; no worker has blocks of this prompt on an SSD"
    return ""


def _wrong_value(decision: Decision, types: Mapping[str, type]) -> str:
    """Check the types of fields; a number that is not a number is none."""
    for field, expected in types.items():
        value = getattr(decision, field)
        if not isinstance(value, expected) or value != value:  # noqa: PLR0124  # NaN
            return f"sets {field} to {value!r}; allowed is a {'number' if expected is Real else 'str'}"
    return ""


def select_decode(
    request: Request, decode: tuple[DecodeView, ...], estimate: Estimator
) -> tuple[DecodeView, float]:
    """The decode instance with the smallest predicted TBT, and that TBT (s).

    Instances without room for the request's KVCache come last, and their TBT is infinite. Neither paper specifies
    SelectDecodingInstance beyond load balancing (assumption B05).
    """
    best, best_tbt_s = decode[0], math.inf
    for instance in decode:
        context = instance.context_tokens + request.input_tokens
        if context > instance.capacity_tokens:
            continue
        tbt_s = estimate.decode_step_s(instance.requests + 1, context)
        if tbt_s < best_tbt_s:
            best, best_tbt_s = instance, tbt_s
    if math.isinf(best_tbt_s):
        best = min(decode, key=lambda instance: instance.context_tokens)
    return best, best_tbt_s


Need: TypeAlias = Literal[
    "decode_requests",
    "lengths",
    "double_check",
    "remote_prefixes",
    "local_prefixes",
    "coupled_instances",
    "priority",
]
"""Information or ability that a cluster may or may not provide, and that a policy declares to need."""

NEEDS: Final[Mapping[Need, str]] = MappingProxyType(
    {
        "decode_requests": "the requests that decode on each instance and those on their way (DecodeView)",
        "lengths": "the lengths of finished answers (ClusterView.lengths)",
        "double_check": "a second check when prefill is done and KVCache reaches a separate decode instance",
        "remote_prefixes": "a store from which an instance fetches prefixes that another one holds",
        "local_prefixes": "instances that keep prefixes (PrefillView.matched_blocks)",
        "coupled_instances": "instances that do both stages: prefill and decode views are of the same ones",
        "priority": "requests that carry a priority (Request.priority)",
    }
)
"""Each need in words, for messages."""


def needs_of(policy: object) -> frozenset[str]:
    """What a placement or admission policy declares; nothing where it declares nothing."""
    return frozenset(getattr(policy, "needs", ()))


def check_needs(owner: str, gives: Collection[str], **policies: object) -> None:
    """Refuse a policy that needs what its cluster does not provide, because it would decide on empty fields.

    Args:
        owner: the spec, for the message, such as `ClusterSpec`.
        gives: what the clusters of this spec give.
        **policies: each policy by the name of its field.

    Raises:
        ValueError: naming field, policy and what is missing; or a declared need that does not exist.
    """
    for field, policy in policies.items():
        needs = needs_of(policy)
        if unknown := sorted(needs - NEEDS.keys()):
            raise ValueError(f"{policy} declares the need {unknown[0]!r}; allowed are {', '.join(NEEDS)}")
        missing = [f"{name}: {what}" for name, what in NEEDS.items() if name in needs and name not in gives]
        if missing:
            what = " and ".join(missing)
            raise ValueError(f"{owner}.{field} is {policy}, which needs what this cluster does not give ({what})")
