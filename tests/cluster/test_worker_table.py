"""All workers as the cluster knows them: which can serve, which are up, and what a fetch reads."""

import pytest

from mooncake_lab.cluster import Attempt, TierChanged, WorkerTable, WorkerUp
from mooncake_lab.conductor import Placement
from mooncake_lab.core import CacheChanged, Request

A = Attempt(0, 1)
REQUEST = Request(id=0, arrival_s=0.0, input_tokens=2000, block_keys=(1, 2, 3, 4))


def table(**roles):
    """A table of workers that are up, by name and role; a prefill worker keeps prefixes."""
    workers = WorkerTable()
    for name, role in roles.items():
        cache = name if role == "prefill" else None
        workers.add(WorkerUp(at_s=0.0, worker=name, role=role, capacity_tokens=10**6, cache=cache))
    return workers


def test_both_stages_have_to_be_up():
    """A prefill worker or a decode worker alone cannot serve; a coupled worker can."""
    assert not table().can_serve
    assert not table(p="prefill").can_serve
    assert not table(d="decode").can_serve
    assert table(p="prefill", d="decode").can_serve
    assert table(c="coupled").can_serve


@pytest.mark.parametrize(("on_ssd", "reads"), [(1, False), (2, True), (3, True), (4, False)])
def test_only_the_blocks_that_are_copied_are_read(on_ssd, reads):
    """Of three reused blocks the first is there: the holder reads if the second or the third is on its SSD."""
    workers = table(p="prefill", q="prefill", d="decode")
    workers.cache_changed(CacheChanged(at_s=0.0, instance="q", added=REQUEST.block_keys))
    workers.tier_changed(TierChanged(at_s=0.0, cache="q", demoted=(on_ssd,)))
    placement = Placement(
        request_id=0, prefill="p", decode="d", reused_tokens=1500, fetched_tokens=900, fetch_from="q",
        expected_ttft_s=0.0, expected_tbt_s=0.0, reason="",
    )  # fmt: skip
    workers.begin_fetch(A, REQUEST, placement)
    holder = workers["q"]
    assert (holder.reading, holder.sending) == (({A: "p"}, {}) if reads else ({}, {A: "p"}))
