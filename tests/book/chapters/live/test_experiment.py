"""The simulator against the live cluster: laws of the comparison, and one small measurement from end to end."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.chapters.live import experiment as live
from mooncake_lab.book.chapters.live import measure as measurement
from mooncake_lab.book.chapters.live.measure import has_transfer_engine
from mooncake_lab.book.chapters.live.requests import (
    STAGES,
    by_statistic,
    causes,
    errors,
    per_request,
    side_by_side,
    slowed,
)
from mooncake_lab.conductor import LoadBalance
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster

SMALL = live.Study(requests=4, clusters=("1P+1D",), placements=())


def model(prefill_s=1e-4):
    prefill = PrefillLatency(constant_s=2e-3, per_token_s=prefill_s, per_token_squared_s=1e-8)
    decode = DecodeLatency(2e-3, 1e-5, 1e-7)
    return LatencyModel(
        name="for tests", shape=model_shape("lab-tiny"), prefill=prefill, decode=decode,
        hybrid=HybridLatency.of(prefill, decode), transfer=LinkLatency(1e9, 1e-4), dram=LinkLatency(1e9),
    )  # fmt: skip


def compared(real, simulated, cluster="1P+1D"):
    requests = live.Study(requests=12).slice(1, 30.0)
    spec = live.Study().spec(cluster)
    logs = [Cluster(spec, one).run(requests) for one in (real, simulated)]
    return side_by_side(*logs).assign(run=cluster, cluster=cluster, placement="default", load="light")


class TestStudy:
    def test_slices_are_of_the_trace_one_after_the_other(self):
        """Slice 1 begins where slice 0 ends; lengths and blocks are the scaled trace's, arrivals in order."""
        plan, trace = live.Study(requests=5), list(live.Study().trace().head(10).requests())
        served = [*plan.slice(0, 10.0), *plan.slice(1, 10.0)]
        assert [one.request.block_keys for one in served] == [one.request.block_keys for one in trace]
        arrivals = [one.request.arrival_s for one in plan.slice(1, 10.0)]
        assert arrivals == sorted(arrivals)

    def test_the_rate_divides_arrivals(self):
        """Ten times the rate is a tenth of the time, for the very same requests."""
        slow, fast = (SMALL.slice(1, rate) for rate in (1.0, 10.0))
        for one, other in zip(slow, fast, strict=True):
            assert one.request.arrival_s == pytest.approx(10 * other.request.arrival_s)


class TestComparison:
    @pytest.mark.parametrize("cluster", live.CLUSTERS)
    def test_a_perfect_prediction_has_no_error(self, cluster):
        """Two equal logs: every error and every interval is 0, on every cluster."""
        found = errors(compared(model(), model(), cluster))
        assert (found[["error", "low", "high"]] == 0).all(axis=None)

    def test_stages_add_up(self):
        """Wait, prefill and hand-over are the whole TTFT, so the missing seconds are the whole difference."""
        table = compared(model(2e-4), model())
        for side in ("real", "simulated"):
            total = sum(table[f"{side}_{stage}"] for stage in STAGES)
            np.testing.assert_allclose(total, table[f"{side}_ttft_s"])
        missing = causes(table)["missing_s"].sum()
        assert missing == pytest.approx((table["real_ttft_s"] - table["simulated_ttft_s"]).mean())
        assert missing > 0

    @given(st.floats(0.2, 5.0))
    def test_errors_are_relative_to_what_was_real(self, factor):
        """If everything took `factor` times as long as real, so are each error and its interval."""
        rng = np.random.default_rng(0)
        real = rng.uniform(1, 2, (20, 2))
        table = pd.DataFrame(np.hstack([real, factor * real]))
        table.columns = ["real_ttft_s", "real_tbt_s", "simulated_ttft_s", "simulated_tbt_s"]
        found = errors(table.assign(run="one"))
        np.testing.assert_allclose(found[["error", "low", "high"]], factor - 1, atol=1e-9)

    def test_every_statistic_is_counted_and_the_repetition_is_not(self):
        """Means, medians and P90s of TTFT and TBT: within 10 %, the median error and the largest."""
        rows = [
            {"run": run, "quantity": quantity, "statistic": statistic, "error": error}
            for run, error in (("a", 0.05), ("b", -0.3), ("c", 0.1), ("a, by a repetition", 5.0))
            for quantity in ("TTFT", "TBT")
            for statistic in ("mean", "median", "P90")
        ]
        found = by_statistic({"own pace": pd.DataFrame(rows)})
        assert found[["quantity", "statistic"]].to_numpy().tolist() == [
            [quantity, statistic] for quantity in ("TTFT", "TBT") for statistic in ("mean", "median", "P90")
        ]
        assert set(found["runs"]) == {3}
        assert set(found["within"]) == {2}
        assert found["typical_percent"].to_numpy() == pytest.approx(10)
        assert found["largest_percent"].to_numpy() == pytest.approx(30)

    def test_logs_of_other_requests_are_refused(self):
        """Comparing different requests is an error, not a number."""
        log = Cluster(SMALL.spec(), model()).run(SMALL.slice(1, 10.0))
        with pytest.raises(ValueError, match="same ones"):
            side_by_side(log, [])

    def test_answers_of_one_token_have_no_tbt(self):
        """A request without a gap between tokens has no TBT, rather than one of 0."""
        single = [dataclasses.replace(one, output_tokens=1) for one in SMALL.slice(1, 10.0)]
        assert per_request(Cluster(SMALL.spec(), model()).run(single))["tbt_s"].isna().all()


def test_slowed_prefill_is_slower_by_the_factor():
    """Twice the factor, twice the seconds, and decode as before."""
    slower = slowed(model(), 2.0)
    assert slower.prefill.seconds(300.0, 100.0) == pytest.approx(2 * model().prefill.seconds(300.0, 100.0))
    assert slower.decode == model().decode


@pytest.fixture(scope="module")
def found():
    return measurement.measure(SMALL)


@pytest.mark.slow
class TestMeasurement:
    """What each build of the book does as well: chapter 12 makes the same study and checks what it found."""

    def test_decisions_are_given_again(self, found):
        """Every live decision follows from its recorded view."""
        assert (found.held.decisions["decisions"] == SMALL.requests).all()
        assert (found.held.decisions["given again"] == SMALL.requests).all()

    def test_switches_change_counts_and_no_token(self, found):
        """Reuse saves prompt tokens, streaming sends early, only piggybacking shares iterations; answers stay."""
        table = found.switches.set_index(["feature", "on"])
        assert table["same_tokens"].all()
        computed = table["computed_tokens"]
        assert computed["prefix reuse", True] < computed["prefix reuse", False]
        early = table["early_share"]
        assert early["layer-wise streaming", True] > early["layer-wise streaming", False]
        assert table["shared_iterations"]["piggybacking", False] == 0
        assert ("Transfer Engine" in table.index) == has_transfer_engine()
        if has_transfer_engine():  # another road for the same bytes
            assert computed["Transfer Engine", True] == computed["Transfer Engine", False]

    def test_a_kill_costs_nothing(self, found):
        """After SIGKILL of the only decode worker nothing is lost and nothing is wrong."""
        (row,) = found.fault.to_dict(orient="records")
        assert (row["lost"], row["wrong"], row["requests"]) == (0, 0, SMALL.requests)

    def test_the_simulator_can_be_told(self, found):
        """Told how long prefill really took, it predicts every run again; a policy of one's own, too."""
        told = live.informed(SMALL, found.held)
        assert told.index.tolist() == list(dict.fromkeys(found.held.requests["run"]))
        assert live.predicted_ttft_s(LoadBalance(), SMALL, found.held) > 0
