"""The record of vLLM behind several routers: intervals by hand, completeness, and a seed that was held back."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.book.chapters.endtoend import bracket
from mooncake_lab.book.chapters.endtoend.experiment import LIMITS_MS, EndToEnd
from mooncake_lab.book.chapters.endtoend.host import fitted_host
from mooncake_lab.book.experiments import run, value
from mooncake_lab.book.paper import claimed
from mooncake_lab.core import carried_folder

COLUMNS = [f"capacity_{ms}_ms" for ms in LIMITS_MS]
"""The shares of a record."""


def rows(shares):
    """A record in which vLLM serves these shares of each trace, one a seed, and Mooncake everything."""
    points = [
        {"workload": workload, "system": system, "router": router, "host_s": host_s, "seed": seed}
        | {f"capacity_{limit}_ms": 1.0 if system == "mooncake" else share for limit in LIMITS_MS}
        for workload, baseline in bracket.BASELINES.items()
        for host_s in (0.0, 0.004)
        for system, routers in (("mooncake", ["fewest_requests"]), (baseline, [*bracket.ROUTERS]))
        for router in routers
        for seed, share in enumerate(shares)
    ]
    return pd.DataFrame(points)


def test_interval_by_hand():
    """The reach is Student's quantile times the deviation of one further value from the mean."""
    low, mean, high = bracket.interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert mean == 3
    assert (high - mean, mean - low) == pytest.approx((bracket.QUANTILE * 3**0.5,) * 2)
    assert np.isnan(bracket.interval(np.array([1.0]))).tolist() == [True, False, True]


def test_an_interval_holds_nearly_every_further_seed():
    """In 4,000 samples of six, the sixth lies within the interval of the others 99 % of the time."""
    samples = np.random.default_rng(5).normal(size=(4000, len(bracket.SEEDS) + 1))
    bounds = [bracket.interval(sample[:-1]) for sample in samples]
    share = np.mean([low <= one <= high for (low, _, high), one in zip(bounds, samples[:, -1], strict=True)])
    assert share == pytest.approx(0.99, abs=4 * (0.01 / 4000) ** 0.5)


def test_gains_are_paired_by_host_and_seed():
    """Where vLLM serves half of a trace, Mooncake's gain is 100 %; the bracket has the share itself."""
    found = rows([0.5] * 5)
    assert bracket.gains(found)[["low", "percent", "high"]].to_numpy() == pytest.approx(100)
    assert bracket.bracket(found)["percent"].to_numpy() == pytest.approx(50)
    assert len(bracket.gains(found)) == len(bracket.bracket(found)) == 3 * 4 * 2 * 3


def test_the_record_is_complete():
    """Every replay is in the record once, and all are of one commit."""
    found = bracket.recorded()
    fields = ["workload", "system", "router", "host_s", "host_free", "seed"]
    recorded = found[fields].itertuples(index=False, name=None)
    assert sorted(recorded) == sorted(tuple(getattr(p, f) for f in fields) for p in bracket.replays())
    assert len(set(found["commit"])) == 1
    assert set(found.query("workload != 'toolagent'")["origin"]) == {"released"}


@pytest.mark.slow
@pytest.mark.traces("conversation", "synthetic")
@pytest.mark.parametrize("workload", ["conversation", "synthetic"])
def test_a_held_back_seed_lies_within_the_intervals(workload):
    """The gain of a seed that is not in the record lies in the recorded interval at each limit."""
    ours = EndToEnd(workload=workload, seed=1009, **fitted_host())
    found = run((ours, replace(ours, system="vllm")), cache=False).set_index("system")
    stated = bracket.gains(bracket.recorded())
    for limit in LIMITS_MS:
        column = f"capacity_{limit}_ms"
        gain = 100 * (found[column]["mooncake"] / found[column]["vllm"] - 1)
        key = {"workload": workload, "router": "fewest_requests", "host_s": ours.host_s, "limit_ms": limit}
        low, high = (value(stated, side, **key) for side in ("low", "high"))
        assert low - 0.01 <= gain <= high + 0.01


def test_every_router_is_replayed_with_all_seeds_and_the_host():
    """No router's gain is a single draw: each has an interval with the fitted host."""
    stated = bracket.gains(bracket.recorded())
    with_host = stated[stated["host_s"] == max(stated["host_s"])]
    assert len(with_host) == len(bracket.BASELINES) * len(bracket.ROUTERS) * len(LIMITS_MS)
    assert with_host[["low", "high"]].notna().all(axis=None)


def test_the_verdicts_on_gains_are_the_same_with_every_recorded_seed():
    """On both released traces, no seed of the arrivals moves a gain out of its band or into it."""
    with_host = bracket.recorded().query("host_s > 0 and router == 'fewest_requests'")
    later = pd.read_csv(carried_folder("measured") / "held_back_gains.csv")
    for workload, ids in (("conversation", ("F01", "F02", "F03")), ("synthetic", ("F07", "F08", "F09"))):
        here = with_host[with_host["workload"] == workload].set_index("seed")
        ours, theirs = here[here["system"] == "mooncake"], here[here["system"] == "vllm"]
        for limit, name in zip(LIMITS_MS, ids, strict=True):
            column = f"capacity_{limit}_ms"
            gains = (100 * (ours[column] / theirs[column] - 1)).tolist()
            gains += later.query(f"workload == '{workload}' and limit_ms == {limit}")["percent"].tolist()
            assert len(gains) == 10
            assert len({claimed(name, gain, requests=10**6).verdict for gain in gains}) == 1, name


def test_the_verdicts_on_shares_of_vllm_are_the_same_with_every_recorded_seed():
    """What plain vLLM serves of the conversation trace is judged alike with each seed of the arrivals."""
    here = bracket.recorded().query(
        "workload == 'conversation' and system == 'vllm' and host_s > 0 and router == 'fewest_requests'"
    )
    for limit, name in zip(LIMITS_MS, ("F204", "F205", "F206"), strict=True):
        shares = (100 * here[f"capacity_{limit}_ms"]).tolist()
        assert len(shares) == len(bracket.SEEDS)
        assert len({claimed(name, share, requests=10**6).verdict for share in shares}) == 1, name


def test_held_back_gains_are_compared_with_the_intervals_of_the_record():
    """A gain agrees where it lies in the interval that the record gives for its workload and limit."""
    found = pd.concat(
        pd.DataFrame([{"workload": w, "system": s, "seed": seed} | dict.fromkeys(COLUMNS, share)])
        for w, baseline in bracket.BASELINES.items()
        for s, share in (("mooncake", 1.0), (baseline, 0.5))
        for seed in bracket.HELD_BACK
    )
    table = bracket.compared(found, bracket.recorded())
    assert len(table) == len(bracket.BASELINES) * len(bracket.HELD_BACK) * len(LIMITS_MS)
    assert (table["percent"] == 100).all()
    low, high = table["low"] - bracket.ROUNDING, table["high"] + bracket.ROUNDING
    assert (table["agrees"] == table["percent"].between(low, high)).all()
    assert set(table["agrees"]) == {True, False}


def test_held_back_seeds_are_of_no_interval():
    """The command replays other seeds than the record, for both systems of each workload."""
    assert not set(bracket.HELD_BACK) & set(bracket.SEEDS)
    assert {(p.workload, p.system) for p in bracket.held_back()} == {
        (w, s) for w, baseline in bracket.BASELINES.items() for s in ("mooncake", baseline)
    }


def test_held_back_gains_lie_in_the_intervals_of_the_record():
    """Of 45 recorded gains with seeds that no interval has seen, all but two lie where a further seed should."""
    found = pd.read_csv(carried_folder("measured") / "held_back_gains.csv")
    assert set(found["seed"]) == set(bracket.HELD_BACK)
    assert len(found) == len(bracket.BASELINES) * len(bracket.HELD_BACK) * len(LIMITS_MS)
    low, high = found["low"] - bracket.ROUNDING, found["high"] + bracket.ROUNDING
    assert (found["agrees"] == found["percent"].between(low, high)).all()
    assert (~found["agrees"]).sum() <= 2
