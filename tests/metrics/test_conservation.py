"""I1, I2 and I3 over run logs."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import (
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Rejected,
    RunEnded,
)
from mooncake_lab.metrics import check_log


@dataclass(frozen=True)
class Case:
    """A log that breaks an invariant, and which."""

    records: tuple
    invariant: str
    sentence: str


def arrived(at_s=0.0):
    """Request 1 arrives."""
    return Arrived(at_s=at_s, request_id=1, input_tokens=8)


def placed(at_s=0.0):
    """Request 1 is placed."""
    return Placed(at_s=at_s, request_id=1, prefill_instance="p", decode_instance="d", reused_tokens=0)


def prefilled(at_s=1.0, start_s=0.0):
    """Request 1 is prefilled."""
    return Prefilled(at_s=at_s, request_id=1, instance="p", start_s=start_s, computed_tokens=8, reused_tokens=0)


def first(at_s=1.0):
    """Request 1 receives its first token."""
    return FirstToken(at_s=at_s, request_id=1)


def stretch(at_s=2.0, start_s=1.0, steps=2, first_step_s=0.5, step_growth_s=0.0):
    """Request 1 decodes alone."""
    return DecodeStretch(
        at_s=at_s,
        instance="d",
        start_s=start_s,
        steps=steps,
        first_step_s=first_step_s,
        step_growth_s=step_growth_s,
        request_ids=(1,),
    )


def finished(at_s=2.0, output_tokens=3):
    """Request 1 is done."""
    return Finished(at_s=at_s, request_id=1, output_tokens=output_tokens)


def rejected(at_s=2.0, stage="decode"):
    """Request 1 is refused."""
    return Rejected(at_s=at_s, request_id=1, stage=stage, reason="load")


def moved(at_s=1.0, start_s=0.5):
    """KVCache of request 1 moves."""
    return Moved(at_s=at_s, request_id=1, source="p", destination="d", start_s=start_s, bytes=1)


def cached(added=(), removed=()):
    """Blocks come to a cache, and leave it."""
    return CacheChanged(at_s=0.0, instance="p", added=added, removed=removed)


GOOD = (arrived(), placed(), prefilled(), first(), stretch(), finished())
BROKEN = {
    "no arrival": Case((placed(),), "I1", "without having arrived"),
    "two arrivals": Case((arrived(), arrived()), "I1", "arrives again"),
    "two ends": Case((*GOOD, rejected()), "I1", "after it was finished"),
    "a prefill that starts after the end": Case(
        (arrived(), placed(), rejected(at_s=1.0), prefilled(start_s=2.0, at_s=3.0)), "I1", "after it was rejected"
    ),
    "a prefill of a request that was refused on arrival": Case(
        (arrived(), rejected(at_s=1.0), prefilled(start_s=0.5, at_s=2.0)), "I2", "without it is placed"
    ),
    "a token after the end": Case((arrived(), rejected(at_s=1.0), stretch()), "I1", "after it was rejected"),
    "a lost token": Case((*GOOD[:-1], finished(output_tokens=4)), "I1", "4 tokens but received 3"),
    "two first tokens": Case((*GOOD[:4], first()), "I1", "second first token"),
    "time runs back": Case((arrived(at_s=5.0), placed(at_s=4.0)), "I2", "after a record at 5.0 s"),
    "prefill before placing": Case((arrived(), prefilled()), "I2", "prefill starts at 0.0 s without"),
    "prefill starts too early": Case(
        (arrived(), placed(at_s=0.5), prefilled(start_s=0.2)), "I2", "before it is placed"
    ),
    "token before placing": Case((arrived(), first()), "I2", "first token comes"),
    "token without a prefill": Case((arrived(), placed(), first()), "I2", "first token comes at 1.0 s without"),
    "token before its prefill": Case(
        (arrived(), placed(), first(), prefilled(at_s=3.0, start_s=2.0)), "I2", "first token comes"
    ),
    "decode before the first token": Case((arrived(), placed(), stretch()), "I2", "without its last token"),
    "decode overlaps": Case((*GOOD[:5], stretch(at_s=2.5, start_s=1.5)), "I2", "before its last token at 2.0 s"),
    "negative step": Case(
        (*GOOD[:4], stretch(steps=3, first_step_s=1.0, step_growth_s=-0.6)), "I2", "negative length"
    ),
    "no step": Case((*GOOD[:4], stretch(steps=0)), "I2", "has no step"),
    "not a time": Case((arrived(at_s=float("nan")),), "I2", "not a time"),
    "a block that comes twice": Case((cached(added=(1, 2)), cached(added=(2,))), "I3", "1 blocks come to p"),
    "a block that was never there leaves": Case(
        (cached(added=(1,)), cached(removed=(1, 2))), "I3", "1 blocks leave p"
    ),
    "ends before it starts": Case(
        (arrived(), placed(), prefilled(at_s=0.5, start_s=0.8)), "I2", "starts at 0.8 s"
    ),
}


@pytest.mark.parametrize("length", range(len(GOOD) + 1))
def test_a_good_log_keeps_the_invariants_whenever_it_is_cut(length):
    """A log that obeys I1 and I2 obeys them up to any horizon: requests may still be running."""
    assert check_log(GOOD[:length]) == ()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_log_is_found_out(name):
    """Each way to break an invariant is reported with the invariant's number and what happened."""
    found = check_log(BROKEN[name].records)
    assert any(v.invariant == BROKEN[name].invariant and BROKEN[name].sentence in v.sentence for v in found), found


@pytest.mark.parametrize("at", range(len(GOOD) - 1))
def test_dropping_a_cause_is_always_noticed(at):
    """Removing any record but the last from a good log leaves a log that breaks an invariant."""
    assert check_log(GOOD[:at] + GOOD[at + 1 :]) != ()


def test_work_may_take_no_time():
    """What begins and ends at one moment breaks nothing."""
    log = (arrived(at_s=1.0), placed(at_s=1.0), prefilled(start_s=1.0, at_s=1.0), *GOOD[3:])
    assert check_log(log) == ()


def test_a_block_may_come_and_not_stay():
    """What comes and leaves in one change is in both lists, and may come again."""
    assert check_log((cached(added=(1, 2), removed=(1,)), cached(added=(1,), removed=(2, 1)))) == ()


@given(st.integers(1, 30), st.floats(0.01, 1), st.floats(0, 0.1), st.sampled_from([-1e-5, 0.0, 1e-5]))
def test_a_stretch_ends_when_its_steps_add_up(steps, first_step_s, step_growth_s, off_s):
    """Step after step, each longer by the growth; a stretch that ends earlier or later breaks I2."""
    end_s = 1.0 + math.fsum(first_step_s + k * step_growth_s for k in range(steps)) + off_s
    grown = stretch(at_s=end_s, steps=steps, first_step_s=first_step_s, step_growth_s=step_growth_s)
    assert [v.invariant for v in check_log((*GOOD[:4], grown))] == ["I2"] * (off_s != 0)


def test_work_under_way_may_outlive_its_request():
    """A prefill or a move that began before its request was refused, for a pool that died, ends all the same."""
    assert check_log((arrived(), placed(), rejected(at_s=0.5), prefilled(), moved())) == ()


@pytest.mark.parametrize("stage", ["client", "failed"])
def test_a_worker_may_begin_a_prompt_until_it_is_told(stage):
    """What it begins before it hears that the client left is recorded; a token that follows breaks I1."""
    log = (
        arrived(),
        placed(),
        rejected(1.0, stage),
        prefilled(start_s=1.2, at_s=2.0),
        moved(start_s=1.1, at_s=2.0),
    )
    assert check_log(log) == ()
    assert [v.invariant for v in check_log((*log, stretch(at_s=3.0, start_s=2.0)))] == ["I1"]


ORDERS = {
    "a move after the end": (rejected, moved, "I1"),
    "a prefill after the end": (rejected, prefilled, "I1"),
    "a move before the arrival": (arrived, moved, "I2"),
    "a prefill before its placement": (placed, prefilled, "I2"),
    "a decode before the last token": (first, stretch, "I2"),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("apart_s", "breaks"), [(-0.25, True), (-2e-6, True), (-5e-7, False), (0.25, False)])
def test_causes_precede_effects_but_for_rounding(name, apart_s, breaks):
    """What follows may begin a rounding error before its cause and no earlier; an end turns the order around."""
    cause, effect, invariant = ORDERS[name]
    turned = -apart_s if invariant == "I1" else apart_s
    before = {rejected: (arrived(), placed()), arrived: (), placed: (arrived(),), first: GOOD[:3]}[cause]
    log = (*before, cause(at_s=1.0), effect(start_s=1.0 + turned, at_s=2.0 + turned))
    assert [v.invariant for v in check_log(log)] == [invariant] * breaks


@pytest.mark.parametrize("length", range(len(GOOD) + 1))
@pytest.mark.parametrize("tokens", range(5))
def test_the_end_of_a_run_has_the_tokens_of_what_still_runs(length, tokens):
    """At any horizon: those that the log has shown of a request in flight, and none of another request."""
    log = GOOD[:length]
    received = sum(
        1 if isinstance(r, FirstToken) else r.steps for r in log if isinstance(r, FirstToken | DecodeStretch)
    )
    had = 0 if length == len(GOOD) else received
    found = check_log((*log, RunEnded(at_s=2.0, tokens={1: tokens} if tokens else {})))
    assert [v.invariant for v in found] == ["I1"] * (tokens != had)
