"""Capacity planning: more memory hits more, and an SSD is worth its room if it is faster than computing."""

import pytest

from mooncake_lab.chapters.placement.experiment import ClusterCapacity
from mooncake_lab.experiments import run, vary

BASE = ClusterCapacity(ssd_bytes_per_s=6e9, dram_tokens=150_000, prefill_nodes=2, decode_nodes=2, first=300)


def test_an_ssd_hits_what_as_much_dram_would():
    """Hits grow with either tier; those that the SSD adds are its own."""
    little, with_ssd, much = run(
        [BASE, *vary(BASE, ssd_tokens=[450_000]), *vary(BASE, dram_tokens=[600_000])], cache=False
    ).to_dict(orient="records")
    assert little["token_hit_rate"] < with_ssd["token_hit_rate"]
    assert little["token_hit_rate"] < much["token_hit_rate"]
    assert (little["ssd_hit_rate"], much["ssd_hit_rate"]) == (0, 0)
    assert with_ssd["token_hit_rate"] == pytest.approx(with_ssd["dram_hit_rate"] + with_ssd["ssd_hit_rate"])
    assert with_ssd["prefill_gpu_s"] < little["prefill_gpu_s"]


def test_a_slow_ssd_is_worse_than_none():
    """Reading slower than computing costs time: the simulated node reads what it finds, as the real one does."""
    fast, slow = run(vary(BASE, ssd_tokens=[450_000], ssd_bytes_per_s=[6e9, 2e8]), cache=False)["ttft_mean_s"]
    none = run(BASE, cache=False)["ttft_mean_s"].iloc[0]
    assert fast < none < slow
