"""The chapters' numbers against the second simulator and the by-hand calculations of `by_claim.py`."""

import ast
import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import by_claim
import missing_here
import numpy as np
import pytest
from by_claim import CLAIMS
from own_caches import Lru
from own_clusters import DecodeNode, Machine, PrefillPool, Served, Vllm, everywhere, prefilled, slower
from own_traces import Job, spread

from mooncake_lab.book import paper

HERE = Path(__file__).parent
SCRIPTS = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))
RECORDS = Path(os.environ.get("MOONCAKE_LAB_RECORDS") or by_claim.RECORDS)
AT_ONCE = {"02_stages", "05_piggyback"}
"""Chapters whose rows cost less than a second."""


# --- independent ---


def imports_of(path):
    """Every module of the package that a file imports, with the names it takes from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "*") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or ".", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_it_shares_only_readers_with_the_package(path):
    """The scripts import the reader of traces and the printed numbers from the package, and nothing else."""
    allowed = {
        ("mooncake_lab.book", "paper"),
        ("mooncake_lab.workload", "find_trace"),
        ("mooncake_lab.workload", "read_trace"),
    }
    taken = {(module, name) for module, name in imports_of(path) if module.split(".")[0] == "mooncake_lab"}
    assert taken <= allowed
    text = path.read_text(encoding="utf-8")
    assert "import_module" not in text
    assert "__import__" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_of_the_printed_numbers_it_reads_no_verdict(path):
    """Of `mooncake_lab.book.paper` the scripts use facts, curves and constants, and no judgement."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "paper"
    }
    assert used <= {"fact", "curve", "points", "constant", "data_dir"}


def test_it_covers_enough():
    """At least thirty claims of at least seven chapters that judge them are computed a second time."""
    judged = [name for name in CLAIMS if by_claim.claims()[name].reach == "here"]
    assert len(judged) >= 30
    assert len({by_claim.claims()[name].chapter for name in judged}) >= 7


def test_every_tolerance_has_a_reason():
    """How close two numbers must be is stated with a reason, and at most a fifth but for one named claim."""
    assert all(mine.why for mine in CLAIMS.values())
    assert {name for name, mine in CLAIMS.items() if mine.share > 0.2} <= {"S13"}


# --- the second simulator, by hand ---


def job(at, prompt, answer, *blocks):
    return Job(at, prompt, answer, blocks or tuple(range(-(-prompt // 512))))


def test_the_block_that_was_used_longest_ago_leaves():
    """A cache of two blocks keeps the two that were used last."""
    cache = Lru(1024)
    for block in (1, 2, 1, 3):
        cache.touch(block, 512)
    assert list(cache.sizes) == [1, 3]


def test_prompts_of_one_node_queue():
    """The second of two equal prompts starts when the first one ends, and reuses it but for one token."""
    pool = PrefillPool(1, Machine())
    first, second = prefilled([job(0, 1024, 1), job(0, 1024, 1)], pool, everywhere)
    assert second.prefill_start == first.prefill_end == Machine().prefill(1024)
    assert second.cached == 1023


def test_a_gap_is_an_iteration():
    """A request alone in a decode node has one gap for each token after the first, as long as the iteration."""
    node, served = DecodeNode(Machine()), Served(job(0, 1000, 4))
    node.add(2.0, served)
    node.advance(math.inf)
    assert served.first == 2.0
    assert served.gaps == pytest.approx([Machine().decode(1, 1000 + i) for i in range(3)])


def test_a_prompt_stops_the_decodes_of_vllm():
    """While an instance computes a prompt, its other request waits: one of its gaps contains the whole prefill."""
    instance = Vllm(Machine())
    first = instance.add(job(0, 1000, 50))
    instance.advance(1.0)
    instance.add(job(1.0, 20_000, 2))
    instance.advance(math.inf)
    assert max(first.gaps) > Machine().prefill(20_000)
    assert np.sum(first.gaps > 0.1) == 1


def test_arrivals_are_spread_within_their_tick():
    """Requests of one tick keep their order and arrive before the next tick; another seed moves them elsewhere."""
    ticks = [job(3.0 * i, 512, 1) for i in range(20) for _ in range(10)]
    moved = spread(ticks, seed=1)
    times = [each.at for each in moved]
    assert times == sorted(times)
    assert all(old.at <= new.at < old.at + 3 for old, new in zip(ticks, moved, strict=True))
    assert times != [each.at for each in spread(ticks, seed=2)]


# --- against the chapters ---


@pytest.fixture(scope="session")
def at_once():
    """Rows of the chapters that compute their comparison in a moment, by claim."""
    from mooncake_lab.book.chapters.piggyback import experiment, model
    from mooncake_lab.book.chapters.stages.model import beside_papers
    from mooncake_lab.book.testbeds.fit_nodes import calibrate_paper_node

    tables = (
        beside_papers(calibrate_paper_node()),
        experiment.beside_papers(model.predictions(), model.ratio_sweep()),
    )
    return {row.claim: row.ours for table in tables for row in table.rows if row.decides}


def cheap(name):
    return by_claim.claims()[name].chapter in AT_ONCE


@pytest.mark.parametrize("name", [name for name in CLAIMS if cheap(name)])
def test_own_number_is_the_chapters(name, at_once):
    """The chapter's number is as close to the one computed here as stated beside the claim."""
    mine = CLAIMS[name]
    assert mine.agrees(mine.compute(), at_once[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLAIMS if not cheap(name)])
def test_own_number_is_the_recorded_one(name):
    """The recorded number of a chapter is as close to the one computed here as stated, or it is said why not."""
    mine = CLAIMS[name]
    if why := missing_here.traces(*mine.needs):
        pytest.skip(why)
    record = by_claim.recorded(RECORDS).get(name)
    if record is None:
        pytest.skip(f"{RECORDS} has no record about {name}; `make book` writes it, or set MOONCAKE_LAB_RECORDS")
    if record["ours"] is None or record["verdict"] == "too short to judge":
        pytest.skip(f"the record has no number for {name}: {record['verdict']}")
    assert mine.agrees(mine.compute(), record["ours"]) is not bool(mine.differs)


REPLAYS = Path(paper.data_dir()).parent / "measured" / "overload_replays.csv"
"""Rejections of chapter 11's whole-trace replays."""
NAMES = {"baseline": "after_prefill", "early": "early", "prediction": "predictive"}


def recorded_refusals(node, ttft_limit_s, policy):
    """Rejections by twin in the record, with 0.98 on arrival."""
    prefill, decode, constant_s = node
    with REPLAYS.open(encoding="utf-8", newline="") as file:
        return {
            int(row["twin"]): int(row["rejected"])
            for row in csv.DictReader(file)
            if row["policy"] == NAMES[policy]
            and row["workload"] == "toolagent"
            and row["arrival_threshold"] in {"", "0.98"}
            and int(row["decode_nodes"]) == 8
            and float(row["tbt_limit_s"]) == 0.1
            and float(row["ttft_limit_s"]) == ttft_limit_s
            and (float(row["prefill_factor"]), float(row["decode_factor"])) == (prefill, decode)
            and float(row["decode_constant_s"]) == constant_s
        }


@pytest.mark.slow
@pytest.mark.skipif(not REPLAYS.is_file(), reason="data/measured has no overload_replays.csv")
@pytest.mark.parametrize("policy", by_claim.POLICIES)
@pytest.mark.parametrize(
    ("node", "ttft_limit_s"), [((1.7, 6.5, 0.025), 15.0), ((1.7, 7.5, 0.025), 30.0)], ids=["A", "B"]
)
def test_rejections_under_overload(node, ttft_limit_s, policy):
    """Over seven whole twins, chapter 11 and this simulator reject the same number of requests within a twentieth.

    A single replay may differ by a tenth: one fetch more or less changes all that follows.
    """
    record = recorded_refusals(node, ttft_limit_s, policy)
    own = {
        twin: by_claim.refused(slower(Machine(), *node), ttft_limit_s, policy, 0.98, twin)
        for twin in by_claim.TWINS
    }
    assert set(record) >= set(own)
    assert sum(own.values()) == pytest.approx(sum(record[twin] for twin in own), rel=0.05)
    assert own == pytest.approx({twin: record[twin] for twin in own}, rel=0.1)


@pytest.mark.slow
def test_the_order_of_table_3_at_point_a():
    """At the review's point A prediction rejects least and the baseline most, as the mean of seven twins."""
    node = slower(Machine(), 1.7, 6.5, 0.025)
    baseline, early, prediction = (
        sum(by_claim.refused(node, 15.0, policy, 0.98, twin) for twin in by_claim.TWINS)
        for policy in by_claim.POLICIES
    )
    assert prediction < early < baseline


def test_the_program_prints_what_is_drawn():
    """`by_claim.py F43 S16 --json` prints both claims with the paper's number and its own."""
    command = [sys.executable, str(HERE / "by_claim.py"), "F43", "S16", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [row["claim"] for row in found] == ["F43", "S16"]
    assert found[0]["own"] == pytest.approx(5.859375)
    assert found[0]["paper"] == 6


def test_the_program_knows_its_claims():
    """A claim that is not computed here is refused by name, with those that are."""
    command = [sys.executable, str(HERE / "by_claim.py"), "F11"]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 2
    assert "F11" in run.stderr
    assert "F43" in run.stderr
