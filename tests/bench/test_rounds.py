"""One harness compares ways: they take turns, ratios are taken within rounds, and every program uses it."""

import re
import statistics
from functools import partial
from pathlib import Path

import pytest

from mooncake_lab.bench.rounds import Rounds, alternating_rounds, in_turns, paired_rounds

ROOT = Path(__file__).parents[2]


def test_ways_take_turns_and_every_second_round_goes_backwards():
    """Each way runs once per round, and no way is always the first."""
    order = []
    in_turns({way: partial(lambda way, number: order.append((number, way)), way) for way in "abc"}, 3)
    assert order == [(number, way) for number in range(4) for way in ("abc" if number % 2 else "cba")]


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_rounds_that_warm_up_do_not_count(warm_up):
    """Entries are those of the counted rounds, whose numbers follow those of the others."""
    taken = alternating_rounds({"a": float, "b": lambda number: 10.0 * number}, 3, warm_up=warm_up)
    assert taken.seconds["a"] == [warm_up, warm_up + 1, warm_up + 2]
    assert taken.seconds["b"] == [10.0 * number for number in taken.seconds["a"]]


def test_a_machine_that_slows_down_changes_no_ratio():
    """Both ways of a round are slowed alike, so the ratio is theirs, whatever the medians are."""
    slow = [1.0, 1.0, 8.0, 64.0, 2.0]
    taken = alternating_rounds({"a": lambda n: 3 * slow[n], "b": lambda n: 2 * slow[n]}, 4)
    ratio = taken.ratio("a", "b")
    assert ratio.least == ratio.median == ratio.most == 1.5
    assert taken.median_s("a") == statistics.median(3 * each for each in slow[1:])
    assert taken.extra_s("a", "b") == statistics.median(slow[1:])


def test_the_range_is_that_of_the_rounds():
    """The least and the greatest ratio of a round stand beside the median."""
    ratio = Rounds({"a": [2.0, 6.0, 9.0], "b": [2.0, 2.0, 1.0]}, 0.0).ratio("a", "b")
    assert (ratio.least, ratio.median, ratio.most) == (1.0, 3.0, 9.0)


def test_ways_that_one_function_times_are_counted_the_same():
    """A function that runs several ways gets the number of each round, and the first one does not count."""
    taken = paired_rounds(lambda number: {"write": float(number), "read": 2.0 * number}, 2)
    assert taken.seconds == {"write": [1.0, 2.0], "read": [2.0, 4.0]}
    assert taken.load_average >= 0


def test_no_program_has_rounds_of_its_own():
    """Loops over rounds are in the harness alone."""
    others = {"rounds.py", "gain.py", "stages.py"}  # gain.py goes on where it ended; stages.py has a limit of time
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "mooncake_lab" / "bench").glob("*.py")]
    loop = re.compile(r"for \w+ in range\((\w+\.)*_?(sizes\.)?rounds\b")
    own = [path.name for path in programs if loop.search(path.read_text(encoding="utf-8"))]
    assert set(own) <= others
