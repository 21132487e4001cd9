"""`mooncake-lab simulate`: what it prints, how it fails, and that every option does something."""

import json
from functools import cache

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.core import SLO, read_log
from mooncake_lab.metrics import check_log, run_summary
from mooncake_lab.workload import read_trace

PROMISED = {
    "requests", "finished", "rejected", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tbt_p90_s",
    "effective_request_capacity", "token_hit_rate", "prefill_gpu_s_per_request", "simulated_s", "wall_s", "cpu_s",
    "peak_memory_mib",
}  # fmt: skip
COST = {"wall_s", "cpu_s", "peak_memory_mib"}
DISAGGREGATED = ("--prefill-nodes", 2, "--decode-nodes", 2)
WIDE = ("--prefill-nodes", 4, "--decode-nodes", 2)
COUPLED = ("--coupled-nodes", 4)
OVERLOADED = ("--prefill-nodes", 2, "--decode-nodes", 1, "--speed", 3, "--ttft-slo", 4, "--tbt-slo", 0.028)
CLASSES = (*OVERLOADED, "--admission", "priority", "--urgent-share", 0.5)
SMALL = (*DISAGGREGATED, "--cache-tokens", 6000)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A trace of 120 requests in eight families, one every 0.15 s, each prompt longer than the family's last."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    rows = []
    for i in range(120):
        family, turn = i % 8, i // 8
        blocks = [0] + [1 + family * 100 + k for k in range(10 + 4 * turn)]
        tokens = 512 * len(blocks)
        rows.append(
            {"timestamp": 150 * i, "input_length": tokens, "output_length": 5 + 7 * i % 90, "hash_ids": blocks}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def numbers(*arguments) -> dict:
    """The result of a run, without its cost and settings."""
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() >= PROMISED
    return {key: value for key, value in found.items() if key not in COST | {"latency_model", "settings"}}


baseline = cache(numbers)
"""The runs that options are compared with; each is made once."""


def settings(*arguments) -> dict:
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["settings"]


@pytest.mark.parametrize("cluster", [DISAGGREGATED, COUPLED], ids=["disaggregated", "coupled"])
def test_the_same_numbers_every_time(file, cluster):
    """Two runs of one command differ in nothing but what they cost."""
    assert numbers(file, *cluster) == numbers(file, *cluster)


@pytest.mark.parametrize("cluster", [DISAGGREGATED, COUPLED], ids=["disaggregated", "coupled"])
def test_log_holds_the_run(file, cluster, tmp_path):
    """`--log` writes records from which the same numbers follow, and which keep the invariants."""
    path = tmp_path / "run.jsonl"
    found = numbers(file, *cluster, "--log", path)
    log = list(read_log(path))
    assert check_log(log) == ()
    expected = run_summary(log, SLO())
    assert {name: found[name] for name in expected} == {n: pytest.approx(value) for n, value in expected.items()}


@pytest.mark.parametrize(
    ("base", "option"),
    [
        (DISAGGREGATED, ("--prefill-nodes", 3)),
        (DISAGGREGATED, ("--decode-nodes", 1)),
        (DISAGGREGATED, ("--placement", "random")),
        (OVERLOADED, ("--admission", "slo")),
        ((*OVERLOADED, "--admission", "early"), ("--admission", "predictive")),
        ((*OVERLOADED, "--admission", "early"), ("--admission", "priority", "--urgent-share", 0.5)),
        (CLASSES, ("--urgent-share", 0.2)),
        (CLASSES, ("--seed", 1)),
        ((*COUPLED, "--speed", 3, "--tbt-slo", 0.028), ("--admission", "slo")),
        ((*OVERLOADED, "--admission", "predictive"), ("--decode-s", 10)),
        (DISAGGREGATED, ("--speed", 3)),
        (DISAGGREGATED, ("--node", "h800-node")),
        (DISAGGREGATED, ("--model", "llama3-8b")),
        (DISAGGREGATED, ("--testbed", "arxiv")),
        (DISAGGREGATED, ("--cache-tokens", 6000)),
        (SMALL, ("--ssd-tokens", 60_000, "--ssd-gb-per-s", 6)),
        (
            (*DISAGGREGATED, "--cache-tokens", 6000, "--ssd-tokens", 60_000, "--ssd-gb-per-s", 6),
            ("--ssd-gb-per-s", 1),
        ),
        (WIDE, ("--prefill-group", 2)),
        ((*WIDE, "--placement", "load_balance"), ("--view-age", 5)),
        (COUPLED, ("--view-age", 5)),
        (WIDE, ("--fail", "decode-0@5", "--fail", "prefill-1@2")),
        (COUPLED, ("--fail", "coupled-0@3")),
        (DISAGGREGATED, ("--ttft-slo", 0.6)),
        (DISAGGREGATED, ("--tbt-slo", 0.0265)),
        ((*DISAGGREGATED, "--placement", "random"), ("--seed", 1)),
        (COUPLED, ("--coupled-nodes", 2)),
        (COUPLED, ("--batching", "vllm_prefix")),
        (COUPLED, ("--placement", "random")),
        ((*COUPLED, "--cache-tokens", 40_000, "--batching", "tensorrt_llm"), ("--max-tokens", 20_000)),
        ((*COUPLED, "--batching", "vllm_prefix"), ("--cache-tokens", 40_000)),
        (COUPLED, ("--speed", 3)),
        (COUPLED, ("--tbt-slo", 9)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_every_option_has_an_effect(file, base, option):
    """Turning a knob moves the result; an option that does nothing would be a lie."""
    assert numbers(file, *base, *option) != baseline(file, *base)


@pytest.mark.parametrize("cluster", [(*WIDE, "--fail", "decode-0@5"), (*COUPLED, "--fail", "coupled-0@3")])
def test_a_death_loses_no_request(file, cluster):
    """`--fail` lets an instance die; its requests are placed again, and all finish."""
    found = numbers(file, *cluster)
    assert (found["finished"], found["rejected"]) == (found["requests"], 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --prefill-nodes and --decode-nodes, or --coupled-nodes"),
        ((*DISAGGREGATED, "--coupled-nodes", 2), "leave out --prefill-nodes and --decode-nodes"),
        ((*DISAGGREGATED, "--batching", "vllm"), "--batching is for coupled nodes"),
        ((*COUPLED, "--placement", "kvcache_centric"), "no store to fetch from"),
        ((*COUPLED, "--placement", "longest_prefix"), "local_prefixes"),
        ((*COUPLED, "--admission", "after_prefill"), "double_check"),
        ((*DISAGGREGATED, "--placement", "fewest_requests"), "coupled_instances"),
        ((*DISAGGREGATED, "--max-tokens", 100), "--max-tokens is for coupled nodes"),
        ((*DISAGGREGATED, "--admission", "early", "--decode-s", 5), "--decode-s is for --admission predictive"),
        ((*DISAGGREGATED, "--node", "abacus"), "allowed is hardware with a network card"),
        ((*DISAGGREGATED, "--model", "gpt9"), "unknown model 'gpt9'"),
        ((*DISAGGREGATED, "--testbed", "nsdi"), "fast, arxiv"),
        ((*DISAGGREGATED, "--testbed", "arxiv", "--node", "h800-node"), "leave both out"),
        ((*COUPLED, "--cache-tokens", 1), "capacity_blocks is 0"),
        ((*COUPLED, "--prefill-group", 2), "are for prefill nodes"),
        ((*WIDE, "--prefill-group", 3), "--prefill-nodes is 4; a multiple of --prefill-group, 3, is needed"),
        ((*WIDE, "--ssd-tokens", 6000), "give --ssd-tokens and --ssd-gb-per-s together"),
        ((*WIDE, "--ssd-tokens", 6000, "--ssd-gb-per-s", 1000), "predicts load from ssd"),
        ((*WIDE, "--view-age", "inf"), "inf is too large; allowed are numbers from 0"),
        ((*WIDE, "--fail", "prefill-0"), "--fail prefill-0: no time; give NAME@SECONDS"),
        ((*WIDE, "--fail", "prefill-9@1"), "no instance 'prefill-9' to fail"),
        ((*WIDE, "--admission", "priority"), "give --admission priority and --urgent-share together"),
        ((*COUPLED, "--keep-answers"), "--keep-answers is for decode nodes"),
        ((*WIDE, "--retries", 1), "--retries is for --sessions"),
        ((*WIDE, "--concurrency", 2), "--concurrency is for --sessions"),
        ((*WIDE, "--first-token-patience", 2), "--first-token-patience is for --sessions"),
        ((*WIDE, "--answer-patience", 2), "--answer-patience is for --sessions"),
        ((*WIDE, "--urgent-share", 0.5), "give --admission priority and --urgent-share together"),
    ],
)
def test_bad_usage_is_exit_code_2(file, arguments, said):
    """What cannot be meant is refused before anything runs, in words."""
    result = simulate(file, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_a_seed_of_nothing_is_said(file):
    """Where nothing is by chance a seed changes nothing, and who gave one is told."""
    assert "--seed changes nothing" in simulate(file, *DISAGGREGATED, "--seed", 1).stderr
    assert simulate(file, *DISAGGREGATED, "--placement", "random", "--seed", 1).stderr == ""


def test_what_cannot_be_read_is_exit_code_1(tmp_path):
    """A file that is no trace is named with its line; nothing comes on stdout."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    unread = simulate(bad, *DISAGGREGATED, "--json")
    assert (unread.exit_code, unread.stdout) == (1, "")
    assert "bad.jsonl:1" in unread.stderr


@pytest.mark.parametrize(
    ("command", "option"), [("simulate", "--log"), ("simulate", "--perfetto"), ("replay", "--log")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, command, option):
    """Even before the trace is read, whose single line here is bad."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    result = CliRunner().invoke(app, [command, str(bad), option, str(tmp_path / "missing" / "file")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot be written" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--log", "--perfetto"])
def test_a_disk_that_is_full_is_reported_with_the_option(file, option):
    """It is an error of the file that could not be written, and of no other."""
    result = simulate(file, *DISAGGREGATED, option, "/dev/full")
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        result.stderr == f"mooncake-lab simulate: {option} /dev/full cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("others", [("--log", "a"), ("--perfetto", "a"), ("--log", "b", "--perfetto", "b")])
def test_no_file_is_written_over_another(tmp_path, monkeypatch, others):
    """The trace is not replaced by its own log, nor a log by its timeline."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("{}\n")
    result = simulate(tmp_path / "a", *others)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "name another file" in " ".join(result.stderr.replace("│", " ").split())
    assert (tmp_path / "a").read_text() == "{}\n"


ORIGINS_MS = (0, 3_600_000, 1_787_000_000_000)


@pytest.mark.parametrize("cluster", [WIDE, COUPLED], ids=["disaggregated", "coupled"])
def test_times_count_from_the_first_request(tmp_path, cluster):
    """A trace from 0, one that begins late and one with epoch times give one log, one timeline and one summary."""
    struck = ("--fail", "prefill-0@2", "--fail", "decode-1@3") if cluster is WIDE else ("--fail", "coupled-0@2")
    found = []
    for origin_ms in ORIGINS_MS:
        trace, log, timeline = (tmp_path / name for name in ("trace.jsonl", "log.jsonl", "timeline.json"))
        lines = [
            {
                "timestamp": origin_ms + 450 * i,
                "input_length": 5120,
                "output_length": 60,
                "hash_ids": list(range(10)),
            }
            for i in range(30)
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = numbers(trace, *cluster, *struck, "--speed", 1.5, "--log", log, "--perfetto", timeline)
        found.append((summary, log.read_bytes(), timeline.read_bytes()))
    assert found[1:] == found[:1] * 2
    assert 9 < found[0][0]["simulated_s"] < 20


def test_a_trace_in_other_blocks(tmp_path):
    """`--block-size` reads a file that does not say its own; one that does is not read in another."""
    trace = tmp_path / "b16.jsonl"
    line = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": list(range(63))}
    trace.write_text(json.dumps(line) + "\n")
    refused = simulate(trace, *DISAGGREGATED)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "with a block size of 16 it would be right" in refused.stderr
    assert numbers(trace, *DISAGGREGATED, "--block-size", 16)["finished"] == 1
    assert settings(trace, *DISAGGREGATED, "--block-size", 16)["block_size_tokens"] == 16
    trace.write_text(json.dumps({**line, "trace_block_size": 16}) + "\n")
    assert numbers(trace, *DISAGGREGATED)["finished"] == 1
    refused = simulate(trace, *DISAGGREGATED, "--block-size", 512)
    assert (refused.exit_code, "allowed is 512" in refused.stderr) == (1, True)


def test_answers_of_one_token_have_no_tbt(tmp_path):
    """The summary says null in JSON and none in lines, and the requests are effective by their TTFT."""
    trace = tmp_path / "one.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}) + "\n")
    found = numbers(trace, *DISAGGREGATED)
    assert (found["tbt_mean_s"], found["tbt_p90_s"], found["effective_request_capacity"]) == (None, None, 1.0)
    assert "tbt_p90_s                    none\n" in simulate(trace, *DISAGGREGATED).stdout


def test_a_timeline_is_written_too(file, tmp_path):
    """`--perfetto` writes a file of trace events, with a span for each prefill."""
    path = tmp_path / "run.json"
    found = numbers(file, *DISAGGREGATED, "--perfetto", path)
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("cat") == "prefilled" for event in events) == found["finished"]


def test_json_holds_its_own_settings(file):
    """`--json` says what was asked for and what the defaults were, policies with their parameters."""
    found = settings(file, *COUPLED, "--batching", "tensorrt_llm", "--max-tokens", 77, "--fail", "coupled-0@3")
    (pool,) = found["pools"]
    assert (pool["type"], pool["nodes"], found["default_max_tokens"]) == ("CoupledPool", 4, 77)
    assert (found["node"], found["speed"]) == ("a800-node", 1.0)
    assert pool["batching"] == {"type": "TensorRTLLM"}
    assert found["failures"] == [{"type": "Failure", "instance": "coupled-0", "at_s": 3.0}]
    assert found["placement"] == {"type": "FewestRequests"}, "the router of chapter 10"


def test_the_decode_time_of_prediction_follows_trace_model_and_hardware(file):
    """Without `--decode-s`, t_d is the length-biased mean answer times a full step, at most the TBT limit."""

    def decode_s(*options):
        return settings(file, *DISAGGREGATED, "--admission", "predictive", *options)["admission"]["decode_s"]

    trace = read_trace(file)
    mean = (trace.output_tokens**2).sum() / trace.output_tokens.sum()
    assert mean > trace.output_tokens.mean()
    assert decode_s("--tbt-slo", 0.03) == pytest.approx(0.03 * mean)
    assert decode_s("--tbt-slo", 9) < 9 * mean
    assert decode_s("--tbt-slo", 9, "--node", "h800-node") < decode_s("--tbt-slo", 9)
    assert decode_s("--tbt-slo", 9, "--model", "llama3-8b") != decode_s("--tbt-slo", 9)
    assert decode_s("--decode-s", 4) == 4.0


def test_vllm_v1_finds_more_behind_a_router_that_knows_its_caches(file):
    """The same nodes find prefixes with any router, and more of them with a cache-aware one."""
    system = ("--coupled-nodes", 2, "--batching", "vllm_today")
    plain, aware = (numbers(file, *system, "--placement", name) for name in ("fewest_requests", "cache_aware"))
    assert plain["finished"] == aware["finished"] == plain["requests"]
    assert 0 < plain["token_hit_rate"] < aware["token_hit_rate"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Twelve chats of four turns, one every 0.2 s, each turn 2 s after the answer to the one before."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = []
    for turn in range(4):
        for chat in range(12):
            tokens = 3000 + 900 * turn
            blocks = [100 * chat + k for k in range(-(-tokens // 512))]
            row = {"timestamp": 200 * chat + 10_000 * turn, "input_length": tokens, "output_length": 600}
            rows.append(row | {"hash_ids": blocks, "session_id": str(chat)} | ({"delay": 2000} if turn else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CLOSED = (*DISAGGREGATED, "--sessions")


@pytest.mark.parametrize(
    ("base", "option"),
    [
        (DISAGGREGATED, ("--sessions",)),
        (COUPLED, ("--sessions",)),
        (CLOSED, ("--speed", 2)),
        (CLOSED, ("--keep-answers",)),
        (CLOSED, ("--concurrency", 3)),
        (CLOSED, ("--first-token-patience", 0.3)),
        (CLOSED, ("--answer-patience", 15)),
        ((*CLOSED, "--admission", "slo", "--ttft-slo", 0.35), ("--retries", 2)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_every_option_of_clients_has_an_effect(chats, base, option):
    """Clients that wait, and each way in which they behave, move the result; every turn is accounted for."""
    found = numbers(chats, *base, *option)
    assert found != baseline(chats, *base)
    if "--sessions" in (*base, *option):
        assert found["turns"] == 48
        assert found["requests"] == 48 - found["turns_not_sent"] + found["retries_sent"]
        assert found["turns_answered"] == found["finished"]
