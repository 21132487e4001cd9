"""What a policy needs from the cluster that runs it: declared by the policy, compared when a spec is built.

A policy declares its needs in an attribute `needs`, a set of the names below, as a class variable or as a
property where they depend on its parameters. A policy without the attribute needs nothing special.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Need: TypeAlias = Literal[
    "decode_requests",
    "lengths",
    "double_check",
    "remote_prefixes",
    "local_prefixes",
    "coupled_instances",
    "priority",
]
"""Information or ability that a cluster may or may not provide."""

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
