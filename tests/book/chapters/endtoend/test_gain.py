"""Real servers under shared prefixes: the workload, what is counted, and what the simulator makes of the same."""

import numpy as np
import pytest

from mooncake_lab.book.chapters.endtoend import figures as draw
from mooncake_lab.book.chapters.endtoend import gain
from mooncake_lab.perf import DecodeLatency, PrefillLatency

WORKLOAD = gain.SharedPrefixes(prefixes=3, prefix_tokens=64)
PREFILL = PrefillLatency(constant_s=2e-3, per_token_s=2e-4, per_token_squared_s=1e-9)
DECODE = DecodeLatency(3e-3, 4e-4, 1e-7)
PROBES = {
    "prefill": [[n, PREFILL.seconds(n)] for n in (64, 256, 512, 1024)],
    "decode": [[b, c, DECODE.step_s(b, c)] for b, c in ((1, 64), (4, 256), (8, 4096), (16, 1024))],
}


class TestWorkload:
    def test_requests_begin_with_one_of_the_prefixes(self):
        """Lengths and moments are in their ranges, and who shares a prefix shares its tokens."""
        firsts = [each.prompt for each in WORKLOAD.first(5)]
        assert len(set(firsts)) == 3
        found = WORKLOAD.arrivals(50.0, 4.0, seed=1, texts=5)
        assert 120 < len(found) < 280
        for each in found:
            assert each.prompt[:64] == firsts[each.prefix]
            assert 32 <= len(each.prompt) - 64 <= 224
            assert 16 <= each.new_tokens <= 64
            assert 0 <= each.at_s < 4
        assert [each.at_s for each in found] == sorted(each.at_s for each in found)

    def test_other_texts_are_new_to_a_cache_and_otherwise_the_same(self):
        """Moments and lengths stay, no prefix does."""
        one, other = (WORKLOAD.arrivals(5.0, 4.0, seed=1, texts=texts) for texts in (5, 6))
        assert [(e.at_s, len(e.prompt), e.new_tokens) for e in one] == [
            (e.at_s, len(e.prompt), e.new_tokens) for e in other
        ]
        assert not {e.prompt for e in WORKLOAD.first(5)} & {e.prompt for e in WORKLOAD.first(6)}


class TestPrediction:
    def test_probes_of_a_law_give_the_law(self):
        """Coefficients are found again, and all times are multiplied on a part of a core."""
        for slower in (1.0, 2.0):
            model = gain.latency_model(PROBES, "lab-30m", slower)
            assert model.prefill.seconds(700) == pytest.approx(slower * PREFILL.seconds(700))
            assert model.decode.step_s(6, 900) == pytest.approx(slower * DECODE.step_s(6, 900))

    @pytest.mark.parametrize("name", gain.SYSTEMS)
    def test_filled_caches_are_used(self, name):
        """Each simulated system answers every request, sooner where its prefixes were asked for before."""
        system, model = gain.SYSTEMS[name], gain.latency_model(PROBES, "lab-30m")
        workload = gain.SharedPrefixes(prefixes=2)
        arrivals = workload.arrivals(1.0, 5.0, seed=0, texts=0)
        cold, warm = (gain.simulated(system, first, arrivals, model, 24_576) for first in ([], workload.first(0)))
        for table in (cold, warm):
            assert table["output_tokens"].tolist() == [each.new_tokens for each in arrivals]
        assert warm["ttft_s"].sum() < cold["ttft_s"].sum()

    def test_the_caches_of_a_system_have_the_size_that_was_told(self):
        """Two processes hold half each."""
        for system in gain.SYSTEMS.values():
            pools = gain.spec_of(system, 24_576).pools
            assert {pool.device_tokens for pool in pools if hasattr(pool, "device_tokens")} == {
                24_576 // system.processes
            }


def test_both_latencies_have_to_be_within_their_limits():
    """By hand: of four requests one is in time, one is late, one is slow, and one has no answer."""
    cell = {"system": "ours_1", "requests_per_s": 2.0, "round": 0, "unanswered": 1}
    cell |= {"ttft_s": [1.0, 1.1, 0.2], "tbt_s": [0.1, 0.05, 0.2]}
    (row,) = gain.measured({"cells": [cell], "ttft_limit_s": 1.0}, 0.1).to_dict(orient="records")
    assert (row["requests"], row["within"], row["ttft_median_s"]) == (4, 25.0, 1.0)


class TestRecord:
    RECORD = gain.recorded()

    def test_every_system_is_there_at_every_rate_in_every_round(self):
        """A cell each, of as many requests for all systems."""
        found = gain.measured(self.RECORD, 0.1)
        assert len(found) == len(gain.SYSTEMS) * len(self.RECORD["rates"]) * self.RECORD["rounds"]
        assert set(found["system"]) == set(gain.SYSTEMS)
        assert (found.groupby(["requests_per_s", "round"])["requests"].nunique() == 1).all()

    def test_it_says_where_and_how_it_was_measured(self):
        """Machine, commit, cores, load and limits are in the file."""
        assert self.RECORD["machine"]["processor"]
        assert len(self.RECORD["commit"]) >= 7
        assert len(self.RECORD["server_cores"]) == len(self.RECORD["client_cores"]) == 1
        assert all(cell["load_average"] >= 0 for cell in self.RECORD["cells"])
        assert (self.RECORD["ttft_limit_s"], self.RECORD["tbt_limit_s"]) == (1.0, 0.1)

    def test_the_figure_has_both_for_every_system(self):
        """A circle per round, and the prediction; two processes on a core have two bounds."""
        measured, predicted = gain.measured(self.RECORD, 0.1), gain.predicted(self.RECORD, 0.1)
        labels = {name: system.label for name, system in gain.SYSTEMS.items()}
        figure = draw.real_gain(measured, predicted, labels, gain.source_of(self.RECORD))
        assert "measured" in figure.get_supxlabel()
        for panel, (name, system) in zip(figure.axes, gain.SYSTEMS.items(), strict=True):
            circles = [line for line in panel.lines if line.get_marker() == "o"]
            mine = measured[measured["system"] == name]
            assert sorted(circles[0].get_ydata()) == sorted(mine["within"])
            bounds = predicted[predicted["system"] == name].groupby("slower")["within"].apply(np.array)
            assert len(bounds) == system.processes
            assert (bounds.iloc[-1] <= bounds.iloc[0] + 15).all()
