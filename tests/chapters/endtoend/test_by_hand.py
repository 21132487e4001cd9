"""The worked example of the end-to-end chapter against what paper and pencil say."""

import numpy as np

from mooncake_lab.chapters.endtoend.experiment import coupled_log, longest_gaps_s, split_log
from mooncake_lab.metrics import token_times_s


def test_coupled_by_hand():
    """Prompts stop answers: one prompt stops the first request for a second, two the second request for two."""
    found = dict(token_times_s(coupled_log()))
    by_hand = {
        0: [1.0, 1.1, 1.2, 2.3, 2.4, 2.5],
        1: [2.2, 2.3, 2.4, 2.5, 4.6, 4.7],
        2: [4.5, 4.6, 4.7, 4.8, 4.9, 5.0],
        3: [4.5, 4.6, 4.7, 4.8, 4.9, 5.0],
    }
    for request_id, times in by_hand.items():
        np.testing.assert_allclose(found[request_id], times, atol=1e-9)


def test_split_by_hand():
    """Prompts wait for prompts only, and every gap is one step."""
    found = dict(token_times_s(split_log()))
    for request_id, first_s in enumerate((1.0, 2.15, 3.45, 4.45)):
        np.testing.assert_allclose(found[request_id], first_s + 0.1 * np.arange(6), atol=1e-9)


def test_the_longest_gap_is_a_step_and_the_prompts_that_came():
    """What the chapter's table shows, and what its exercise on two instances asks."""
    assert longest_gaps_s(coupled_log()) == [1.1, 2.1, 0.1, 0.1]
    assert longest_gaps_s(split_log()) == [0.1] * 4
    assert longest_gaps_s(coupled_log(nodes=2)) == [0.1, 1.1, 0.1, 0.1]
