"""`mooncake-lab serve` and `replay`: what they refuse before anything starts, and a trace through a cluster."""

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_lab import serving
from mooncake_lab.cli import app
from mooncake_lab.cli.live import _FIELDS, _GrowingFile, _replayed, _warnings, replay, serve
from mooncake_lab.cluster import ClusterSpec, CoupledPool, DecodePool, PrefillPool
from mooncake_lab.core import SLO, Arrived, Finished, FirstToken, read_log
from mooncake_lab.metrics import check_log, run_summary
from mooncake_lab.serving import FailedError, LiveOptions
from mooncake_lab.workload import read_trace


def test_every_option_of_a_cluster_reaches_its_spec():
    """An option of `serve` or `replay` names a field of the spec or of `LiveOptions`, or the command uses it."""
    kinds = (ClusterSpec, PrefillPool, DecodePool, CoupledPool, LiveOptions)
    known = {each.name for kind in kinds for each in fields(kind)} | {"prefill_nodes", "decode_nodes"}
    own = {"context", "served_model_name", "ttft_slo", "tbt_slo", "host", "port", "api_key", "no_api_key"}
    own |= {
        "decode_s",
        "shutdown_timeout",
        "log",
        "record",
        "json_",
        "format_",
        "trace",
        "num_prompts",
        "speed",
        "divide",
        "lenient",
        "block_size",
        "sessions",
        "concurrency",
        "retries",
        "first_token_patience",
        "answer_patience",
    }
    for command in (serve, replay):
        names = {_FIELDS.get(name, name) for name in inspect.signature(command).parameters}
        assert names - known <= own


@pytest.fixture
def file(tmp_path):
    """A trace of 12 requests, each beginning with the same block."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i * 100, "input_length": 1100, "output_length": 96, "hash_ids": [0, 2 * i + 1, 2 * i + 2]}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def words(done):
    """What a command printed, without the frame and the line breaks that a terminal gives it."""
    return " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--coupled-nodes", 1, "--prefill-nodes", 1), "do both stages"),
        (("--coupled-nodes", 1, "--placement", "kvcache_centric"), "share no store"),
        (("--no-api-key", "--api-key", "x" * 16), "--no-api-key uses no key"),
        (("--api-key", "short"), "the API key has 5 characters"),
        (("--batching", "vllm"), "leave out --batching"),
        (("--coupled-nodes", 1, "--cache-tokens", 4096), "leave out --cache-tokens"),
        (("--coupled-nodes", 1, "--ssd-dir", ".", "--ssd-tokens", 4096), "leave out --ssd-dir, --ssd-tokens"),
        (("--coupled-nodes", 1, "--transfer", "tcp"), "leave out --transfer"),
        (("--coupled-nodes", 1, "--pack-tokens", 64), "it is for prefill workers"),
        (("--coupled-nodes", 1, "--shared-store", "remote"), "leave out --shared-store"),
        (("--shared-store-tokens", 4096), "leave out --shared-store-tokens: there is no --shared-store"),
        (("--shared-store", "mooncake", "--shared-store-address", "here:70000"), "with a port from 1 to 65535"),
        (("--shared-store", "mooncake", "--shared-store-address", "here:0"), "with a port from 1 to 65535"),
        (("--served-model-name", ""), "--served-model-name is empty"),
        (("--coupled-nodes", 1, "--batching", "orca", "--chunk-tokens", 64), "orca never cuts a prompt"),
        (("--coupled-nodes", 1, "--keep-answers"), "coupled workers keep no answers"),
        (("--coupled-nodes", 1, "--admission", "predictive"), "separate prefill and decode pools"),
        (("--admission", "priority"), "live requests have none"),
        (("--admission", "predictive"), "needs --decode-s"),
        (("--decode-s", 3), "--decode-s is for --admission predictive"),
        (("--ttft-slo", 30), "leave out --ttft-slo"),
        (("--tbt-slo", 1), "leave out --tbt-slo"),
        (("--model", "folder", "--seed", 0), "leave out --seed"),
    ],
)
def test_serve_refuses(arguments, says):
    """Options that contradict each other, or change nothing, are refused before a worker starts."""
    done = invoke("serve", "--model", "random:lab-tiny", *arguments)
    assert done.exit_code == 2
    assert says in words(done)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--coupled-nodes", 1, "--batching", "orca", "--device-tokens", 4096),
        ("--coupled-nodes", 1, "--chunk-tokens", 64, "--placement", "random", "--admission", "early"),
        ("--pack-tokens", 512),
        ("--cache-tokens", 4096, "--chunk-tokens", 64, "--transfer", "tcp", "--seed", 1),
        ("--admission", "slo", "--ttft-slo", 30, "--tbt-slo", 1),
        ("--admission", "predictive", "--decode-s", 3),
        ("--model", "folder", "--placement", "random", "--seed", 1),
    ],
)
def test_serve_refuses_nothing_that_has_an_effect(arguments):
    """Such options get as far as the API key, which is looked at last."""
    done = invoke("serve", "--model", "random:lab-tiny", *arguments, "--api-key", "short")
    assert "the API key has 5 characters" in words(done)


@pytest.mark.parametrize(
    ("host", "token", "transfer", "says"),
    [
        ("0.0.0.0", None, "tcp", ["every client that can reach"]),  # noqa: S104  # a name, nothing listens
        ("::", None, "mooncake", ["every client that can reach", "without authentication"]),
        ("10.0.0.1", "t", "tcp", []),
        ("127.0.0.1", None, "tcp", []),
        ("::1", None, "tcp", []),
        ("localhost", None, "tcp", []),
    ],
)
def test_serve_warns(host, token, transfer, says):
    """Without a token on an address that others can reach, the server warns."""
    found = _warnings(host, token, {transfer, None})
    assert len(found) == len(says)
    assert all(part in line for part, line in zip(says, found, strict=True))


@pytest.mark.parametrize(
    ("found", "error", "kept"),
    [
        ([], ValueError("too long"), "old"),
        ([Arrived(at_s=0.0, request_id=0, input_tokens=1)], FailedError("no"), "new"),
    ],
)
def test_the_log_of_a_replay_is_that_of_what_was_served(monkeypatch, tmp_path, file, found, error, kept):
    """A run in which a request failed leaves its log; one that was refused leaves the log that was there."""

    class Failing(contextlib.nullcontext):
        log = found

        def run(self, _requests):
            raise error

        def __enter__(self):
            return self

    monkeypatch.setattr(serving, "LiveCluster", lambda *_: Failing())
    path = tmp_path / "log.jsonl"
    path.write_text("old")
    with pytest.raises(type(error)):
        _replayed(read_trace(file), None, None, SLO(ttft_s=1, tbt_s=1), path)
    assert ("old" if path.read_text() == "old" else "new") == kept


def test_replay_refuses(file):
    """So are a divisor that cuts blocks, a window that no request fits into, and what `serve` refuses."""
    done = invoke("replay", file, "--divide", 7)
    assert done.exit_code == 2
    assert "block size of 512" in words(done)
    assert "leave out --batching" in words(invoke("replay", file, "--batching", "vllm"))
    assert invoke("replay", file, "--max-model-len", 3).exit_code == 2
    assert "--concurrency is for --sessions" in words(invoke("replay", file, "--concurrency", 3))


def test_replay_reads_a_trace_in_other_blocks(tmp_path, monkeypatch):
    """`--block-size` is the trace's, divided like its lengths before the cluster starts."""
    path, seen = tmp_path / "b64.jsonl", []
    path.write_text('{"timestamp": 5000, "input_length": 130, "output_length": 64, "hash_ids": [1, 2, 3]}\n')
    monkeypatch.setattr(
        "mooncake_lab.cli.live._replayed", lambda trace, spec, *_: seen.append((trace, spec)) or {}
    )
    assert invoke("replay", path).exit_code == 1
    assert invoke("replay", path, "--block-size", 64).exit_code == 0
    ((trace, spec),) = seen
    assert (trace.block_size_tokens, spec.block_size_tokens, trace.arrival_s.tolist()) == (2, 2, [0.0])


@pytest.mark.slow
def test_replay(file, tmp_path):
    """A trace goes through a cluster of its own; what is printed follows from the log that is written."""
    log = tmp_path / "log.jsonl"
    done = invoke("replay", file, "--speed", 10, "--json", "--log", log, "--placement", "cache_aware")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    records = list(read_log(log))
    assert check_log(records) == ()
    assert printed["finished"] == 12
    assert printed["output_tokens"] == 12 * 3
    summary = run_summary(records, SLO())
    assert printed["ttft_p50_s"] == summary["ttft_p50_s"]
    assert printed["token_hit_rate"] > 0.2


@pytest.mark.slow
def test_replay_of_sessions(tmp_path):
    """With `--sessions`, each turn comes its delay after the answer to the one before; the result counts them."""
    trace, log = tmp_path / "chats.jsonl", tmp_path / "log.jsonl"
    rows = []
    for turn in range(2):
        for chat in range(3):
            ids = [10 * chat + k for k in range(3 + 2 * turn)]
            row = {"timestamp": 50 * chat + 100 * turn, "input_length": 512 * len(ids), "output_length": 640}
            rows.append(row | {"hash_ids": ids, "session_id": str(chat)} | ({"delay": 300} if turn else {}))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = invoke("replay", trace, "--sessions", "--keep-answers", "--json", "--log", log)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert (printed["turns"], printed["turns_answered"], printed["finished"]) == (6, 6, 6)
    records = list(read_log(log))
    assert check_log(records) == ()
    arrived, finished = (
        {r.request_id: r.at_s for r in records if isinstance(r, kind)} for kind in (Arrived, Finished)
    )
    assert all(arrived[i + 3] >= finished[i] + 0.3 for i in range(3))


def trace_lines(folder):
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def test_a_log_that_ends_says_so(tmp_path, capsys, monkeypatch):
    """When a record finds no room the log keeps those before it, whole; a log goes on, a trace begins anew."""
    path = tmp_path / "log.jsonl"
    record = FirstToken(at_s=1.0, request_id=1)
    with _GrowingFile(path) as log:
        log.write(record)
        whole = log._file

        class Full:
            def write(self, line):
                return whole.write(line[:5])

            def __getattr__(self, name):
                return getattr(whole, name)

        monkeypatch.setattr(log, "_file", Full())
        log.write(record)
        assert log.is_broken
        log.write(record)
    assert list(read_log(path)) == [record]
    assert "ends here, but requests continue: 5 of" in capsys.readouterr().err
    with _GrowingFile(path) as log, _GrowingFile(tmp_path / "trace.jsonl", "trace", replaces=True) as trace:
        log.write(record)
        trace.write({"timestamp": 0})
    with _GrowingFile(tmp_path / "trace.jsonl", "trace", replaces=True) as trace:
        trace.write({"timestamp": 1})
    assert (list(read_log(path)), trace_lines(tmp_path)) == ([record] * 2, [{"timestamp": 1}])
    ours, theirs = os.pipe()
    with os.fdopen(ours) as reader, _GrowingFile(Path(f"/proc/self/fd/{theirs}")) as log:
        os.close(theirs)
        log.write(record)
        assert not log.is_broken
        assert json.loads(reader.readline())["request_id"] == 1
    with _GrowingFile(Path("/dev/full")) as log:
        log.write(record)
        assert log.is_broken
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "replay"])
def test_a_start_is_shown_and_its_failure_is_one_line(file, tmp_path, command):
    """Stderr says which workers start with what, and why they did not; there is no traceback."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho no such library >&2; exit 3\n")
    program.chmod(0o700)
    arguments = (
        ["serve", "--model", "random:lab-tiny", "--port", "0"] if command == "serve" else ["replay", str(file)]
    )
    script = f"import sys; sys.executable = {str(program)!r}; from mooncake_lab.cli import app; app({arguments!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "INFO starting prefill-0, decode-0: each loads random:lab-tiny with 1 threads" in done.stderr
    error = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"mooncake-lab {command}: (prefill|decode)-0 did not start: exited with status 3", error)
    assert "Traceback" not in done.stderr
