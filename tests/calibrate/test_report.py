"""The page and the scatter of a calibration."""

import re

import numpy as np

from mooncake_lab.calibrate.scatter import scatter_svg


def rate(share, requests):
    points = np.random.default_rng(0).uniform(0.001, 0.1, (requests, 6)).tolist()
    points[0][1] = points[0][4] = None  # an answer of one token
    return {"share": share, "points": points}


def test_every_point_is_drawn_once():
    """Each request is a point in each panel, but where it has no TBT."""
    svg = scatter_svg([rate(0.5, 40), rate(0.9, 40)], "here")
    assert len(re.findall("<use ", svg)) >= 3 * 2 * 40 - 2
    assert "every" not in svg


def test_a_figure_of_many_requests_stays_small():
    """Of five rates with 1,000 requests each, evenly chosen ones are drawn, and the footer says so."""
    svg = scatter_svg([rate(share / 10, 1000) for share in range(1, 6)], "here")
    assert "every 10th request" in svg
    assert len(svg) < 200_000
