"""Beliefs learned from measurements."""

import numpy as np
import pytest

from mooncake_lab.book.chapters.placement.experiment import NoisyEstimator, PolynomialEstimator
from mooncake_lab.book.testbeds.fit_nodes import calibrate_paper_node
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import KVCacheCentric, LatencyEstimator
from mooncake_lab.metrics import check_log, ttft_s
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import load

NODE = calibrate_paper_node()
TRUTH = LatencyEstimator(NODE.latency)


def measured(noise=0.0):
    """Offline tests: a grid of lengths and reused shares on the simulated node, each off by some percent."""
    tokens, shares = (axis.ravel() for axis in np.meshgrid([1e3, 4e3, 16e3, 64e3, 128e3], [0.0, 0.3, 0.6, 0.9]))
    reused = np.floor(tokens * shares)
    errors = 1 + noise * np.random.default_rng(0).uniform(-1, 1, tokens.size)
    return tokens, reused, NODE.latency.prefill.seconds(tokens, reused) * errors


def test_a_quadratic_truth_is_found_exactly():
    """Without noise the regression of degree two is the latency model, at lengths it never saw, too."""
    learned = PolynomialEstimator.fit(NODE.latency, *measured())
    assert learned.max_relative_error < 1e-6
    for tokens, reused in ((2000, 512), (50_000, 0), (100_000, 99_000)):
        assert learned.prefill_s(0, tokens, reused) == pytest.approx(TRUTH.prefill_s(0, tokens, reused), rel=1e-6)
    assert learned.transfer_s(1000, 2) == TRUTH.transfer_s(1000, 2)
    assert learned.decode_step_s(3, 9000) == TRUTH.decode_step_s(3, 9000)


def test_noise_is_in_its_errors_and_a_line_is_worse():
    """The estimator knows how far off it is, and too low a degree shows."""
    noisy = PolynomialEstimator.fit(NODE.latency, *measured(0.05))
    line = PolynomialEstimator.fit(NODE.latency, *measured(0.05), degree=1)
    assert 0.01 < noisy.max_relative_error < 0.1
    assert line.max_relative_error > 2 * noisy.max_relative_error


def test_lengths_that_hardly_differ_do_not_determine_it_either():
    """Coefficients that cancel to a ten-millionth would be rounding, not measurements."""
    tokens = 1e5 + np.arange(12.0)
    with pytest.raises(ValueError, match="measure more lengths and prefixes"):
        PolynomialEstimator.fit(
            NODE.latency, tokens, np.tile([0.0, 5e4, 9e4], 4), NODE.latency.prefill.seconds(tokens, 0 * tokens)
        )


def test_a_conductor_may_believe_it():
    """A cluster runs on learned beliefs, and serves almost as well as with the truth."""
    trace = load("conversation").head(300)
    spec = ClusterSpec.disaggregated(prefill_nodes=3, decode_nodes=3, placement=KVCacheCentric())
    mean = {}
    for name, belief in (("truth", TRUTH), ("learned", PolynomialEstimator.fit(NODE.latency, *measured(0.05)))):
        log = Cluster(spec, NODE.latency, estimate=belief).run(trace.requests())
        assert check_log(log) == ()
        mean[name] = np.mean(list(ttft_s(log).values()))
    assert mean["learned"] == pytest.approx(mean["truth"], rel=0.1)
    assert mean["learned"] != mean["truth"]


def test_noise_is_bounded_and_replays():
    """A noisy estimate errs by at most its relative error, the same way each time it is asked."""
    noisy = NoisyEstimator(NODE.latency, relative_error=0.2, seed=1)
    ratios = [noisy.prefill_s(i, 1000, 0) / TRUTH.prefill_s(i, 1000, 0) for i in range(200)]
    assert all(0.8 <= ratio <= 1.2 for ratio in ratios)
    assert max(ratios) - min(ratios) > 0.3
    assert noisy.prefill_s(7, 1000, 0) == noisy.prefill_s(7, 1000, 0)
