"""Policies declare what they need, and specs refuse what they cannot serve."""

import math

import pytest

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import (
    ADMISSION_POLICIES,
    NEEDS,
    PLACEMENT_POLICIES,
    AdaptiveThreshold,
    AfterPrefill,
    KVCacheCentric,
    LengthPredicting,
    LongestPrefix,
    PriorityClasses,
    check_needs,
    needs_of,
)
from mooncake_lab.conductor.placement import FewestRequests


def test_every_declared_need_exists():
    """What the policies of the package need is in the list of needs."""
    for make in (*ADMISSION_POLICIES.values(), *PLACEMENT_POLICIES.values(), FewestRequests):
        assert needs_of(make()) <= NEEDS.keys()


def test_a_policy_around_another_needs_what_the_other_needs():
    """Needs follow the parameters of a policy."""
    assert needs_of(PriorityClasses(LengthPredicting())) == {"priority", "decode_requests", "lengths"}
    assert needs_of(AdaptiveThreshold()) == {"double_check", "decode_requests"}
    assert needs_of(KVCacheCentric(math.inf)) == frozenset()
    assert needs_of(object()) == frozenset()


@pytest.mark.parametrize("admission", [AfterPrefill(), AdaptiveThreshold()])
def test_coupled_instances_refuse_policies_of_the_double_check(admission):
    """Coupled instances have no second check, so policies that rely on it are refused when the spec is built."""
    with pytest.raises(ValueError, match=r"ClusterSpec\.admission is .* \(double_check: a second check"):
        ClusterSpec.coupled(admission=admission)


def test_each_need_is_checked_where_it_is_missing():
    """Prefixes need a cache, and counting requests of both stages needs coupled instances."""
    with pytest.raises(ValueError, match=r"ClusterSpec\.placement is LongestPrefix\(\).*local_prefixes"):
        ClusterSpec.coupled(placement=LongestPrefix())
    assert ClusterSpec.coupled(placement=LongestPrefix(), prefix_caching=True).pools[0].prefix_caching
    with pytest.raises(ValueError, match=r"ClusterSpec\.placement is FewestRequests\(\).*coupled_instances"):
        ClusterSpec.disaggregated(placement=FewestRequests())


def test_an_unknown_need_is_refused():
    """A policy that declares a need that does not exist is a mistake of its author."""

    class Mistaken:
        needs = frozenset({"weather"})

    with pytest.raises(ValueError, match="declares the need 'weather'; allowed are decode_requests, "):
        check_needs("Spec", NEEDS, admission=Mistaken())
