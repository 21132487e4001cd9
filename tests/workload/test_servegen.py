"""Requests drawn from ServeGen's models of clients."""

import json

import pytest

from mooncake_lab.workload import TraceError
from mooncake_lab.workload.servegen import servegen_trace

ROWS = "0,2.0,1.0,Gamma,1.0,0.5\n600,,,,,\n1200,1.0,0.5,Weibull,2.0,1.1283791670955126\n"
LENGTHS = {
    "0": {"input_tokens": "{0: 0.5, 100: 0.25, 220: 0.25}", "output_tokens": "{30: 1.0}"},
    "1200": {"input_tokens": "{7: 1.0}", "output_tokens": "{9: 1.0}"},
}


@pytest.fixture
def clients(tmp_path):
    """A function that writes the files of clients and returns their folder."""

    def write(*pairs):
        for number, (rows, lengths) in enumerate(pairs):
            (tmp_path / f"chunk-{number}-trace.csv").write_text(rows)
            (tmp_path / f"chunk-{number}-dataset.json").write_text(json.dumps(lengths))
        return tmp_path

    return write


def test_requests_follow_the_models(clients):
    """Rates and lengths are those of the windows; a window without a family is silent."""
    trace = servegen_trace(clients((ROWS, LENGTHS)), duration_s=1800)
    early, late = trace.arrival_s < 650, trace.arrival_s > 1100
    assert (early | late).all()
    assert early.sum() == pytest.approx(1200, rel=0.1)
    assert late.sum() == pytest.approx(600, rel=0.1)
    assert {*trace.input_tokens[early].tolist()} == {100, 220}
    assert {*trace.input_tokens[late].tolist()} == {7}
    assert {*trace.output_tokens.tolist()} == {30, 9}
    assert trace.ids == "none"


def test_a_seed_and_a_folder_decide(clients):
    """The same seed gives the same requests, in order; another client adds its own and changes no others."""
    one = servegen_trace(clients((ROWS, LENGTHS)), seed=3)
    again = servegen_trace(clients((ROWS, LENGTHS)), seed=3)
    assert list(one.requests()) == list(again.requests())
    assert one.arrival_s.tolist() != servegen_trace(clients((ROWS, LENGTHS)), seed=4).arrival_s.tolist()
    both = servegen_trace(clients((ROWS, LENGTHS), (ROWS, LENGTHS)), seed=3)
    assert len(both) > 1.8 * len(one)
    faster = servegen_trace(clients((ROWS, LENGTHS)), seed=3, speed=10, duration_s=60)
    assert len(faster) == pytest.approx(2 * 1200, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "lengths", "says"),
    [
        ("0,2.0,1.0,Poisson,1.0,0.5\n", LENGTHS, "chunk-0-trace.csv:1: the row is '0,2.0,1.0,Poisson,1.0,0.5'"),
        ("0,2.0,1.0,Gamma,-1.0,0.5\n", LENGTHS, ":1: the row is"),
        ("0,2.0,1.0,Gamma\n", LENGTHS, ":1: the row is"),
        (ROWS, {"0": {"input_tokens": "{100: 1.0}"}}, "field 0.output_tokens is ''"),
        (
            ROWS,
            {"0": {"input_tokens": "__import__('os')", "output_tokens": "{1: 1.0}"}},
            "field 0.input_tokens is",
        ),
        (ROWS, [1], "allowed are distributions"),
        (ROWS, {"0": {"input_tokens": "{5: 0.0}", "output_tokens": "{1: 1.0}"}}, "has shares that are none"),
        (ROWS, {}, "no client sends a request"),
    ],
)
def test_refused(clients, rows, lengths, says):
    """A wrong file is named with its line or field; nothing in it is run."""
    with pytest.raises(TraceError) as refusal:
        servegen_trace(clients((rows, lengths)))
    assert says in str(refusal.value)


def test_a_folder_without_clients(tmp_path):
    """An empty folder, or a client without lengths, is named."""
    with pytest.raises(TraceError, match="has no client"):
        servegen_trace(tmp_path)
    (tmp_path / "chunk-7-trace.csv").write_text(ROWS)
    with pytest.raises(TraceError, match=r"chunk-7-dataset\.json is missing"):
        servegen_trace(tmp_path)
    with pytest.raises(ValueError, match="positive numbers are needed"):
        servegen_trace(tmp_path, speed=0)
