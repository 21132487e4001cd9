"""Experiments of compression: counts that add up, bytes that fall, formulas that hold."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from mooncake_lab.book.chapters.compression import claims as costs
from mooncake_lab.book.chapters.compression import experiment as topic
from mooncake_lab.book.chapters.compression.claims import beside_papers, minicache_compression, shipped_share
from mooncake_lab.book.chapters.compression.table import main, measured, weights_digest
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import claims
from mooncake_lab.compression import MiniCache
from mooncake_lab.perf import HARDWARE

RANDOM = topic.Exam(model="random:lab-recall", length=128, prompts=2)


@pytest.fixture(scope="module")
def rows():
    """Every method on an untrained model: nearly all wrong, but measured alike."""
    return run(RANDOM, cache=False)


def test_every_method_and_knob_has_a_row(rows):
    """Nothing is left out, and right answers are counted out of the prompts."""
    assert set(zip(rows["method"], rows["knob"], strict=True)) == {
        (name, knob) for name, knobs in topic.KNOBS.items() for knob in knobs
    }
    assert rows["right"].between(0, rows["prompts"]).all()


def test_smaller_knobs_hold_fewer_bytes(rows):
    """Within a method the measured bytes fall with the knob, and a full cache is its prompt's whole blocks."""
    for name in ("snapkv", "random", "oracle", "pyramidinfer", "minicache", "rounding"):
        sizes = rows[rows["method"] == name].sort_values("knob")["device_bytes"].to_list()
        assert sizes == sorted(sizes), name
    (full,) = rows[rows["method"] == "full"].to_dict(orient="records")
    assert full["full_bytes"] <= full["device_bytes"] < full["full_bytes"] * 1.2


def test_seeds_are_put_together(rows):
    """Accuracy over two seeds counts both, and its interval holds it."""
    both = pd.concat([rows, rows.assign(seed=1)])
    table = topic.accuracy(both)
    assert len(table) == len(rows)
    assert (table["prompts"] == 4).all()
    assert ((table["low"] <= table["accuracy"]) & (table["accuracy"] <= table["high"])).all()


@pytest.mark.parametrize("scale", ["smoke", "classroom", "full"])
def test_scales_ask_every_situation(scale):
    """Each scale asks recall and needle of all methods, and every situation in which methods break."""
    asked = topic.exams(scale)
    assert {(each.task, each.when) for each in asked} == {
        ("recall", "asked"), ("needle", "asked"), *topic.BREAKING.values(),
    }  # fmt: skip
    assert len({each.seed for each in asked}) == (3 if scale == "full" else 1)


def test_table_may_be_interrupted(tmp_path, monkeypatch):
    """What is in the table already is not asked again."""
    few = (replace(RANDOM, methods=("full",)), replace(RANDOM, methods=("full",), seed=1))
    monkeypatch.setattr("mooncake_lab.book.chapters.compression.table.exams", lambda _: few)
    path = tmp_path / "table.csv"
    main(["--prompts", "2", "--seeds", "1", "--output", str(path)])
    before = path.read_text()
    main(["--prompts", "2", "--seeds", "2", "--output", str(path)])
    assert path.read_text().startswith(before)
    assert set(pd.read_csv(path)["seed"]) == {0, 1}


def test_committed_table_has_machine_and_every_situation():
    """The committed table answers what the chapter draws from it, and the committed weights did the answering."""
    table = measured()
    assert set(zip(table["task"], table["when"], strict=True)) == {
        ("recall", "asked"), ("needle", "asked"), *topic.BREAKING.values(),
    }  # fmt: skip
    assert table["machine"].notna().all()
    assert set(table["weights"]) == {weights_digest("lab-recall")}, "other weights answered; ask them again"


def test_steps_measure_every_method():
    """Each method is timed and its bytes are counted; eviction holds least."""
    found = run(costs.DecodeSteps(model="random:lab-tiny", context_tokens=300, batch=2, steps=3), cache=False)
    held = found.set_index("method")["device_bytes"]
    assert (found["step_s"] > 0).all()
    assert held["snapkv"] <= held["full"]
    assert held["minicache_4bit"] < held["minicache"] < held["full"]


def test_break_even_is_the_ratio_of_bandwidths():
    """Contexts from which KCache pays are proportional to the values read and to device over host bandwidth."""
    assert costs.kcache_break_even_tokens(128, 4800e9, 52e9) == pytest.approx(11_815, abs=1)
    assert costs.kcache_break_even_tokens(128, 4800e9, 52e9, sets=4) == pytest.approx(47_262, abs=1)
    table = costs.break_evens().set_index(["machine", "top"])["tokens"]
    node = HARDWARE["a800-node"]
    assert table["a800-node", 64] == 64 * node.memory_bytes_per_s / node.host_to_device_bytes_per_s


def test_half_the_bytes_are_twice_the_store():
    """Bytes, load time and Eq. 2's bandwidth scale with the share; the hit rate does not fall."""
    full, half = run(vary(costs.StoredPrefixes(first=200), stored_share=(1.0, 0.5)), cache=False).to_dict(
        "records"
    )
    for name in ("prefix_bytes", "load_s", "least_bytes_per_s"):
        assert half[name] == pytest.approx(full[name] / 2)
    assert half["capacity_tokens"] == pytest.approx(2 * full["capacity_tokens"], abs=2)
    assert half["hit_rate"] >= full["hit_rate"]


def test_shipped_schedules_keep_more_than_the_paper_prints():
    """Replaying the authors' configurations: 0.76 of a prompt at 7B, 0.72 at 13B, where the paper prints 0.454."""
    assert shipped_share(0.9, 32, 512) == pytest.approx(0.757, abs=0.002)
    assert shipped_share(0.8, 40, 512, every=2) == pytest.approx(0.723, abs=0.002)


def layers_of(model, *cosines):
    """Rows as `LayerSimilarity` gives them, one cosine per pair of layers, the shallowest pair first."""
    return pd.DataFrame({"model": model, "shallow": range(len(cosines)), "cosine": cosines})


def test_every_claim_of_the_topic_is_in_the_table():
    """The comparison decides each claim of this chapter once, by id."""
    rows = beside_papers(topic.accuracy(measured()), layers_of("lab-recall", 0.1, 0.2, 0.3)).rows
    assert sorted(row.claim for row in rows if row.decides) == sorted(
        each.id for each in claims() if each.chapter == "14_compression"
    )


def test_only_the_trained_models_layers_stand_for_minicache():
    """C07 is the mean over the deeper pairs of the trained model, also if the table has a random model as well."""
    trained, chance = layers_of("lab-recall", 0.1, 0.2, 0.4), layers_of("random:lab-recall", -0.5, -0.6, -0.7)
    for similar in (trained, pd.concat([trained, chance], ignore_index=True)):
        table = beside_papers(topic.accuracy(measured()), similar)
        (row,) = (row for row in table.rows if row.claim == "C07")
        assert row.ours == pytest.approx((0.2 + 0.4) / 2)


def test_minicache_holds_what_its_layers_hold():
    """The count on a shape is that of keys and values held by the method, and hardly depends on their number."""
    method, shape = MiniCache(bits=4), {"layers": 4, "kv_heads": 2, "head_dim": 32}
    generator = torch.Generator().manual_seed(1)
    sides = tuple(tuple(torch.randn(2, 100, 32, generator=generator).half() for _ in range(4)) for _ in range(2))
    pairs = method.pairs(4)
    held = sum(method.merge(*(side[pair], side[pair + 1])).bytes for pair in pairs for side in sides)
    alone = set(range(4)) - {pair + offset for pair in pairs for offset in (0, 1)}
    held += sum(method.few_bits(side[layer]).bytes for layer in alone for side in sides)
    full = sum(side[layer].nbytes for layer in range(4) for side in sides)
    assert minicache_compression(method, tokens=100, **shape) == full / held
    assert minicache_compression(method, **shape) == pytest.approx(full / held, rel=0.01)
    wide = minicache_compression(method, layers=32, kv_heads=32, head_dim=128)
    assert wide > minicache_compression(method, **shape)
    with pytest.raises(ValueError, match="bits must be a number"):
        minicache_compression(MiniCache(), **shape)
