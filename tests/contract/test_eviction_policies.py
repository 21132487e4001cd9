"""The contract of eviction policies, law by law, for every policy we ship."""

import pytest

from mooncake_lab.course.eviction import EVICTION_LAWS
from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.eviction import S3FIFO

FACTORIES = {**EVICTION_POLICIES, "s3fifo_fill_main_first": lambda blocks: S3FIFO(blocks, fill_main_first=True)}


@pytest.mark.parametrize("policy", FACTORIES)
@pytest.mark.parametrize("law", EVICTION_LAWS)
def test_a_policy_keeps_the_law(policy, law):
    """Every policy keeps every law of the contract."""
    EVICTION_LAWS[law](FACTORIES[policy])


@pytest.mark.parametrize("policy", [name for name in EVICTION_POLICIES if name != "belady"])
def test_a_policy_with_all_but_one_key_spared_always_ends(policy):
    """Whatever was touched before, the one key that may go is found, in bounded time."""
    for free in range(12):
        chosen = FACTORIES[policy](12)
        for key in range(12):
            chosen.insert(key, key)
        for key in [*range(12), *range(6), 3, 3, 3]:
            chosen.touch(key)
        assert chosen.victim(99, frozenset(range(12)) - {free}) == free
        assert len(chosen) == 11
