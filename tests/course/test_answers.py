"""Answers are typed and checked: what is no answer, is not the student's, or misses a case earns nothing."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import mean, variance

import pytest
from submissions import SOURCES, hand_in, needs_confinement

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import EarlyRejection
from mooncake_lab.course.admission import goodput
from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import ASSIGNMENTS, grade
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.scheduling_assignments import LADDER, rung
from mooncake_lab.course.grading.task import HiddenDraw

PATIENT = Allowance(reply_s=60, wall_s=600)
pytestmark = needs_confinement


def outcome(path: Path, *tasks: int) -> list[str]:
    """What is said of some tasks of a submission, all put to one process; `ok` for those it has right."""
    assignment = ASSIGNMENTS[path.stem]
    found = []
    with Submission(prepare(path, SOURCES / path.name).code, PATIENT) as submission:
        for number in tasks:
            task = assignment.tasks[number]
            try:
                task.check(submission, f"7/{task.name}")
            except SubmissionError as error:
                found.append(str(error))
            else:
                found.append("ok")
    return found


PASSES = "        return proposed"
CHANGED = """        from dataclasses import replace
        return replace(proposed, decode="x")"""
LATE = 'Rejection(request_id=request.id, stage="admission", reason="the first token would be late")'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (PASSES, '        return "nonsense"', "admit returned 'nonsense', of type str"),
        (PASSES, "        return None", "admit returned None, of type NoneType"),
        (PASSES, CHANGED, "admit changed the placement"),
        (LATE, LATE.replace("request.id", "request.id + 1"), "was refused"),
        (LATE, LATE.replace("admission", "decode"), "refused at stage 'decode'"),
        (LATE, LATE.replace("the first token would be late", ""), "without a reason"),
    ],
)  # fmt: skip
def test_what_is_no_decision_is_named(tmp_path, old, new, said):
    """On arrival, what is neither the placement nor a rejection of this request loses, with a reason."""
    (found,) = outcome(hand_in(tmp_path, "admission", changes={old: new}), 0)
    assert said in found


def test_the_second_look_is_typed_too(tmp_path):
    """At the decode instance None passes and a rejection refuses; nothing else is an answer."""
    (found,) = outcome(hand_in(tmp_path, "admission", changes={"        return None": "        return ..."}), 5)
    assert "double_check returned Ellipsis" in found


def standard_errors(low, high):
    """How many standard errors lie between two mean goodputs, each over its own crowds."""
    return (mean(high) - mean(low)) / math.sqrt((variance(low) + variance(high)) / len(low))


@pytest.mark.slow
def test_rungs_of_admission_can_be_told_apart():
    """Over twenty crowds, neighbours are three standard errors apart; counting prefills is nearer to the top."""

    def on_crowds(policy):
        return [goodput(policy, paper_node_latency(), seed=HiddenDraw(str(seed))) for seed in range(20)]

    found = {name: on_crowds(make()) for name, make in LADDER.items()}
    for low, high in pairwise(found):
        assert standard_errors(found[low], found[high]) > 3, (low, high)
    assert 0 < standard_errors(found["early rejection"], on_crowds(EarlyRejection(with_coming=True))) < 3


@pytest.mark.slow
def test_a_grade_seldom_meets_rungs_in_the_wrong_order():
    """With the hidden crowds of eight seeds, goodput rises to the highest rung for at least seven."""
    found = [[rung(name, str(seed)) for name in list(LADDER)[-2:]] for seed in range(8)]
    assert sum(low < high for low, high in found) >= 7, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "earned"),
    [
        ((), 10),
        ((("node.requests", "node.present_requests"), ("node.context_tokens", "node.present_tokens")), 10),
        ((("if estimate.decode_step_s(requests, tokens) > slo.tbt_s", "if False"),), 6),
        (
            (
                ("node.requests", "node.present_requests"),
                ("node.context_tokens", "node.present_tokens"),
                ("if step_s > slo.tbt_s", "if False"),
            ),
            4,
        ),
        (
            (
                ("if estimate.decode_step_s(requests, tokens) > slo.tbt_s", "if False"),
                ("if step_s > slo.tbt_s", "if False"),
            ),
            3,
        ),
    ],
    ids=["coming", "early", "after prefill", "present", "prefill"],
)  # fmt: skip
def test_admission_pays_in_the_order_that_is_taught(tmp_path, changes, earned):
    """Early rejection earns most, if it counts the coming or not; then after prefill, present load, prefill."""
    path = hand_in(tmp_path, "admission", changes=dict(changes))
    found = grade(path, SOURCES / "admission.ipynb", student="one", seed="any", allowance=PATIENT)
    assert found.earned == earned, [mark.said for mark in found.marks]


@pytest.mark.parametrize(
    ("old", "new", "task"),
    [
        ("estimate.transfer_s(moved, holder.outgoing_flows)", "estimate.transfer_s(moved, 0)", 3),
        ("(-node.matched_blocks, node.outgoing_flows)", "-node.matched_blocks", 2),
        ("reused = reusable(request, best)", "reused = best * request.block_size_tokens", 2),
        ("ratio > self.threshold", "ratio >= self.threshold", 2),
        ("key=lambda answer: answer[0]", "key=lambda answer: (answer[0], -int(answer[1].name[8:]))", 2),
    ],
    ids=["flows of the holder", "which holder", "one token", "the threshold itself", "ties"],
)
def test_placement_catches_what_is_easily_forgotten(tmp_path, old, new, task):
    """Each small departure from Algorithm 1 loses a task."""
    assert outcome(hand_in(tmp_path, "placement", changes={old: new}), task) != ["ok"]


def test_one_wrong_flag_costs_one_task(tmp_path):
    """Plans whose segments say the wrong thing of themselves lose the task about that, and none of the others."""
    path = hand_in(tmp_path, "chunked", changes={"new == r.pending_tokens)": "False)"})
    found = outcome(path, 0, 1, 2, 3)
    assert "allowed is" in found[0]
    assert found[1:] == ["ok"] * 3


def test_keys_by_chance_earn_nothing(tmp_path):
    """Random bytes name no block: all three tasks about keys are lost."""
    random = {
        "    return keys\n": "    return [random.randbytes(8) for _ in keys]\n",
        "def chain_keys": "import random\ndef chain_keys",
    }
    path = hand_in(tmp_path, "keys", changes=random)
    found = outcome(path, 0, 1, 2, 3, 4)
    assert found[3:] == ["ok"] * 2
    assert all("second call" in said for said in found[:3])


def test_no_task_shows_what_the_next_one_asks(tmp_path):
    """Each task has a process and draws of its own: what is kept anywhere in one is gone in the next."""
    text = (
        "import os, mooncake_lab.core\n"
        "def matched_blocks(keys, held):\n"
        "    seen = os.listdir('.') + [n for n in vars(mooncake_lab.core) if n.startswith('kept')]\n"
        "    assert not seen, seen\n"
        "    raise RuntimeError('never asked before')\n"
        "def chain_keys(tokens, n):\n"
        "    mooncake_lab.core.kept = tokens\n"
        "    try:\n"
        "        open('kept', 'w').write(str(tokens))\n"
        "    except OSError:\n"
        "        pass\n"
        "    raise RuntimeError('kept')"
    )
    path = hand_in(tmp_path, "keys", {"matched-blocks": text, "chain-keys": "pass"})
    found = grade(path, SOURCES / "keys.ipynb", student="one", seed=1, allowance=PATIENT)
    assert "kept" in found.marks[0].said
    assert "never asked before" in found.marks[3].said


def test_draws_are_their_seed_and_cannot_be_continued():
    """The same names give the same numbers, others others; Python's generator does not know them."""
    first, second = ([draw.random() for _ in range(5)] for draw in (HiddenDraw("s", 1), HiddenDraw("s", 1)))
    assert first == second
    assert first != [HiddenDraw("s", 2).random() for _ in range(5)]
    draw = HiddenDraw("s")
    before = draw.getstate()
    values = [draw.getrandbits(32) for _ in range(700)]
    assert draw.getstate() == before, "the state of Python's own generator has no part in it"
    assert len(set(values)) > 690
    assert all(0 <= value < 2**32 for value in values)
    assert HiddenDraw("s").getrandbits(1000).bit_length() > 900
