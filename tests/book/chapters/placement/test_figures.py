"""Figures of placement: what is ours, what is the paper's, and where the numbers came from."""

import dataclasses
import functools

import pytest

from mooncake_lab.book.chapters.placement import experiment as topic
from mooncake_lab.book.chapters.placement import figures as draw
from mooncake_lab.book.chapters.placement.claims import FAST_FIG_5, WORKLOADS, local_and_global
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import curve

SMALL = topic.PlacementReplay(first=60, prefill_nodes=3, decode_nodes=2)


def rows(*replays):
    return run(replays, cache=False)


@pytest.fixture(scope="module")
def four():
    return rows(*vary(SMALL, policy=tuple(FAST_FIG_5)))


@functools.cache
def planned():
    return rows(*topic.plan(topic.ClusterCapacity(ssd_bytes_per_s=6e9, first=60, prefill_nodes=3, decode_nodes=2)))


def test_capacity_draws_both_ways_to_hold_more():
    """All DRAM and little DRAM with an SSD begin at one point; other speeds of the SSD move TTFT, not hits."""
    left, right = draw.capacity(planned(), 3e6).axes
    dram, ssd = left.lines[0].get_xydata(), left.lines[1].get_xydata()
    assert (len(dram), len(ssd)) == (len(topic.DRAM_TOKENS), 1 + len(topic.SSD_TOKENS))
    assert tuple(dram[0]) == tuple(ssd[0])
    labels = [text.get_text() for text in left.figure.legends[0].get_texts()]
    assert labels[1:] == ["1M in DRAM, rest on SSD, 6 GB/s", "the same at 2 GB/s", "the same at 24 GB/s"]
    assert right.get_ylabel() == "token hit rate (%)"


def diamonds(figure):
    """The markers that stand for the paper."""
    return [line for axes in figure.axes for line in axes.lines if line.get_marker() == "D"]


def test_boxes_come_in_pairs_and_the_paper_has_diamonds(four):
    """Each policy has our box, the paper's box, and the paper's mean as a diamond."""
    paper = curve("fast_fig05_ttft_box_scheduling")
    figure = draw.boxes({"here": four}, {"here": paper}, {"here": FAST_FIG_5})
    assert len(figure.axes[0].patches) == 2 * len(FAST_FIG_5)
    means = sorted(float(line.get_ydata()[0]) for line in diamonds(figure))
    assert means == sorted(paper[paper["x"] == "mean"]["y"])


def test_caches_draw_the_papers_bars_as_diamonds():
    """Four bars a workload, and every printed bar of the figure once."""
    ten = dataclasses.replace(SMALL, one_token=True)
    local = vary(ten, workload=tuple(WORKLOADS), policy=("longest_prefix", "load_balance", "cache_aware"))
    table = local_and_global(rows(*local, *vary(ten, workload=tuple(WORKLOADS), shared_cache=(True,))))
    paper = {"token_hit_rate": curve("fast_fig10_hit_rate"), "prefill_gpu_s": curve("fast_fig10_gpu_time")}
    figure = draw.caches(table, paper, WORKLOADS)
    assert all(len(axes.patches) == 12 for axes in figure.axes)
    assert sum(len(line.get_ydata()) for line in diamonds(figure)) == sum(len(table) for table in paper.values())


def test_another_trace_and_node_stand_beside_the_papers(four):
    """Each policy has a mean, a line up to the 90th percentile, and a bar of hits, for either trace."""
    faster = rows(
        *vary(dataclasses.replace(SMALL, workload="synthetic", node="h200-node"), policy=tuple(FAST_FIG_5))
    )
    figure = draw.elsewhere(faster, four)
    left, right = figure.axes
    means = [tuple(line.get_ydata()) for line in left.lines if line.get_marker() == "o"]
    assert means == [tuple(four["mean"]), tuple(faster["mean"])]
    assert len(right.patches) == 8
    labels = [text.get_text() for text in left.figure.legends[0].get_texts()]
    assert labels == ["conversation on a800-node", "synthetic on h200-node"]
