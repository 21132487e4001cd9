"""`mooncake-lab trace`: what it prints where, and how it ends."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_lab import cli
from mooncake_lab.cli.trace import app
from mooncake_lab.workload import read_trace, reusable_blocks

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'
SYNTH = ("synth", "--like", "conversation", "--requests")


def call(*arguments):
    """Run the command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path):
    """A trace whose second line is bad."""
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD + GOOD.replace("600", "6000"))
    return path


def test_statistics_are_an_object_or_a_table(file):
    """With --json stdout is one object with the statistics of a good file, without it a table."""
    file.write_text(GOOD + GOOD.replace(": 0,", ": 2500,"))
    result = call("stats", file, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (found["requests"], found["mean_input_tokens"], found["duration_s"]) == (2, 600, 2.5)
    assert (found["blocks"], found["unique_blocks"], found["ideal_block_hit_rate"]) == (4, 2, 0.5)
    assert "600.0000" in call("stats", file).stdout
    file.write_text(GOOD)
    assert json.loads(call("stats", file, "--block-size", 300, "--json").stdout)["block_size_tokens"] == 300


def test_a_bad_line_fails_or_is_skipped(file):
    """It ends with 1, the reason on stderr and nothing on stdout; --lenient skips it, and counts it."""
    result = call("stats", file, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "t.jsonl:2: field 'hash_ids'" in result.stderr
    result = call("stats", file, "--lenient", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["requests"], found["skipped"]) == (0, 1, 1)
    assert "bad lines skipped: 1" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", "no-such-file"],
        ["stats", "t.jsonl", "--block-size", "0"],
        ["synth", "--like", "azure", "-o", "x.jsonl"],
        ["synth", "-o", "x.jsonl"],
        ["fetch", "azure"],
    ],
)
def test_bad_usage(file, monkeypatch, arguments):
    """A missing file, an unknown workload, none at all, or a block size of 0 are bad usage."""
    monkeypatch.chdir(file.parent)
    assert call(*arguments).exit_code == 2


def test_a_seed_writes_the_same_bytes(tmp_path):
    """The file holds as many requests as asked for, the same each time."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        result = call(*SYNTH, 50, "--seed", 7, "-o", path, "--json")
        assert json.loads(result.stdout)["requests"] == len(read_trace(path)) == 50
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    """The file has the same trace in it, and a seed writes the same bytes."""
    paths = [tmp_path / name for name in ("a.jsonl", "a.jsonl.gz", "b.gz")]
    for path in paths:
        assert call(*SYNTH, 50, "--seed", 7, "-o", path).exit_code == 0
    plain, first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert gzip.decompress(first) == plain
    assert len(read_trace(paths[1])) == 50


def test_clients_may_state_what_they_allow(tmp_path):
    """`--max-tokens` states a limit for each request, doubled where its answer is longer."""
    path = tmp_path / "stated.jsonl"
    assert call(*SYNTH, 300, "--max-tokens", 400, "-o", path).exit_code == 0
    stated = read_trace(path)
    assert set(stated.max_tokens.tolist()) > {400, 800}
    assert (stated.max_tokens >= stated.output_tokens).all()
    assert (stated.max_tokens[stated.output_tokens <= 400] == 400).all()


def test_no_file_is_overwritten_and_no_folder_made(file, tmp_path):
    """A file that exists is left alone unless --force says otherwise; a missing folder is named."""
    before = file.read_bytes()
    result = call(*SYNTH, 5, "-o", file)
    assert (result.exit_code, result.stdout, file.read_bytes()) == (1, "", before)
    assert "add --force" in result.stderr
    assert call(*SYNTH, 5, "-o", file, "--force").exit_code == 0
    assert len(read_trace(file)) == 5
    result = call(*SYNTH, 5, "-o", tmp_path / "new" / "x.jsonl")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"there is no folder {tmp_path / 'new'}" in result.stderr


def test_what_cannot_be_fetched_fails(tmp_path):
    """A fetch that fails ends with 1, a reason on stderr, and no file."""
    result = call("fetch", "conversation", "--to", tmp_path, "--url", "http://127.0.0.1:9/x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "could not fetch http://127.0.0.1:9/x" in result.stderr
    assert list(tmp_path.iterdir()) == []


FILES = Path(__file__).parents[1] / "workload/files"


def test_a_trace_of_another_format_is_converted(tmp_path):
    """The file has the same requests in Mooncake's format; stdout names it, with --json as an object."""
    made = tmp_path / "made.jsonl.gz"
    result = call("convert", FILES / "weka_subagent.jsonl", made, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) | {"format": "weka", "requests": 4, "skipped": 0} == json.loads(result.stdout)
    first, back = read_trace(FILES / "weka_subagent.jsonl"), read_trace(made)
    assert list(back.requests()) == list(first.requests())
    assert "4 requests" in call("convert", FILES / "weka_subagent.jsonl", tmp_path / "again.jsonl").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["wrong_count.jsonl", "new.jsonl"], ":2: field 'hash_ids' is a list of 2 ids"),
        (["mooncake.jsonl", "kept.jsonl"], "kept.jsonl exists already"),
        (["mooncake.jsonl", "none/new.jsonl"], "there is no folder"),
        (["mooncake.jsonl", "new.jsonl.zst"], "would not be what its name says"),
        (["azure_2023.csv", "new.jsonl", "--format", "burstgpt"], "a trace of BurstGPT has Timestamp"),
        (["azure_2023.csv", "new.jsonl", "--time-unit", "s"], "dates, which have no unit"),
        (["azure_2023.csv", "new.jsonl", "--id-scope", "session"], "have no ids"),
        (["mooncake.jsonl", "new.jsonl", "--format", "text"], "name a tokenizer"),
    ],
)
def test_a_conversion_that_fails_leaves_everything_as_it_was(tmp_path, arguments, says):
    """It ends with 1 and a sentence, and no file appears, is changed or is left half written."""
    kept = tmp_path / "kept.jsonl"
    kept.write_text("mine")
    source, output, *more = arguments
    result = call("convert", FILES / source, tmp_path / output, *more)
    assert (result.exit_code, result.stdout) == (1, "")
    assert says in result.stderr
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("kept.jsonl", "mine")]


def test_a_trace_is_not_converted_into_itself(file):
    """The file that is read cannot be the one that is written, --force or not."""
    before = file.read_bytes()
    assert call("convert", file, file, "--force").exit_code == 2
    assert file.read_bytes() == before


def test_lenient_conversion_counts_what_it_leaves_out(tmp_path):
    """Bad records are left out and counted; the first reasons go to stderr."""
    result = call("convert", FILES / "wrong_burstgpt_failed.csv", tmp_path / "t.jsonl", "--lenient", "--json")
    assert (result.exit_code, json.loads(result.stdout)["skipped"]) == (0, 1)
    assert ":3: field 'Response tokens' is '0'" in result.stderr


def test_requests_without_times_may_arrive_at_a_rate(tmp_path):
    """`--requests-per-s` draws Poisson arrivals with a seed, in the order of the file."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        call("convert", FILES / "azure_2023.csv", path, "--requests-per-s", 2, "--seed", 5)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_trace(paths[0]).input_tokens.tolist() == [4808, 3180, 7433]
    assert 0 < read_trace(paths[0]).arrival_s[-1] < 10


def test_a_description_tells_turns_growth_gaps_and_the_ceiling(tmp_path):
    """With --json stdout is one object; the figure and the page are written where asked for."""
    plot, page = tmp_path / "p.svg", tmp_path / "p.html"
    result = call("describe", FILES / "weka.jsonl", "--json", "--plot", plot, "--html", page)
    told = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (told["sessions"], told["sessions_known"], told["turns"]["mean"]) == (2, True, 2)
    assert told["growth_tokens"]["mean"] == (150 + 22) / 2
    assert told["token_hit_rate_ceiling"] == (2 * 64 + 2 * 64) / (180 + 330 + 128 + 150)
    assert told["reuse_gap_s"]["max"] == 7.5
    assert told["delay_s"]["mean"] == 5.5
    assert "<svg" in plot.read_text()
    assert "token hit rate ceiling" in page.read_text().replace("_", " ")
    assert "sessions" in call("describe", FILES / "weka.jsonl").stdout


NO_IDS = ["azure_2023.csv", "burstgpt_sessions.csv", "mooncake_lengths.jsonl"]


@pytest.mark.parametrize("name", NO_IDS)
def test_a_trace_without_ids_has_no_hit_rate(name):
    """Every command says so on stderr, and prints none of the numbers that follow from ids."""
    for command in ("stats", "describe"):
        result = call(command, FILES / name, "--json")
        told = json.loads(result.stdout)
        assert "no hit rate follows" in result.stderr
        rates = [value for key, value in told.items() if "hit_rate" in key or "unique" in key or "reuse" in key]
        assert len(rates) >= 3
        assert {*rates} == {None}
    cache = CliRunner().invoke(cli.app, ["cache", str(FILES / name), "--capacity", "inf"])
    assert (cache.exit_code, cache.stdout) == (1, "")
    assert "no hit rate follows" in cache.stderr
    simulated = CliRunner().invoke(
        cli.app, ["simulate", str(FILES / name), "--prefill-nodes", "1", "--decode-nodes", "1", "--json"]
    )
    assert simulated.exit_code == 0
    assert json.loads(simulated.stdout)["token_hit_rate"] is None


@pytest.mark.parametrize("name", ["bailian.jsonl", "weka.jsonl", "tracelab.jsonl", "mooncake_agents.jsonl"])
def test_commands_read_the_formats(name):
    """Simulation and cache take a trace of any format as it is."""
    cached = CliRunner().invoke(cli.app, ["cache", str(FILES / name), "--capacity", "inf", "--json"])
    told = json.loads(cached.stdout)
    trace = read_trace(FILES / name)
    assert (told["requests"], told["prefix_hits"]) == (len(trace), int(reusable_blocks(trace).sum()))
    simulated = CliRunner().invoke(
        cli.app, ["simulate", str(FILES / name), "--prefill-nodes", "1", "--decode-nodes", "1", "--json"]
    )
    assert json.loads(simulated.stdout)["finished"] == len(trace)


def test_requests_are_drawn_from_models_of_clients(tmp_path):
    """The file has the requests of a folder of ServeGen's; what cannot be drawn leaves no file."""
    (tmp_path / "chunk-0-trace.csv").write_text("0,2.0,1.0,Gamma,1.0,0.5\n")
    lengths = {"0": {"input_tokens": "{100: 1.0}", "output_tokens": "{30: 1.0}"}}
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps(lengths))
    made = tmp_path / "drawn.jsonl"
    told = json.loads(call("servegen", tmp_path, "-o", made, "--json").stdout)
    assert told["requests"] == len(read_trace(made)) > 1000
    assert read_trace(made).ids == "none"
    result = call("servegen", tmp_path, "-o", tmp_path / "none.jsonl", "--start", 9000)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no client sends a request" in result.stderr
    assert not (tmp_path / "none.jsonl").exists()
