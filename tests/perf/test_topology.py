"""Path selection: every byte is sent once, near cards come first, failed ones never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf.topology import SLICE_BYTES, Cards, NoPathError, Topology, bytes_by_card, plan_transfer

CARDS = ("a", "b", "c", "d")
SERVER = Topology(
    {"cpu:0": Cards(("a", "b"), ("c", "d")), "cuda:0": Cards(("a",), ("b",)), "cuda:1": Cards(("c",))}
)


@given(st.integers(1, 40 * SLICE_BYTES), st.sets(st.sampled_from(CARDS)), st.integers(0, 9))
def test_every_byte_travels_once_over_cards_that_work(size, failed, seed):
    """Slices tile the transfer, near cards are used while one works, and the load is even up to one slice."""
    row = SERVER.places["cpu:0"]
    try:
        slices = plan_transfer(size, (SERVER, "cpu:0"), (SERVER, "cpu:0"), failed=failed, seed=seed)
    except NoPathError:
        assert failed == set(CARDS)
        return
    ends = [piece.offset_bytes + piece.size_bytes for piece in slices]
    assert [piece.offset_bytes for piece in slices] == [0, *ends[:-1]]
    assert ends[-1] == size
    working = [card for card in row.preferred if card not in failed]
    used = {piece.local_card for piece in slices} | {piece.remote_card for piece in slices}
    assert not used & failed
    assert used <= set(working) if working else used <= set(row.secondary)
    sent = bytes_by_card(slices)
    assert sum(sent.values()) == size
    if len(sent) == len(working or [c for c in row.secondary if c not in failed]):
        assert max(sent.values()) - min(sent.values()) <= SLICE_BYTES


def test_transfers_begin_at_any_near_card():
    """Each card that is near takes the first slice of some transfer."""
    firsts = [plan_transfer(1, (SERVER, "cpu:0"), (SERVER, "cuda:1"), seed=seed)[0] for seed in range(40)]
    assert {piece.local_card for piece in firsts} == {"a", "b"}


def test_both_ends_choose_for_themselves():
    """The sender's cards are near the source, the receiver's near the destination."""
    slices = plan_transfer(4 * SLICE_BYTES, (SERVER, "cuda:0"), (SERVER, "cuda:1"))
    assert {(piece.local_card, piece.remote_card) for piece in slices} == {("a", "c")}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Topology({}), "0 places"),
        (lambda: Topology({"cpu:0": Cards(())}), "one or more"),
        (lambda: Topology({"cpu:0": Cards(("a",), ("a",))}), "each once"),
        (lambda: SERVER.cards("cpu:7"), "cpu:7"),
        (lambda: plan_transfer(0, (SERVER, "cpu:0"), (SERVER, "cpu:0")), "positive"),
    ],
)
def test_what_is_no_topology_is_refused(make, said):
    """Empty servers, places without cards and unknown places are a sentence."""
    with pytest.raises(ValueError, match=said):
        make()
