"""`mooncake-lab calibrate` against a small server: what it prints, and how it ends."""

import json
import signal
import subprocess
import sys
import time

import pytest
from openai_double import opened
from typer.testing import CliRunner

from mooncake_lab.cli import app

SMALL = ("--num-prompts", 6, "--repetitions", 2, "--rates", "0.5,0.9", "--max-concurrency", 4)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Requests of which each half of a slice begins alike."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lines = [
        {
            "timestamp": i * 100,
            "input_length": 1100,
            "output_length": 96,
            "hash_ids": [i % 2, 2 * i + 4, 2 * i + 5],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def calibrate(url, trace, *arguments):
    words = ["calibrate", url, "--trace", trace, "--max-model-len", 256, *SMALL, *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def test_everything_is_in_the_json_and_on_the_page(trace, tmp_path):
    """Two rates, each with errors of four quantities and the server's repetition; settings are read or assumed."""
    told = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="64",enable_prefix_caching="True"} 1.0\n'
    with opened(metrics=told) as double:
        done = calibrate(double.url, trace, "--json", "--html", tmp_path / "page.html", "--max-num-seqs", 8)
        assert done.exit_code == 0, done.stderr
        assert double.resets == 1 + 2 * 2
    found = json.loads(done.stdout)
    assert [rate["share"] for rate in found["rates"]] == [0.5, 0.9]
    for rate in found["rates"]:
        assert {row["quantity"] for row in rate["errors"]} == {"TTFT", "TBT", "E2E", "throughput"}
        assert len(rate["errors"]) == 10
        assert all(row["low"] <= row["error"] <= row["high"] for row in rate["errors"] if row["requests"] == 6)
        assert all(row["repetition"] >= 0 for row in rate["errors"])
        assert len(rate["points"]) == 6
    assert found["read"] == ["block_size", "kv_tokens", "prefix_caching", "scheduler"]
    assert found["assumed"] == ["max_num_batched_tokens"]
    assert (found["settings"]["kv_tokens"], found["settings"]["max_num_seqs"]) == (63 * 32, 8)
    assert any("prefixes of prompts sent twice are not found" in note for note in found["notes"])
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert "http://" not in page.replace(double.url, "").replace("http://www.w3.org", "")
    assert "assumed" in page


def test_requests_of_a_crowd_are_as_many_as_said(trace):
    """With two clients no crowd is larger, and no prompt is sent twice but those of the cache probe."""
    with opened() as double:
        assert calibrate(double.url, trace, "--max-concurrency", 2, "--repetitions", 1).exit_code == 0
    prompts = [tuple(body["prompt"]) for body in double.bodies]
    assert len(prompts) - len(set(prompts)) <= 2


def test_the_table_has_a_line_for_each_number(trace):
    """Without --json: settings and where they come from, the fit, and a line for each error."""
    with opened() as double:
        done = calibrate(double.url, trace, "--scheduler", "sarathi_serve")
    lines = done.stdout.splitlines()
    assert sum("TTFT" in line for line in lines) == 2 * 3
    assert any("sarathi_serve (given or observed)" in line for line in lines)
    assert any("max_num_seqs" in line and "(assumed)" in line for line in lines)
    assert "round 2 of 2: 0.9 of saturation" in done.stderr


@pytest.mark.parametrize(
    ("settings", "arguments", "says"),
    [
        ({"fault": "500"}, (), "status 500"),
        ({"fault": "500", "faults_from": 12}, (), "refuses one of"),
        ({"fault": "garbage", "faults_from": 30}, (), "cannot be talked to"),
        ({"fault": "stall", "faults_from": 12}, ("--timeout", 1), "sent nothing for 1 s"),
        ({"forms": ("text",), "says_usage": False}, (), "does not say in `usage`"),
        ({"forms": ()}, (), "answers no form of completion"),
        ({"tokens_an_event": 1000}, (), "come all at once, or without text"),
        ({"metrics": 'mooncake_workers{role="coupled"} 2.0\n'}, (), "has 2 coupled workers"),
        ({}, ("--model", "other"), "serves no model 'other'"),
        ({}, ("--num-prompts", 7), "14 are needed"),
        ({}, ("--max-model-len", 60), "at least 104 are needed"),
    ],
)
def test_what_ends_a_calibration_is_one_sentence(trace, settings, arguments, says):
    """On stderr, with exit code 1, and nothing on stdout."""
    with opened(**settings) as double:
        done = calibrate(double.url, trace, *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mooncake-lab calibrate: ")
    assert says in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("url", ["ftp://localhost", "localhost:8000", "http://", "http://[::1", "http://h:x"])
def test_what_is_no_url_is_refused(url, trace):
    """Nothing is sent."""
    done = calibrate(url, trace)
    assert (done.exit_code, "is no URL of a server" in done.stderr) == (1, True)


def test_rates_are_checked(trace):
    """Shares are positive numbers."""
    done = calibrate("http://127.0.0.1:1", trace, "--rates", "0.5,-1")
    assert (done.exit_code, "separated by commas" in done.output) == (2, True)


def test_ctrl_c_keeps_what_was_observed(trace):
    """A signal in the midst of a held-out run: the fit is printed, exit code 1, and stderr says why."""
    with opened() as double:
        words = ["calibrate", double.url, "--trace", trace, "--max-model-len", 256, *SMALL, "--repetitions", 50]
        command = [sys.executable, "-m", "mooncake_lab", *map(str, words), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            while len(double.bodies) < 120 and running.poll() is None:
                time.sleep(0.02)
            running.send_signal(signal.SIGINT)
            out, said = running.communicate(timeout=60)
    found = json.loads(out)
    assert running.returncode == 1
    assert "interrupted" in said
    assert found["ended_by"] == "interrupted"
    assert found["fit"]["prompts"] > 0
    assert found["rates"]
