"""How many blocks are reserved for a request."""

import pytest

from mooncake_lab.batching import Limits, Progress
from mooncake_lab.batching.batch_builder import known_blocks, refusal, worst_case_blocks


def limits(window=None):
    return Limits(
        max_batch_tokens=64,
        max_requests=4,
        block_size_tokens=4,
        capacity_blocks=10,
        free_blocks=10,
        max_request_tokens=window,
    )


def request(prompt_tokens=8, generated_tokens=0, max_new_tokens=None):
    return Progress(
        request_id=1,
        arrival=0,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        max_new_tokens=max_new_tokens,
    )


class TestKnownBlocks:
    @pytest.mark.parametrize(("generated", "blocks"), [(0, 2), (1, 3), (4, 3), (5, 4)])
    def test_prompt_and_generated(self, generated, blocks):
        """The tokens that exist are covered, and not one more."""
        assert known_blocks(request(generated_tokens=generated), limits()) == blocks


class TestWorstCaseBlocks:
    @pytest.mark.parametrize(("stated", "blocks"), [(1, 2), (2, 3), (5, 3), (6, 4), (999, 10), (None, 10)])
    def test_what_the_client_stated(self, stated, blocks):
        """The last token allowed is never written; without a statement it is the whole cache."""
        assert worst_case_blocks(request(max_new_tokens=stated), limits()) == blocks

    @pytest.mark.parametrize(("stated", "blocks"), [(5, 3), (9, 4), (None, 4)])
    def test_the_window_bounds_it(self, stated, blocks):
        """No request outgrows the model's window."""
        assert worst_case_blocks(request(max_new_tokens=stated), limits(window=16)) == blocks

    def test_never_less_than_is_there(self):
        """A request that went beyond what it stated still counts what it has."""
        assert worst_case_blocks(request(generated_tokens=9, max_new_tokens=2), limits()) == 5


class TestRefusal:
    @pytest.mark.parametrize(
        ("asked", "window"),
        [
            (request(prompt_tokens=40), None),
            (request(prompt_tokens=8, max_new_tokens=33), None),
            (request(prompt_tokens=16), 16),
            (request(prompt_tokens=8, max_new_tokens=999), 40),
        ],
    )
    def test_what_just_fits(self, asked, window):
        """A request that fills cache or window to the last token is served."""
        assert refusal(asked, limits(window)) is None

    @pytest.mark.parametrize(
        ("asked", "window", "reason"),
        [
            (request(prompt_tokens=41), None, "it needs 41 tokens"),
            (request(prompt_tokens=8, max_new_tokens=34), None, "it needs 41 tokens"),
            (request(prompt_tokens=17), 16, "the model's window is 16"),
            (request(prompt_tokens=8, max_new_tokens=999), 41, "it needs 41 tokens"),
            (request(prompt_tokens=36, generated_tokens=5), None, "it needs 41 tokens"),
        ],
    )
    def test_what_just_does_not(self, asked, window, reason):
        """One token more is refused, with the reason."""
        assert reason in refusal(asked, limits(window)).reason
