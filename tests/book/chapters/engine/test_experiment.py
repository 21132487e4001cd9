"""The engine chapter's tables: equality, letters of the policies, reuse, and a race that is paired."""

import pytest

from mooncake_lab.book.chapters.engine import experiment as engine
from mooncake_lab.book.chapters.engine.experiment import beside_papers, statements
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.core import SCALES

TINY = engine.FourRequests(model="lab-tiny", rounds=1)


@pytest.fixture(scope="module")
def charts():
    """Iteration logs of every policy on the four requests."""
    return run(vary(TINY, policy=engine.POLICIES), cache=False)


@pytest.mark.parametrize("policy", ["request_level", "vllm", "sarathi", "sarathi_serve"])
def test_tokens_are_those_of_hugging_face(policy):
    """Whoever batches, and whether prompts are cut, the tokens are transformers'."""
    table = run(engine.SameAsHuggingFace(policy=policy, block_tokens=4, new_tokens=6), cache=False)
    assert table["same"].tolist() == [True] * 3
    assert (table["tokens"] == table["their_tokens"]).all()


class TestFourRequests:
    def test_no_policy_changes_an_answer(self, charts):
        """Each request has one answer, of as many tokens as it asked for, under all policies."""
        answers = charts.groupby("request")["answer"].unique()
        assert [len(found) for found in answers] == [1] * 4
        assert [len(found[0].split()) for found in answers] == list(TINY.new_tokens)

    def test_letters_emit_every_token(self, charts):
        """A request has as many emitting letters as tokens, in every policy."""
        told = charts[charts["letter"].isin(["P", "d"])].groupby(["policy", "request"]).size().unstack()
        assert (told == list(TINY.new_tokens)).all(axis=None)

    def test_letters_are_those_of_the_published_figure(self, charts):
        """Request level lets C wait for A's end, vLLM stalls A and B for it, and Sarathi-Serve cuts it."""
        letters = engine.letters(charts)
        assert letters.loc["request_level", "C"].strip() == "w" * 10 + "Pddd"
        assert "." in letters.loc["vllm", "A"]
        assert "." in letters.loc["vllm", "B"]
        assert letters.loc["sarathi_serve", "C"].strip() == "pppPddd"
        assert not letters.drop("vllm").apply(lambda column: column.str.contains(".", regex=False)).any(axis=None)

    def test_waits_count_stalls_and_order_times(self, charts):
        """Only vLLM stalls; a gap and a first token lie within the whole."""
        waits = engine.waits(charts)
        assert waits.index[waits["stalls"] > 0].tolist() == ["vllm"]
        assert (waits[["gap_ms", "first_c_ms"]].max(axis=1) <= waits["end_ms"]).all()

    def test_waits_are_counted_as_well_as_timed(self, charts):
        """Between two tokens of A lie both prompts and two decodes with Orca, one budget with Sarathi-Serve."""
        waits = engine.waits(charts)
        assert waits.loc[["orca", "sarathi_serve"], "gap_tokens"].tolist() == [384 + 192 + 2, 128]
        assert waits.loc[["request_level", "orca", "sarathi_serve"], "first_c_iterations"].tolist() == [11, 1, 4]

    def test_only_sarathi_keeps_d_waiting_while_c_has_pieces(self, charts):
        """SARATHI leaves the rest of C's last chunk empty; the other chunked policies start D in it."""
        chunked = engine.waits(charts)["first_d_iterations"].drop(list(engine.WHOLE_PROMPTS))
        assert chunked.to_dict() == {"vllm_chunked": 5, "splitfuse": 5, "sarathi": 6, "sarathi_serve": 5}

    def test_verdicts_rest_on_counts_alone(self, charts):
        """Stall-free batching is reproduced and every statement holds, whatever the clock said."""
        waits = engine.waits(charts)
        timed = waits.assign(gap_ms=0.0, first_c_ms=0.0, end_ms=0.0)
        table = beside_papers(timed).frame()
        assert table[["claim", "ours", "verdict"]].values.tolist() == [["S19", 0.0, "by construction"]]
        assert set(statements(timed, equal=True)["verdict"]) == {"holds"}
        assert statements(timed, equal=False)["verdict"].iloc[0] == "does not hold"


class TestSharedPrefix:
    def test_reuse_saves_whole_blocks_and_changes_nothing(self):
        """All but the first compute what is beyond the shared whole blocks; answers stay."""
        base = engine.SharedPrefixQuestions(shared_tokens=40, own_tokens=5, questions=3, new_tokens=4)
        table = run(vary(base, reuse=(False, True)), cache=False)
        assert (table.groupby("question")["answer"].nunique() == 1).all()
        computed = table.groupby("reuse")["computed_tokens"].apply(list)
        assert computed[False] == [45] * 3
        assert computed[True] == [45, 13, 13]


def test_race_has_a_row_a_case_and_names_the_machine():
    """Each batch and the burst are timed; the median lies between the extremes."""
    tiny = engine.Race(model="lab-tiny", context_tokens=8, batches=(1, 2), steps=3, burst=2, rounds=2)
    table = run(tiny, cache=False)
    assert len(table) == 3
    assert ((table["least"] <= table["ratio"]) & (table["ratio"] <= table["most"])).all()
    assert table["machine"].str.contains("1 thread").all()


def test_every_scale_has_a_plan():
    """Each scale measures something, and an unknown one is refused."""
    assert all(engine.race(scale) and engine.four_requests(scale) for scale in SCALES)
    for plan in (engine.race, engine.four_requests):
        with pytest.raises(ValueError, match="allowed are"):
            plan("huge")


def test_layer_shapes_chain():
    """What one operator gives is what the next one takes, gate and up being two halves."""
    table = engine.layer_shapes("lab-tiny").set_index("tensor")
    assert table.loc["gate_up", "outputs"] == 2 * table.loc["down", "inputs"]
    assert table.loc["down", "outputs"] == table.loc["qkv", "inputs"] == table.loc["output", "outputs"]
