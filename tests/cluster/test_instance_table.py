"""All instances as the cluster knows them: which can serve, which are up, and what a fetch reads."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.cluster import SHARED_STORE, Attempt, InstanceTable, events
from mooncake_lab.conductor import History, Placement
from mooncake_lab.core import CacheChanged, Request

A = Attempt(0, 1)
REQUEST = Request(id=0, arrival_s=0.0, input_tokens=2000, block_keys=(1, 2, 3, 4))


def table(**roles):
    """A table of instances that are up, by name and role; a prefill instance keeps prefixes."""
    instances = InstanceTable(view_age_s=0.0)
    for name, role in roles.items():
        cache = name if role == "prefill" else None
        instances.add(events.InstanceUp(at_s=0.0, instance=name, role=role, capacity_tokens=10**6, cache=cache))
    return instances


def test_both_stages_have_to_be_up():
    """A prefill instance or a decode instance alone cannot serve; a coupled instance can."""
    assert not table().can_serve
    assert not table(p="prefill").can_serve
    assert not table(d="decode").can_serve
    assert table(p="prefill", d="decode").can_serve
    assert table(c="coupled").can_serve


def test_round_robin_goes_on_when_a_instance_is_replaced():
    """The new one is not given all that comes until it was assigned as much as the others."""
    instances = table(p0="prefill", p1="prefill", d="decode")
    for instance in instances.up[:2]:
        instance.prefill.assigned_requests = 1000
    instances.remove("p0")
    instances.add(events.InstanceUp(at_s=1.0, instance="p0", role="prefill", capacity_tokens=10**6, cache="p0"))
    view = instances.view(REQUEST, 1.0, History())
    assert [each.assigned_requests for each in view.prefill] == [1000, 1000]


@pytest.mark.parametrize("role", ["prefill", "coupled"])
def test_a_instance_without_a_cache_matches_nothing(role):
    """Whether other instances keep prefixes or none does."""
    instances = InstanceTable(view_age_s=0.0)
    for name, cache in (("a", None), ("b", None), ("c", "c")):
        instances.add(events.InstanceUp(at_s=0.0, instance=name, role=role, capacity_tokens=10**6, cache=cache))
        assert {one.matched_blocks for one in instances.view(REQUEST, 0.0, History()).prefill} == {0}
        assert instances.matched_blocks(name, REQUEST) == 0


@given(*[st.sets(st.sampled_from(REQUEST.block_keys))] * 3)
def test_what_the_pool_holds_counts_as_held_by_every_instance(here, there, pooled):
    """A prefill instance matches what it or the shared store holds; one that is down matches nothing."""
    instances = table(p="prefill", q="prefill", d="decode")
    for cache, held in (("p", here), (SHARED_STORE, pooled), ("q", there)):
        instances.cache_changed(CacheChanged(at_s=0.0, instance=cache, added=tuple(sorted(held)), removed=()))
    for one, held in zip(instances.view(REQUEST, 0.0, History()).prefill, (here, there), strict=True):
        leading = sum(1 for _ in takewhile((held | pooled).__contains__, REQUEST.block_keys))
        assert one.matched_blocks == instances.matched_blocks(one.name, REQUEST) == leading
    instances.remove("q")
    assert instances.matched_blocks("q", REQUEST) == instances.matched_blocks("d", REQUEST) == 0


@pytest.mark.parametrize(("on_ssd", "reads"), [(1, False), (2, True), (3, True), (4, False)])
def test_only_the_blocks_that_are_copied_are_read(on_ssd, reads):
    """Of three reused blocks the first is there: the holder reads if the second or the third is on its SSD."""
    instances = table(p="prefill", q="prefill", d="decode")
    keys = REQUEST.block_keys
    instances.cache_changed(CacheChanged(at_s=0.0, instance="q", added=keys, removed=(), demoted=(on_ssd,)))
    placement = Placement(
        request_id=0, prefill="p", decode="d", reused_tokens=1500, fetched_tokens=900, fetch_from="q",
        expected_ttft_s=0.0, expected_tbt_s=0.0, reason="",
    )  # fmt: skip
    instances.begin_fetch(A, REQUEST, placement)
    holder = instances.by_name["q"]
    assert (holder.prefill.reading, holder.prefill.sending) == (({A: "p"}, {}) if reads else ({}, {A: "p"}))


@given(st.floats(0.01, 3), st.lists(st.floats(0, 2), min_size=1, max_size=8))
def test_loads_in_a_view_are_as_old_as_is_allowed_and_matches_are_of_now(age_s, pauses_s):
    """A view is taken anew when it became too old, or an instance failed; one without a cache matches nothing."""
    instances = InstanceTable(age_s)
    for name, cache in (("p", "p"), ("q", None)):
        instances.add(
            events.InstanceUp(at_s=0.0, instance=name, role="prefill", capacity_tokens=10**6, cache=cache)
        )
    now_s, taken_s, queued, seen = 0.0, None, 0, 0
    for i, pause_s in enumerate(pauses_s):
        instances.by_name["p"].prefill.add(Attempt(i, 1), 1.0)
        queued, now_s = queued + 1, now_s + pause_s
        if i < 4:
            instances.cache_changed(
                CacheChanged(at_s=now_s, instance="p", added=REQUEST.block_keys[i : i + 1], removed=())
            )
        if taken_s is None or now_s - taken_s > age_s:
            taken_s, seen = now_s, queued
        view = instances.view(REQUEST, now_s, History())
        assert (view.taken_at_s, view.prefill[0].queued_requests) == (taken_s, seen)
        assert [one.matched_blocks for one in view.prefill] == [min(i + 1, 4), 0]
    instances.remove("p")
    assert [one.name for one in instances.view(REQUEST, now_s, History()).prefill] == ["q"]


@pytest.mark.parametrize(
    ("changes", "logged"),
    [
        ({"added": (1,)}, True),
        ({"removed": (1,)}, True),
        ({"added": (2,), "removed": (1,)}, True),
        ({"demoted": (1,)}, False),
        ({"promoted": (1,)}, False),
        ({}, False),
    ],
)
def test_a_change_is_logged_if_blocks_came_or_left(changes, logged):
    """Moves between the tiers of a cache are not logged, nor is anything in GPU memory or in an unknown cache."""
    instances = table(p="prefill")
    instances.add(events.InstanceUp(at_s=0.0, instance="c", role="coupled", capacity_tokens=10**6, cache="c"))
    changes = {"added": (), "removed": ()} | changes
    for cache, expected in (("p", logged), ("c", False), ("nobody", False)):
        assert instances.cache_changed(CacheChanged(at_s=0.0, instance=cache, **changes)) is expected
