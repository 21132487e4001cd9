"""Logs as timelines: the trace event format, held against its own rules."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from by_hand import four_requests
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Prefilled
from mooncake_lab.metrics import trace_events, write_perfetto
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

SPAN = {"name", "pid", "tid", "args"}
REQUEST = SPAN | {"cat", "id", "ts"}
FIELDS = {"M": SPAN, "X": SPAN | {"cat", "ts", "dur"}, "C": SPAN - {"tid"} | {"ts"}} | dict.fromkeys(
    "bne", REQUEST
)
"""The fields of the trace event format, by phase, besides the phase."""


@pytest.fixture(scope="module")
def log():
    spec, model, requests = four_requests()
    return Cluster(spec, model).run(requests)


def test_the_file_is_of_the_format(log, tmp_path):
    """Every event is one that the format knows, with its fields and no others; times are microseconds from 0."""
    path = tmp_path / "run.json"
    write_perfetto(path, log)
    file = json.loads(path.read_text())
    assert file["displayTimeUnit"] == "ms"
    assert len(file["traceEvents"]) > len(log)
    for event in file["traceEvents"]:
        assert set(event) == FIELDS[event["ph"]] | {"ph"}
        assert min(event.get("ts", 0), event.get("dur", 0)) >= 0
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_every_record_is_an_event_at_its_time_and_every_track_has_a_name(log):
    """Nothing of a log is dropped or shifted; groups and tracks are named before they are used, each once."""
    events = list(trace_events(log))
    groups = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len({event["pid"] for event in events}) == len(set(groups)) == 3
    named, drawn = set(), []
    for event in events:
        if event["ph"] == "M":
            assert (event["name"], event["pid"], event["tid"]) not in named
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            name = "thread_name" if event["ph"] == "X" else "process_name"
            assert event["ph"] == "C" or (name, event["pid"], event["tid"]) in named
            drawn.append(event)
    for event, record in zip(drawn, log, strict=True):
        start_s = getattr(record, "start_s", record.at_s)
        assert (event["ts"], event.get("dur", 0.0)) == (start_s * 1e6, (record.at_s - start_s) * 1e6)
        assert event["ph"] == "C" or event["cat"] in {type(record).__name__.lower(), "request"}


@given(st.lists(st.floats(0, 5), min_size=1, max_size=6))
def test_what_follows_without_a_break_is_on_one_track(durations_s):
    """A span that begins as the one before it ends does not overlap with it."""
    ends_s = list(accumulate(durations_s, initial=0.0))
    log = [
        Prefilled(at_s=end_s, request_id=i, instance="p", start_s=start_s, computed_tokens=1, reused_tokens=0)
        for i, (start_s, end_s) in enumerate(pairwise(ends_s))
    ]
    assert [event["args"]["name"] for event in trace_events(log) if event["name"] == "thread_name"] == ["p"]


def test_counters_say_what_caches_hold():
    """The last count of each node is what it holds in the end."""
    spec, model, requests = four_requests()
    cluster = Cluster(spec, model)
    events = [event for event in trace_events(cluster.run(requests)) if event["ph"] == "C"]
    last = {event["name"].split()[-1]: event["args"]["blocks"] for event in events}
    assert last == {name: len(cluster.executor.prefix_caches.stores[name].keys()) for name in last}
    assert sum(last.values()) > 0


def test_every_request_begins_and_ends_once():
    """Also where one dies on the way and is placed again."""
    _, model, requests = four_requests()
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2, block_size_tokens=500)
    dying = Cluster(spec, model, SimulationOptions(failures=(Failure("decode-0", 1.1),)))
    phases = [(e["ph"], e["id"]) for e in trace_events(dying.run(requests)) if "id" in e]
    for phase in "be":
        assert sorted(i for p, i in phases if p == phase) == [0, 1, 2, 3]


def test_spans_of_a_track_do_not_overlap():
    """Also where a group of nodes computes two prompts at once: each span is over before the next one begins."""
    _, model, requests = four_requests()
    grouped = ClusterSpec.disaggregated(prefill_nodes=2, prefill_group=2, chunk_tokens=500, block_size_tokens=500)
    at_once = [
        replace(traced, request=replace(traced.request, arrival_s=0.0), output_tokens=3) for traced in requests
    ]
    log = Cluster(grouped, model).run(at_once)
    tracks = defaultdict(list)
    for event in trace_events(log):
        if event["ph"] == "X":
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))
    prefills = sorted((r.start_s, r.at_s) for r in log if isinstance(r, Prefilled))
    assert any(end > begin for (_, end), (begin, _) in pairwise(prefills))
