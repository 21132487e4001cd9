"""The live cluster: the same face and log as the simulator, over processes that really compute."""

import os

from mooncake_lab.core import SLO
from mooncake_lab.metrics import check_log, run_summary


def test_tokens_equal_one_engine(cluster, reference, rng):
    """Prefill here, move KVCache, decode there gives the tokens of one engine in one process (I10)."""
    prompts = [rng.integers(0, 256, length) for length in (1, 15, 16, 17, 32, 100, 600)]
    assert cluster.generate(prompts, max_new_tokens=9) == reference(prompts, 9)
    assert cluster.generate(prompts, max_new_tokens=1) == reference(prompts, 1)  # all from the cache now


def test_run_keeps_the_simulators_log(cluster, traced, expected):
    """A trace gives tokens, and a log that obeys I1 and I2 and that the metrics read."""
    cluster.forget()
    requests = traced(20)
    log = cluster.run(requests)
    assert cluster.outputs == expected(requests)
    assert check_log(log) == ()
    summary = run_summary(log, SLO())
    assert summary["finished"] == len(requests)
    assert summary["output_tokens"] == sum(one.output_tokens for one in requests)
    assert summary["token_hit_rate"] > 0.2


def test_workers_are_other_processes(cluster):
    """Each worker is a process of its own."""
    pids = cluster.pids()
    assert set(pids) == {"prefill-0", "decode-0"}
    assert len({os.getpid(), *pids.values()}) == 3
