"""The program that compares the store with plain ways to move bytes; nothing here asserts a time."""

import pytest
from store import measure, measure_media


@pytest.mark.parametrize("medium", ["dram", "tcp", "ssd", pytest.param("mooncake", marks=pytest.mark.wheel)])
def test_it_compares_with_floors(tmp_path, medium):
    """Every row has ours, the floor and their ratio; nothing is left in the folder."""
    found = measure(tmp_path, [medium], block_mib=[1], rounds=1, working_set_mib=8)
    assert found["lookup"]["tokens"] == 131_072
    assert found["lookup"]["keys_s"] > found["lookup"]["floor_s"] / 2 > 0
    assert {row["operation"].split()[-1] for row in found["rows"]} == {"write", "read"}
    assert all(row["ratio"] > 0 and row["bytes_per_s"] > 0 for row in found["rows"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("media", "size", "said"), [(["tape"], 1 << 20, "tape"), (["dram"], 5000, "multiples")])
def test_what_cannot_be_measured_is_refused(tmp_path, media, size, said):
    """An unknown medium, and blocks that are no whole number of pages."""
    with pytest.raises(ValueError, match=said):
        measure_media(tmp_path, media, block_bytes=[size])
