"""The batching assignment: equal loads on every seed, and what a fixed chunk cannot do."""

import pytest
from submissions import SOURCES

from mooncake_lab.batching import VLLM, RequestLevel, SarathiServe
from mooncake_lab.course.batching import (
    GAPS_S,
    compare_batching,
    long_and_short_prompts,
    node_latency,
    serve,
    slower_than_allowed,
)
from mooncake_lab.course.grading.batching_assignment import BETTER, MUCH_BETTER, NEAR
from mooncake_lab.course.grading.cells import prepare


def teachers():
    """The teacher's policy."""
    names = {}
    code = prepare(SOURCES / "batching.ipynb", SOURCES / "batching.ipynb").code
    exec("\n".join(each.text for each in code), names)  # noqa: S102  # the teacher's notebook
    return names["MyBatching"]()


def test_every_seed_draws_the_same_load():
    """Prompt tokens differ by less than 2 % between seeds, and the last request arrives at the same time."""
    works = [long_and_short_prompts(seed, 2.2) for seed in range(10)]
    tokens = [sum(each.prompt_tokens for each in work.requests) for work in works]
    assert max(tokens) < 1.02 * min(tokens)
    assert {round(max(work.arrives_s.values()), 6) for work in works} == {132.0}
    assert len({tuple(each.prompt_tokens for each in work.requests) for work in works}) == 10


@pytest.mark.parametrize("seed", range(5))
def test_no_fixed_chunk_is_much_better_and_keeps_up(seed):
    """Of chunks from 256 to 4,096 tokens, each has gaps that are too long, or falls behind at the busy load."""
    for chunk_tokens in (256, 384, 512, 768, 1024, 2048, 4096):
        report = compare_batching(SarathiServe(chunk_tokens=chunk_tokens), seed)
        assert report.problems() or report.ratio("Sarathi-Serve") > MUCH_BETTER, chunk_tokens


def test_a_target_for_the_time_of_an_iteration_is():
    """The teacher's policy has all points in the notebook's comparison, on five seeds."""
    for seed in range(5):
        report = compare_batching(teachers(), seed)
        assert report.problems() == []
        assert report.ratio("Sarathi-Serve") <= MUCH_BETTER < BETTER < 1 < NEAR


def test_a_policy_that_serves_one_by_one_falls_behind():
    """It has the shortest gaps of all, and is slower than allowed."""
    work, node = long_and_short_prompts(1, GAPS_S["busy"]), node_latency()
    alone, sarathi = serve(RequestLevel(), work, node), serve(SarathiServe(chunk_tokens=1024), work, node)
    assert alone.longest_gap_s < sarathi.longest_gap_s
    assert "a mean TTFT of" in slower_than_allowed(alone, sarathi) or "requests/s" in slower_than_allowed(
        alone, sarathi
    )
    assert slower_than_allowed(serve(VLLM(), work, node), sarathi) == ""
