"""The recorded replays of whole traces: which there are, and what they say by the rule."""

import dataclasses

import pytest

from mooncake_lab.book.chapters.overload import recorded, replays
from mooncake_lab.book.chapters.overload.replays import judged_order
from mooncake_lab.book.paper import claim


@pytest.fixture(scope="module")
def table():
    """All recorded replays."""
    return recorded.recorded()


def test_the_rule_needs_both_limits():
    """Both limits: reproduced; one, or cells in the region: conditional; neither: not reproduced."""
    below, above = (0.93, 0.9), (0.93, 1.02)
    assert judged_order({15: below, 30: below}, region_has_it=False) == "reproduced"
    assert judged_order({15: below, 30: above}, region_has_it=False) == "conditional"
    assert judged_order({15: above, 30: above}, region_has_it=True) == "conditional"
    assert judged_order({15: above, 30: above}, region_has_it=False) == "not reproduced"


def test_four_points_have_seven_twins_under_four_policies(table):
    """Each replayed point has every policy on the seven twins of the record."""
    found = recorded.ratios(table)
    assert set(found["point"]) == set(recorded.points())
    assert found["twins"].tolist() == [7] * 16


def test_no_setting_is_recorded_twice(table):
    """A row is told by its settings."""
    keys = [replays.key_of(row) for row in table.astype(object).where(table.notna(), None).to_dict("records")]
    assert len(keys) == len(set(keys))


def test_the_verdict_is_what_the_rule_says(table):
    """The claim on the order is judged by the largest upper end, and the rule agrees."""
    largest = max(max(ends) for ends in recorded.upper_ends(table).values())
    assert (recorded.order_verdict(table) == "reproduced") == claim("A123").yardstick.has_direction(largest)


def test_cells_name_the_order_they_show():
    """A cell has the order of Table 3 only if each policy rejects less than the one before."""
    kinds = [recorded.kind_of(*counts) for counts in ((5, 4, 3), (5, 3, 4), (5, 4, 6), (5, 5, 3))]
    assert kinds == list(recorded.KINDS)


def test_other_twins_agree_with_the_record(table):
    """No ratio at the four points, nor the share of cells with the paper's order, is 0.1 away on other twins."""
    apart = recorded.held_back(table)
    assert set(apart["twins"]) == {7}
    assert apart["apart"].max() < 0.1
    shares = recorded.shares(table)
    assert set(shares["cells"]) == {25}
    order = shares[shares["threshold"] == replays.JUDGED_THRESHOLD].set_index("twin")[recorded.ORDER]
    record, others = (
        order.loc[twins[0]].to_numpy() for twins in (recorded.JUDGED_TWINS, recorded.HELD_BACK_TWINS)
    )
    assert abs(record - others).max() < 0.1


@pytest.mark.slow
def test_a_recorded_replay_replays(table):
    """The first recorded replay gives the same count again."""
    row = table.iloc[0]
    point = dataclasses.replace(
        replays.REPLAY, prefill_factor=float(row.prefill_factor), decode_factor=float(row.decode_factor),
        policy=row.policy,
        decode_constant_s=float(row.decode_constant_s), ttft_limit_s=float(row.ttft_limit_s), twin=int(row.twin),
    )  # fmt: skip
    assert point.rejected()["rejected"] == row.rejected
