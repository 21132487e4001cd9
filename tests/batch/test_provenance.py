"""What a batch says about itself."""

from mooncake_lab.batch import Provenance, write_provenance
from mooncake_lab.batch.provenance import BOOK_TRACES, read_provenance


def test_round_trip(tmp_path):
    """What is written is read back, and writing the same again touches nothing."""
    written = write_provenance(tmp_path, scale="smoke", seed=3, traces={"conversation": "ab"})
    assert read_provenance(tmp_path) == written
    before = (tmp_path / "provenance.json").stat().st_mtime_ns
    write_provenance(tmp_path, scale="smoke", seed=3, traces={"conversation": "ab"})
    assert (tmp_path / "provenance.json").stat().st_mtime_ns == before


def test_nothing_executed_yet(tmp_path):
    """A book without chapters has no provenance."""
    assert read_provenance(tmp_path) is None


def test_banner_names_the_traces_that_were_missing():
    """The banner appears when a trace that the book rests on was not found, and says which."""
    found = dict.fromkeys(BOOK_TRACES, "ab")
    assert Provenance(scale="smoke", seed=0, traces=found).banner is None
    for name in BOOK_TRACES:
        banner = Provenance(scale="smoke", seed=0, traces={**found, name: None}).banner
        assert f"The released {name} trace could" in banner
    assert "traces" in Provenance(scale="smoke", seed=0, traces={}).banner
