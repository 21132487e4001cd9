"""The host fitted to Mooncake's own curves: what it reads, what it minimises, and the record."""

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.book import paper
from mooncake_lab.book.chapters.endtoend import host
from mooncake_lab.book.experiments import run
from mooncake_lab.book.paper import assumption, facts


def test_only_curves_of_mooncake_are_read(monkeypatch):
    """The fit reads three series of FAST'25, and none of vLLM."""
    seen, read = list[tuple[str, str]](), host.points

    def watched(name, series):
        seen.append((name, series))
        return read(name, series)

    monkeypatch.setattr(host, "points", watched)
    for name in ("curve", "fact", "points", "claim", "constant"):
        monkeypatch.setattr(paper, name, None)  # nothing else is read by way of the package
    assert len(list(host.printed())) == 7 + 2 * 9
    assert seen == [
        ("fast_fig15b_avg_tbt", "average TBT"),
        ("fast_fig01_tbt_cdf_conversation", "Mooncake"),
        ("fast_fig07_tbt_cdf_synthetic", "Mooncake"),
    ]


def test_curves_of_vllm_do_not_matter(monkeypatch):
    """With every row of vLLM and every claim changed, the printed numbers of the fit are the same."""
    before, read = list(host.printed()), facts.read_rows

    def changed(name):
        rows = read(name)
        return [row | {"y": "1"} if row.get("series", "").startswith("vLLM") else row for row in rows]

    monkeypatch.setattr(facts, "read_rows", changed)
    assert list(host.printed()) == before


def test_printed_numbers_are_the_papers():
    """Seven means, and deciles between the points of a curve that is read off."""
    found = {(figure, at): value for figure, at, value in host.printed()}
    assert found["FAST'25 Figure 15b", 11] == 58.314
    assert found["FAST'25 Figure 1", 50] == pytest.approx(74.2, abs=0.1)
    assert found["FAST'25 Figure 7", 50] == pytest.approx(39.9, abs=0.1)


def test_each_figure_counts_alike():
    """The error is the root mean square of log errors in each figure, and of those over the figures."""
    rows = pd.DataFrame(
        {
            "host_s": 0.004,
            "host_free": [1.0] * 3 + [2.0] * 3,
            "figure": ["one", "one", "other"] * 2,
            "printed_ms": [10.0, 20.0, 40.0] * 2,
            "ours_ms": [10 * np.e, 20 / np.e, 40.0, 10.0, 20.0, 40 * np.e**2],
        }
    )
    found = host.errors(rows)
    assert found["error"].tolist() == pytest.approx([0.5**0.5, 2**0.5])
    assert host.best(found) == {"host_s": 0.004, "host_free": 1.0}
    assert len(host.nearly_best(found)) == 1


class TestRecord:
    def test_the_whole_grid_is_there(self):
        """Every host of the grid was tried by one commit, and none twice."""
        found = host.recorded()
        pairs = set(zip(found["host_s"], found["host_free"], strict=True))
        assert pairs == {(s, free) for s in host.HOSTS_S for free in host.HOSTS_FREE}
        assert len(found) == len(pairs)
        assert len(set(found["commit"])) == 1

    def test_the_best_host_is_inside_the_grid(self):
        """The least error is not at a border where larger or smaller hosts were left out."""
        found = host.fitted_host()
        assert min(host.HOSTS_S) < found["host_s"] < max(host.HOSTS_S)
        assert found["host_free"] < max(host.HOSTS_FREE)

    def test_the_assumption_names_it(self):
        """B37 gives the host of the record."""
        assert assumption("B37").value == pytest.approx(1e3 * host.fitted_host()["host_s"])

    @pytest.mark.slow
    @pytest.mark.traces("conversation", "synthetic")
    def test_the_error_of_the_best_is_computed_again(self):
        """The fit at the recorded host gives the recorded error."""
        best = host.fitted_host()
        (again,) = host.errors(run(host.HostFit(**best), cache=False))["error"]
        assert again == pytest.approx(host.recorded()["error"].min(), rel=1e-3)
