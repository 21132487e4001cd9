"""The network of the store assignment: what it does to messages, and the short schedules that it finds."""

import random

import pytest
from submissions import SOURCES, hand_in, needs_confinement

from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import grade
from mooncake_lab.course.grading.messages import Code
from mooncake_lab.course.grading.remote import Budget, Submission
from mooncake_lab.course.store import (
    NODES,
    ClientStep,
    MessagePlace,
    Schedule,
    as_json,
    block_of,
    check_store,
    faulty,
    few_keys,
    replay,
    run_schedule,
    shortest,
    usual,
)

PATIENT = Allowance(reply_s=60.0, wall_s=900.0)


def teachers(changes=()):
    """The class of the teacher's nodes, with changes in its text."""
    text = "\n".join(each.text for each in prepare(SOURCES / "store.ipynb", SOURCES / "store.ipynb").code)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    names = {}
    exec(text, names)  # noqa: S102  # the teacher's notebook
    return names["MyNode"]


FORGETFUL = (('if message["id"] > self.newest.get(message["key"], (0, None))[0]:', "if True:"),)
"""A node for which the last message counts, also one that is late."""


class Alone:
    """A node that keeps what it gets to itself, and sends what it is told to."""

    def __init__(self, name, sends=()):
        self.name, self.sends, self.blocks, self.heard = name, sends, {}, []

    def on_message(self, sender, message):
        """Answer the client at once."""
        self.heard.append((sender, message))
        if sender != "client":
            return []
        if message["kind"] != "get":
            self.blocks[message["key"]] = message.get("block")
        return [*self.sends, ("client", {"id": message["id"], "block": self.blocks.get(message["key"])})]

    def on_tick(self, _):
        """Nothing."""
        return []


def steps(*texts):
    """Steps from short texts: `put a n0`, `stop n1`, `wait 5`."""
    found = []
    for text in texts:
        what, *more = text.split()
        if what == "wait":
            found.append(ClientStep("wait", ticks=int(more[0])))
        else:
            found.append(ClientStep(what, more[-1], more[0] if len(more) > 1 else ""))
    return found


def test_the_teachers_store_has_no_failing_schedule():
    """On 48 schedules no answer is wrong, and all blocks are found after two losses."""
    for seed in range(4):
        report = check_store(teachers(), seed)
        assert report.failures == ()
        assert set(report.found_share.values()) == {1.0}
        assert report.confirmed_share == 1


def test_a_wrong_answer_is_noticed():
    """A removed block, another block, and nothing but the block of the key itself."""
    outcome = run_schedule(Alone, steps("put a n0", "remove a n0", "get a n0", "get a n1"))
    assert outcome.failure == ""
    assert outcome.asked == {"put": 1, "remove": 1, "get": 0}

    class Other(Alone):
        def on_message(self, _, message):
            return [("client", {"id": message["id"], "block": block_of("b")})]

    assert (
        run_schedule(Other, steps("put a n0", "get a n0")).failure
        == "get a via n0 was answered with something else"
    )

    class Keeping(Alone):
        def on_message(self, _, message):
            return [] if message["kind"] == "lost" else [("client", {"id": message["id"], "block": block_of("a")})]

    found = run_schedule(Keeping, steps("put a n0", "remove a n1", "get a n2"))
    assert found.failure == "get a via n2 was answered with a block that is not there"
    assert run_schedule(Keeping, steps("get a n2")).failure


def test_what_was_not_confirmed_may_be_there_or_not():
    """After a removal without an answer, a block is neither expected nor forbidden."""

    class Deaf(Alone):
        def on_message(self, sender, message):
            return [] if message["kind"] == "remove" else super().on_message(sender, message)

    outcome = run_schedule(Deaf, steps("put a n0", "remove a n0", "get a n0"))
    assert outcome.failure == ""
    assert outcome.asked == {"put": 1, "remove": 1, "get": 0}
    assert outcome.share("remove") == 0


def test_a_lost_machine_is_announced_and_gone():
    """The others hear of it once, and what is sent to it or asked of it vanishes."""
    made = {}

    def make(name):
        made[name] = Alone(name, [("n1", {"kind": "hello"})])
        return made[name]

    run_schedule(make, steps("put a n0", "wait 3", "stop n1", "put b n0", "get a n1", "wait 9"))
    assert [message for _, message in made["n1"].heard] == [{"kind": "hello"}]
    for name in ("n0", "n2", "n3"):
        assert ("cluster", {"kind": "lost", "node": "n1"}) in made[name].heard


def test_messages_are_copies():
    """A receiver that changes a message does not change the sender's."""
    sent = {"list": [1]}
    made = {}

    def make(name):
        made[name] = Alone(name, [("n1", sent)] if name == "n0" else [])
        return made[name]

    run_schedule(make, steps("put a n0", "wait 2"))
    made["n1"].heard[0][1]["list"].append(2)
    assert sent == {"list": [1]}


@pytest.mark.parametrize(
    ("sends", "said"),
    [
        ([("n9", {})], "n0 sends a message to 'n9'; there are n0, n1, n2, n3 and client"),
        ([("n1", {})] * 201, "n0 sends 202 messages at once; allowed are 200"),
    ],
)
def test_what_cannot_be_sent_is_named(sends, said):
    """An unknown receiver and a flood are errors with the node and the limit."""
    with pytest.raises(ValueError, match=said):
        run_schedule(lambda name: Alone(name, sends), steps("put a n0"))


def test_the_fate_of_a_message_depends_on_its_place():
    """The same draws give the same network; about one message in eight is lost, and a quarter comes twice."""
    first, second = (faulty(random.Random(3)) for _ in range(2))
    places = [MessagePlace(a, b, n) for a in NODES for b in NODES for n in range(100)]
    fates = [first(place) for place in places]
    assert fates == [second(place) for place in reversed(places)][::-1]
    assert 0.10 < sum(not each.arrives for each in fates) / len(fates) < 0.15
    assert 0.21 < sum(len(each.arrives) == 2 for each in fates) / len(fates) < 0.29
    assert max(ticks for each in fates for ticks in each.arrives) < 40


@pytest.mark.parametrize("seed", range(8))
def test_a_failing_schedule_is_short_and_fails_again(seed):
    """A late copy of a removed block is shown in at most five steps; the schedule as JSON replays it."""
    wrong, draw = teachers(FORGETFUL), random.Random(seed)
    while True:
        tried, fates = few_keys(draw), faulty(draw)
        outcome = run_schedule(lambda name: wrong(name, list(NODES)), tried, fates)
        if outcome.failure:
            break
    schedule, failure = shortest(lambda name: wrong(name, list(NODES)), tried, outcome, draw)
    assert len(schedule.steps) <= 5
    assert len(schedule.fates) <= 4
    assert replay(wrong, as_json(schedule)).endswith(failure)
    assert replay(teachers(), as_json(schedule)).endswith("no answer was wrong")


def test_a_schedule_reads_like_what_happens():
    """Steps and fates are told in words."""
    told = str(
        Schedule(
            steps=tuple(steps("put a n0", "stop n1", "wait 4", "get a n2")),
            fates={"n0>n1 #2": (), "n2>n0 #1": (1, 9)},
        )
    )
    assert told == (
        "put a via n0; stop n1; wait 4; get a via n2; n0>n1 #2, lost; n2>n0 #1, arrives after 1 and 9 ticks"
    )


def test_a_text_that_is_no_schedule_is_refused():
    """The sentence says what is wrong with it."""
    with pytest.raises(ValueError, match=r"the schedule cannot be read: .*steps"):
        replay(Alone, "{}")
    with pytest.raises(ValueError, match="the schedule cannot be read"):
        replay(Alone, '{"steps": [["burn", "n0", "a", 0]]}')


def test_a_copy_on_every_node_moves_two_blocks():
    """Two of three operations are puts with three copies each, and every node answers gets itself."""
    everywhere = teachers([('[self.home(message["key"])] if kind == "put" else self', "self")])
    assert 2.0 <= check_store(everywhere).moved_blocks < 2.3
    assert check_store(teachers()).moved_blocks < 1.1


def test_a_network_without_faults_is_the_usual_one():
    """Every message arrives after one tick, and the outcome names none."""
    outcome = run_schedule(lambda name: Alone(name, [("n1", {})]), steps("put a n0"), usual)
    assert outcome.fates == {}


@needs_confinement
def test_machines_share_nothing_but_the_network():
    """Each node has a process, a folder and a namespace of its own, and a part of the budget."""
    cell = (
        "import os\n"
        "def write(text):\n    open('here', 'w').write(text)\n    globals()['seen'] = text\n"
        "    return os.getpid()\n"
        "def read():\n    return [globals().get('seen', ''), os.listdir('.'), os.getpid()]\n"
    )
    budget = Budget(allowance=PATIENT)
    with Submission([Code("one", cell)], budget=budget) as first, first.another(4) as second:
        pid = first.call("write", "secret")
        seen, files, other = second.call("read")
        assert (seen, files) == ("", [])
        assert pid != other
        assert second._allowance.memory_bytes == PATIENT.memory_bytes // 2
        assert second._allowance.cpu_s == PATIENT.cpu_s // 4


@needs_confinement
def test_the_shortest_schedule_is_on_the_feedback_page(tmp_path):
    """The remark of a lost task names the failure and the steps that lead to it."""
    path = hand_in(tmp_path, "store", changes=dict(FORGETFUL))
    found = grade(path, SOURCES / "store.ipynb", student="one", seed=3, allowance=PATIENT)
    assert found.earned == 6
    (said,) = (mark.said for mark in found.marks if mark.task.startswith("Lost, repeated"))
    assert "was answered with a block that is not there, in the schedule: put k0 via n" in said
    assert len(said) < 400
