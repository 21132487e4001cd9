"""What finished answers teach: shares that a count by hand gives, and a history that only a log feeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.conductor import History, LengthHistogram, RecentView
from mooncake_lab.conductor.history import ANSWER_CLASSES, PROMPT_CLASSES, share_longer
from mooncake_lab.core import Arrived, Finished, FirstToken, Rejected

ANSWERS = st.lists(st.integers(1, 5000), min_size=16, max_size=60)


def book_of(answers, prompt=1000):
    book = LengthHistogram()
    for answer in answers:
        book = book.with_answer(prompt, answer)
    return book


@given(ANSWERS, st.integers(0, 24))
def test_at_class_boundaries_the_share_is_a_count(answers, half_power):
    """The share of answers above a boundary is what counting them gives."""
    boundary = 2 ** (half_power / 2)
    expected = sum(answer > boundary * (1 + 1e-9) for answer in answers) / len(answers)
    assert abs(share_longer(book_of(answers), 1000, beyond=boundary) - expected) < 1e-6


@given(ANSWERS, st.floats(0, 6000), st.floats(0, 6000), st.floats(0, 6000))
def test_shares_are_chances_and_fall(answers, given_tokens, one, other):
    """From 0 to 1, and the further one looks the fewer are left."""
    book = book_of(answers)
    near, far = sorted((one, other))
    shares = [share_longer(book, 1000, beyond=beyond, given=given_tokens) for beyond in (near, far)]
    assert 1 >= shares[0] >= shares[1] - 1e-12 >= -1e-12


def test_prompts_of_another_length_speak_for_themselves_only_when_seen():
    """A class with too few answers is spoken for by all."""
    book = book_of([10] * 40, prompt=100)
    assert share_longer(book, 60_000, beyond=100.0) == 0.0
    for _ in range(16):
        book = book.with_answer(60_000, 400)
    assert share_longer(book, 60_000, beyond=100.0) == 1.0
    assert share_longer(book, 100, beyond=100.0) == 0.0


@pytest.mark.parametrize(("input_tokens", "like_16"), [(9, True), (16, True), (17, False), (8, False)])
def test_prompts_are_alike_up_to_the_next_power_of_two(input_tokens, like_16):
    """Prompts of 9 to 16 tokens are one class; of the answers to these none was long, of the others all were."""
    book = book_of([400] * 40, prompt=8)
    for _ in range(40):
        book = book.with_answer(17, 400).with_answer(16, 10)
    assert share_longer(book, input_tokens, beyond=100.0) == (0.0 if like_16 else 1.0)


def test_a_histogram_has_a_row_per_class_of_prompts_and_one_of_all():
    """Each row has an entry per boundary of answers, after that of all answers."""
    book = LengthHistogram().with_answer(7, 3)
    assert [len(row) for row in book.longer] == [ANSWER_CLASSES + 1] * (PROMPT_CLASSES + 1)


def test_the_last_classes_are_open():
    """The longest prompts are one class, and beyond the longest answers told apart nothing is known."""
    book = book_of([400] * 16, prompt=1 << 17)
    for _ in range(100):
        book = book.with_answer(1, 1)
    assert share_longer(book, 1 << 25, beyond=100.0) == 1.0
    assert share_longer(book_of([40_000] * 16 + [50_000] * 48), 1000, beyond=1e9) == share_longer(
        book_of([40_000] * 16 + [50_000] * 48), 1000, beyond=2**15.5
    )
    assert share_longer(book_of([1] * 4 + [2] * 12), 1000, beyond=0.5) == 0.875  # half of the four are counted
    assert share_longer(LengthHistogram(), 1000, beyond=5.0) == 1.0


def test_experience_learns_from_ends_only():
    """An answer counts when it has finished, never before; double checks are forgotten after the period."""
    history = History(period_s=10.0)
    for number in range(3):
        history.note(Arrived(at_s=0.0, request_id=number, input_tokens=100))
    history.note(FirstToken(at_s=1.0, request_id=0))
    assert history.lengths == LengthHistogram()
    history.note(Rejected(at_s=2.0, request_id=1, stage="decode", reason="full"))
    history.note(Rejected(at_s=3.0, request_id=2, stage="admission", reason="full"))
    history.note(Finished(at_s=5.0, request_id=0, output_tokens=7))
    assert history.lengths == LengthHistogram().with_answer(100, 7)
    assert history.recent(5.0) == RecentView(10.0, 2, 1)
    assert history.recent(11.0) == RecentView(10.0, 1, 1)
    assert history.recent(11.5) == RecentView(10.0, 1, 1)
    assert history.recent(12.0) == RecentView(10.0, 0, 0)


def test_who_is_refused_after_its_first_token_is_received_once():
    """Where prefill shows first tokens, a failed double check is of a request that was counted already."""
    history = History(period_s=10.0)
    history.note(FirstToken(at_s=1.0, request_id=0))
    history.note(Rejected(at_s=2.0, request_id=0, stage="decode", reason="full"))
    assert history.recent(3.0) == RecentView(10.0, 1, 1)
    assert history.recent(11.5) == RecentView(10.0, 1, 1)  # reckoned from the refusal
    assert history.recent(12.0) == RecentView(10.0, 0, 0)


def test_lengths_that_no_policy_needs_are_not_counted():
    """A history that learns no lengths shows none, and counts double checks as always."""
    history = History(period_s=10.0, learns_lengths=False)
    history.note(Arrived(at_s=0.0, request_id=0, input_tokens=100))
    history.note(FirstToken(at_s=1.0, request_id=0))
    history.note(Finished(at_s=5.0, request_id=0, output_tokens=7))
    assert (history.lengths, history.recent(5.0)) == (LengthHistogram(), RecentView(10.0, 1, 0))
