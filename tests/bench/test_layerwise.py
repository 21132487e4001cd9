"""Measuring what layer-wise transfer hides: every row is there, moves what it says, and leaves nothing behind."""

import pytest

from mooncake_lab.bench.layerwise import main, measure_layerwise
from mooncake_lab.bench.reuse import measure_reuse
from mooncake_lab.perf import model_shape

SMALL = {"model": "lab-tiny", "prompt_tokens": (32, 64), "new_tokens": 16, "block_tokens": 32, "rounds": 1}


def test_every_row_is_measured(tmp_path):
    """Loading and storing for each medium and length, with the bytes that its tokens have."""
    measured = measure_layerwise(tmp_path, media=("dram", "ssd", "tcp"), **SMALL)
    rows = {(row.medium, row.operation, row.moved_tokens): row for row in measured.times}
    names = {(medium, op, n) for medium in ("dram", "ssd", "tcp") for op in ("load", "store") for n in (32, 64)}
    assert set(rows) == names
    shape = model_shape("lab-tiny")
    for row in measured.times:
        assert row.moved_bytes == row.moved_tokens * shape.kv_bytes_per_token // shape.bytes_per_element * 4
        assert row.prompt_tokens == row.moved_tokens + (16 if row.operation == "load" else 0)
        assert min(row.compute_s, row.serialized_s, row.layerwise_s) > 0
        assert row.hidden_share == pytest.approx(1 - row.layerwise_extra_s / row.serialized_extra_s)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"), [({"media": ("tape",)}, "unknown medium 'tape'"), ({"prompt_tokens": (40,)}, "multiples")]
)
def test_what_cannot_be_measured_is_refused(tmp_path, changes, said):
    """Unknown media and broken blocks are a sentence, before anything is made."""
    with pytest.raises(ValueError, match=said):
        measure_layerwise(tmp_path, **(SMALL | changes))


def test_the_command_shows_and_writes_it(tmp_path, capsys):
    """A table on stdout and the same rows in the file."""
    path = tmp_path / "out.json"
    main(["--model", "lab-tiny", "--media", "dram", "--tokens", "256", "--rounds", "1", "--output", str(path)])
    assert "dram" in capsys.readouterr().out
    assert '"moved_tokens": 256' in path.read_text()


def test_reuse_is_measured_beside_its_prediction():
    """Both ratios are positive, are those of their seconds, and the fit did not see the prompt."""
    found = measure_reuse(model="lab-tiny", prefix_tokens=256, new_tokens=16, block_tokens=32, rounds=1)
    assert found.ratio == pytest.approx(found.recompute_s / found.reuse_s)
    assert found.predicted_ratio == pytest.approx(found.predicted_recompute_s / found.predicted_reuse_s)
    assert found.miss == pytest.approx(found.ratio / found.predicted_ratio - 1)
    assert min(found.ratio, found.predicted_ratio, found.read_bytes_per_s) > 0


def test_a_prefix_too_short_to_predict_is_refused():
    """A model is fitted below the prefix, so there must be room below it."""
    with pytest.raises(ValueError, match="multiples of 256"):
        measure_reuse(prefix_tokens=100)
