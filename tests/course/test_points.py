"""The points of right and wrong solutions are those of the rubric, on every seed."""

from itertools import pairwise

import pytest
from answering import points
from submissions import SOURCES, hand_in
from wrong_solutions import WRONG, Wrong

from mooncake_lab.course.eviction import chats_and_documents
from mooncake_lab.course.grading.grade import ASSIGNMENTS

PAIRS = [(topic, name) for topic, wrong in WRONG.items() for name in ("the teacher's solution", *wrong)]
QUICK = [(topic, name) for topic, name in PAIRS if topic == "keys" or name in list(WRONG[topic])[:1]]
"""What costs little, and one wrong solution of each other assignment."""


def on_seeds(topic, name, seeds, folder):
    """The points on each seed, and those of the rubric."""
    tasks = ASSIGNMENTS[topic].tasks
    wrong = WRONG[topic].get(name, Wrong(tuple(task.points for task in tasks)))
    path = hand_in(folder, topic, wrong.cells, wrong.changes)
    found = [tuple(points(ASSIGNMENTS[topic], path, SOURCES / f"{topic}.ipynb", seed)) for seed in seeds]
    return found, [wrong.points] * len(found)


@pytest.mark.parametrize(("topic", "name"), QUICK)
def test_points_are_those_of_the_rubric(topic, name, tmp_path):
    """Each task is paid or not, as the rubric says, on one seed."""
    found, expected = on_seeds(topic, name, [1], tmp_path)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(("topic", "name"), PAIRS)
def test_points_do_not_hang_on_the_seed(topic, name, tmp_path):
    """Each task is paid or not, as the rubric says, on twenty seeds."""
    found, expected = on_seeds(topic, name, range(20), tmp_path)
    assert found == expected


def test_each_assignment_has_wrong_solutions_of_many_kinds():
    """At least six each, and none of them has all points."""
    for topic, wrong in WRONG.items():
        assert len(wrong) >= 6
        assert all(sum(each.points) < ASSIGNMENTS[topic].points for each in wrong.values())


def test_keys_of_documents_tell_nothing():
    """A key that is seen later is larger as often as it is smaller, and all requests share their first block."""
    requests = chats_and_documents(1)
    first_seen = list(dict.fromkeys(key for request in requests for key in request))
    rises = sum(before < after for before, after in pairwise(first_seen))
    assert 0.45 < rises / len(first_seen) < 0.55
    assert {request[0] for request in requests} == {requests[0][0]}
