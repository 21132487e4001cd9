"""The chunked chapter's tables: laws of the cut, the real engine's equality, and what is measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.chapters.chunked.experiment import (
    ChunkedEqualsWhole,
    MeasuredChunks,
    beside_papers,
    chunk_loss_percent,
    chunk_medians,
    chunk_overhead,
    end_to_end_gain,
    intensities,
    masked_pairs,
    masks,
    pieces,
    reread_tokens,
    saturation,
)
from mooncake_lab.book.experiments import run
from mooncake_lab.book.paper import Verdict, claims

TINY = MeasuredChunks(model="lab-tiny", prompt_tokens=(24,), chunks=(8, 16, 64), rounds=2)
cuts = st.tuples(st.integers(1, 2000), st.integers(1, 500))


class TestCut:
    @given(cuts)
    def test_pieces_are_the_prompt(self, cut):
        """Pieces follow each other, none is empty, none exceeds a chunk, and together they are the prompt."""
        prompt, chunk = cut
        found = pieces(prompt, chunk)
        assert [start for start, _ in found] == np.cumsum([0, *(size for _, size in found)])[:-1].tolist()
        assert sum(size for _, size in found) == prompt
        assert all(1 <= size <= chunk for _, size in found)

    @given(cuts)
    def test_pairs_do_not_depend_on_the_cut(self, cut):
        """Attention computes P(P+1)/2 pairs whatever the chunks."""
        prompt, chunk = cut
        assert masked_pairs(prompt, chunk) == prompt * (prompt + 1) // 2

    @given(st.integers(1, 60), st.integers(1, 200))
    def test_rereads_of_whole_chunks(self, count, chunk):
        """N whole chunks read c N (N-1) / 2 tokens again."""
        assert reread_tokens(count * chunk, chunk) == chunk * count * (count - 1) // 2

    @given(st.integers(1, 40), st.integers(1, 12))
    def test_masks_under_each_other_are_the_triangle(self, prompt, chunk):
        """The masks of all pieces, padded and stacked, are the mask of the whole prompt."""
        stacked = np.vstack([np.pad(m, ((0, 0), (0, prompt - m.shape[1]))) for m in masks(prompt, chunk)])
        assert (stacked == np.tril(np.ones((prompt, prompt)))).all()


class TestModelled:
    def test_a_whole_prompt_has_no_overhead(self):
        """A chunk as long as the prompt costs what the prompt costs, and smaller ones never less in attention."""
        table = chunk_overhead((1024,), (64, 128, 256, 512, 1024)).query("tiles").set_index("chunk_tokens")
        assert table.loc[1024, ["attention", "prefill"]].tolist() == pytest.approx([1, 1])
        assert table["attention"].is_monotonic_decreasing

    def test_without_tiles_larger_chunks_are_never_dearer(self):
        """The teeth of the overhead are the tiles'."""
        overhead = chunk_overhead((3072,)).sort_values("chunk_tokens")
        assert overhead.query("not tiles")["prefill"].is_monotonic_decreasing
        assert not overhead.query("tiles")["prefill"].is_monotonic_decreasing

    def test_gains_are_of_both_kinds(self):
        """Every chunk is there with tiles and without."""
        table = end_to_end_gain([(1024, 18)], (128, 256))
        assert table.groupby("tiles")["fused_tokens"].apply(list).tolist() == [[128, 256], [128, 256]]

    def test_decode_attention_has_one_flop_a_byte_at_any_batch(self):
        """No batch shares a cache, while the matrices' intensity grows with it."""
        table = intensities((1, 16, 256)).query("stage == 'decode'")
        assert table.query("operator == 'attention'")["intensity_flops_per_byte"].tolist() == pytest.approx(
            [1] * 3, rel=1e-2
        )
        assert table.query("operator == 'ffn1'")["intensity_flops_per_byte"].is_monotonic_increasing

    def test_beside_papers(self):
        """Chunks of 64 and 512 cost what is printed, chunks of 128 less, and chunks of 256 more."""
        overhead, speeds = chunk_overhead(), saturation((512, 1024), (1,))
        table = beside_papers(overhead, speeds).frame()
        decided = table[table["decides"]].set_index("claim")["verdict"].to_dict()
        assert set(decided) == {each.id for each in claims() if each.chapter == "04_chunked"}
        assert {decided[name] for name in ("S10", "S43")} == {Verdict.REPRODUCED}
        assert {decided[name] for name in ("S11", "S42")} == {Verdict.NOT_REPRODUCED}
        assert decided["S41"] == Verdict.DIRECTION_ONLY
        assert 0 < chunk_loss_percent(overhead) < 25


class TestEngine:
    def test_chunked_equals_whole(self):
        """Keys, values and the first token of chunks are those of the whole prompt."""
        table = run(ChunkedEqualsWhole(prompt_tokens=150, chunks=(1, 13, 64, 149)), cache=False)
        assert table["iterations"].tolist() == [150, 12, 3, 2]
        assert table["same_first_token"].all()
        assert table[["keys_apart", "values_apart"]].max(axis=None) < 1e-4

    def test_each_round_holds_every_chunk_beside_the_whole(self):
        """Chunks below the prompt and the prompt itself, once a round; the whole over itself is one."""
        table = run(TINY, cache=False)
        assert table.groupby("round")["chunk_tokens"].apply(list).tolist() == [[8, 16, 24]] * 2
        assert (table.query("chunk_tokens == 24")["over_whole"] == 1).all()
        assert (table["seconds"] > 0).all()
        assert table["machine"].str.contains("1 thread").all()
        medians = chunk_medians(table)
        assert medians["iterations"].tolist() == [3, 2, 1]
        assert (medians["least"] <= medians["over_whole"]).all()
