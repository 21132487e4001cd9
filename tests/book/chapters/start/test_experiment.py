"""The front chapter's visit to a live cluster, small: its tables say what the log says."""

import pytest

from mooncake_lab.book.chapters.start import experiment as start
from mooncake_lab.conductor import LongestPrefix
from mooncake_lab.core import Finished, Moved, Prefilled

SMALL = start.Start(
    model="random:lab-tiny", shared_tokens=64, own_tokens=64, chunk_tokens=32, answer_tokens=4, burst=3
)


@pytest.fixture(scope="module")
def visit():
    return start.follow(SMALL)


def test_prompts_share_the_system_prompt_and_nothing_else():
    """Two requests begin with the same blocks; no other block of theirs is the same."""
    first, second = (set(SMALL.request(n).request.block_keys) for n in (0, 1))
    assert len(first & second) == SMALL.shared_tokens // 16
    other = start.Start(**{name: getattr(SMALL, name) for name in ("shared_tokens", "own_tokens")}, seed=1)
    assert not first & set(other.request(0).request.block_keys)


def test_answers_are_those_of_one_engine_and_nothing_stays(visit):
    """Eight layers of machinery change no token, and leave no process behind."""
    assert visit.tokens_equal
    assert set(visit.processes) == {"Conductor", "prefill-0", "decode-0"}
    assert len(set(visit.processes.values())) == 3
    assert start.left_running(visit) == []


def test_steps_follow_the_log(visit):
    """The stored system prompt is reused, the rest computed, and steps begin in the order of the paper."""
    table = start.steps(visit.log)
    assert table.loc["1 KVCache reuse", "what the log says"].startswith(f"{SMALL.shared_tokens} ")
    assert table.loc["2 incremental prefill", "what the log says"].startswith(f"{SMALL.own_tokens} ")
    assert (table["from_ms"] <= table["to_ms"]).all()
    assert table["from_ms"].is_monotonic_increasing
    last = next(record for record in visit.log if isinstance(record, Finished))
    assert table["to_ms"].max() == pytest.approx(1e3 * (last.at_s - visit.log[0].at_s))


def test_every_layer_of_every_stretch_moves_once(visit):
    """The reused prefix and each chunk have a piece a layer, in the order of the layers."""
    layers = visit.believed.shape.layers
    moves = start.timeline(visit.log, layers).query("what == 'move'")
    stretches = 1 + SMALL.own_tokens // SMALL.chunk_tokens
    assert moves["layer"].tolist() == list(range(layers)) * stretches
    sent = sum(record.bytes for record in visit.log if isinstance(record, Moved))
    assert sent == (SMALL.shared_tokens + SMALL.own_tokens) * visit.believed.shape.kv_bytes_per_token


def test_lanes_are_prefilled_one_after_the_other(visit):
    """A prefill worker computes one prompt at a time; every request of the burst has a lane without overlaps."""
    rows = start.lanes(visit.burst)
    assert rows["request"].nunique() == SMALL.burst
    prefills = rows.query("what == 'prefill'").sort_values("start_ms")
    assert (prefills["start_ms"].to_numpy()[1:] >= prefills["end_ms"].to_numpy()[:-1]).all()
    for _, lane in rows.sort_values("start_ms").groupby("request"):
        assert (lane["start_ms"].to_numpy()[1:] >= lane["end_ms"].to_numpy()[:-1] - 1e-6).all()
    reused = {r.request_id: r.reused_tokens for r in visit.burst if isinstance(r, Prefilled)}
    assert start.latencies(visit.burst)["reused_tokens"].to_dict() == reused


@pytest.mark.slow
def test_a_policy_of_ones_own_places_the_burst(visit):
    """Whatever has a `place` runs on the real cluster: longest prefix sends everybody to the first holder."""
    table = start.crowd_under(LongestPrefix(), SMALL, visit.believed)
    assert len(table) == SMALL.burst
    assert (table["ttft_ms"] > 0).all()
