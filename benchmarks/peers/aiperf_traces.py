"""Records how AIPerf's own loaders read the files of `tests/workload/files`: `aiperf.json` there.

Run: $(python benchmarks/peer_environments.py AIPerf) benchmarks/peers/aiperf_traces.py [OUTPUT]

Of each request: when it is sent (ms, None where the file does not say), its lengths, and how many of its blocks an
earlier request had as its prefix, as far as AIPerf counts that.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["aiperf==0.13.0"]
# ///

import gzip
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiperf.dataset.loader.bailian_trace import BailianTraceDatasetLoader
from aiperf.dataset.loader.burst_gpt import BurstGPTTraceDatasetLoader
from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader
from aiperf.dataset.loader.tracelab_trace import TraceLabTraceDatasetLoader
from aiperf.dataset.loader.weka_metric_prepass import MetricRecord, compute_shared_prefix_cache_metrics
from aiperf.dataset.loader.weka_trace import WekaTraceLoader, _subagent_request_absolute_t
from aiperf.dataset.synthesis.prefix_analyzer import PrefixAnalyzer

FILES = Path(__file__).parents[2] / "tests/workload/files"
RECORD = FILES / "aiperf.json"
NO_PROMPTS = SimpleNamespace(
    tokenizer=None, _hash_id_corpus_rng=SimpleNamespace(set_trace_id=lambda _: None), _cache={}
)
"""Stands where loaders look for what generates prompts: none is generated here."""
OF_LINES = {
    "mooncake": MooncakeTraceDatasetLoader,
    "bailian": BailianTraceDatasetLoader,
    "burstgpt": BurstGPTTraceDatasetLoader,
}


def of_lines(loader: Any, path: Path, block_size_tokens: int) -> dict[str, Any]:
    """The requests of a format with one request a line, and the share of each that hits.

    They stand in order of time, or in that of the file where one has no time.
    """
    rows = list[Any]()

    class InOrder(loader):
        def _preprocess_trace(self, trace: Any) -> None:
            super()._preprocess_trace(trace)
            rows.append(trace)

    InOrder(filename=path, prompt_generator=NO_PROMPTS).load_dataset()
    if all(row.timestamp is not None for row in rows):
        rows.sort(key=lambda row: row.timestamp)
    plain = [
        {
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": getattr(row, "hash_ids", None) or [],
        }
        for row in rows
    ]
    shares = None
    if all(each["hash_ids"] for each in plain):
        analyzer = PrefixAnalyzer(block_size=block_size_tokens)
        analyzer.analyze_traces(plain)
        shares = analyzer._compute_per_request_hit_rates()  # noqa: SLF001  # the public ones are means
    return {
        "at_ms": [row.timestamp for row in rows],
        "input_tokens": [row.input_length for row in rows],
        "output_tokens": [row.output_length for row in rows],
        "hit_shares": shares,
    }


def of_sessions(loader: Any, path: Path) -> dict[str, Any]:
    """The calls of sessions of agents, in order of time, and the blocks of each that hit within its session."""
    calls = list[tuple[float, Any, int]]()
    sessions = loader(filename=str(path), prompt_generator=NO_PROMPTS).load_dataset()
    for trace in (trace for traces in sessions.values() for trace in traces):
        found = list[tuple[float, Any]]()
        for each in trace.requests:
            if each.type == "subagent":
                found += [(_subagent_request_absolute_t(each, call), call) for call in each.requests]
            else:
                found.append((each.t, each))
        records = [
            MetricRecord((at, place, 0, 0), trace.id, place, call.hash_ids)
            for place, (at, call) in enumerate(found)
        ]
        hits = compute_shared_prefix_cache_metrics(records)
        calls += [(at, call, hits[trace.id, place][0]) for place, (at, call) in enumerate(found)]
    calls.sort(key=lambda one: one[0])
    return {
        "at_ms": [1000 * at for at, *_ in calls],
        "input_tokens": [call.input_length for _, call, _ in calls],
        "output_tokens": [call.output_length for _, call, _ in calls],
        "hit_blocks": [hits for *_, hits in calls],
    }


def recorded(name: str, told: dict[str, Any]) -> dict[str, Any]:
    """What AIPerf reads, or what it says where it does not."""
    path = FILES / name
    with tempfile.TemporaryDirectory() as folder:
        if name.endswith(".gz"):
            path = Path(folder) / name.removesuffix(".gz")
            path.write_bytes(gzip.decompress((FILES / name).read_bytes()))
        try:
            if told["format"] in OF_LINES:
                return of_lines(OF_LINES[told["format"]], path, told["block_size_tokens"])
            if told["format"] == "weka":
                return of_sessions(WekaTraceLoader, _a_file_each(path, Path(folder) / "sessions"))
            if told["format"] == "tracelab":
                return of_sessions(TraceLabTraceDatasetLoader, path)
        except Exception as error:  # noqa: BLE001  # whatever it says is the answer
            return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {"refused": "no loader for this format"}


def _a_file_each(path: Path, folder: Path) -> Path:
    """A folder with a file for each session, which is how AIPerf takes them."""
    text = path.read_text(encoding="utf-8")
    folder.mkdir()
    for number, one in enumerate([text] if path.suffix == ".json" else text.splitlines()):
        (folder / f"{number:03}.json").write_text(one, encoding="utf-8")
    return folder


if __name__ == "__main__":
    right = json.loads((FILES / "right.json").read_text(encoding="utf-8"))
    answers = {name: recorded(name, told) for name, told in right.items()}
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    output.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
