"""Folders of models that are as others leave them: each starts as in transformers, or is refused in a sentence."""

import json
import os
import re
import signal
import subprocess
import sys

import flat
import httpx
import pytest
import torch
from model_folders import BY_NAME, FOLDERS, TEMPLATE, after, base, content, fields, make, without
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from mooncake_lab.cli import app
from mooncake_lab.engine import CoupledEngine, EngineSettings, GenerationRequest, check_model, load_model
from mooncake_lab.serving import LiveCluster, WorkerProcesses
from mooncake_lab.serving.openai_api.text_stream import text_of
from mooncake_lab.serving.openai_api.tokenizer import tokenizer_of

GENERATION = "generation_config.json"
PROMPT = [1, 7, 40, 11, 300, 25, 80]
STARTS = [folder.name for folder in FOLDERS if not folder.refused]
REFUSED = [folder.name for folder in FOLDERS if folder.refused]


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@torch.inference_mode()
def greedy(directory, new_tokens):
    """Tokens of transformers, whatever ends them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = list(PROMPT)
    for _ in range(new_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", STARTS)
def test_a_folder_that_transformers_loads_is_the_same_model(parent, name):
    """Its tokens are those of transformers, and the ids and texts of its tokenizer, too."""
    directory = make(BY_NAME[name], parent)
    config, expected = check_model(str(directory)), greedy(directory, 12)
    model = load_model(str(directory), device="cpu", dtype="float32", backend="dense")
    engine = CoupledEngine(model, settings=EngineSettings(cache_blocks=16))
    engine.submit(GenerationRequest(prompt=PROMPT, max_new_tokens=12, end_tokens=()))
    assert list(engine.run()[0].tokens) == expected
    assert model.config.max_positions == config.max_positions
    ours, theirs = tokenizer_of(str(directory)), AutoTokenizer.from_pretrained(directory)
    for text in ("hello 你好 world", "สวัสดี 👩‍👩‍👧"):
        assert ours.encode(text) == theirs.encode(text)
    assert text_of(ours.stream(), expected) == theirs.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        (fields(eos_token_id=[5, 9]), (5, 9)),
        (fields(eos_token_id=None), ()),
        (fields(without=("eos_token_id",)), ()),
        (after(fields(eos_token_id=5), content(GENERATION, '{"eos_token_id": [9, 2]}')), (9, 2)),
    ],
    ids=["list", "null", "missing", "of generation_config.json"],
)
def test_the_ends_of_answers_are_those_of_transformers(tmp_path, change, ends):
    """`generation_config.json` counts more than the config; without the field nothing ends an answer."""
    base(tmp_path / "model")
    without(GENERATION)(tmp_path / "model")
    change(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.eos_token_id
    assert check_model(str(tmp_path / "model")).end_tokens == ends
    assert ends == (tuple(theirs) if isinstance(theirs, list) else () if theirs is None else (theirs,))


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_used_is_refused_in_a_sentence(parent, name):
    """The error, of one line, names the folder or a file in it and what is wrong, before anything is loaded."""
    directory = make(BY_NAME[name], parent)
    with pytest.raises((ValueError, OSError)) as raised:  # noqa: PT012  # one of both refuses it
        check_model(str(directory))
        tokenizer_of(str(directory))
    says = str(raised.value)
    assert re.search(BY_NAME[name].refused, says), says
    assert "\n" not in says
    assert "Traceback" not in says


@pytest.mark.parametrize("name", ["config_html", "shard_cut", "original_null", "weights_lfs"])
def test_every_command_refuses_it(parent, tmp_path, name, monkeypatch):
    """`generate` and `replay` say the same sentence, and end with code 1 before a worker is started."""
    directory = parent / name
    if not directory.is_dir():
        make(BY_NAME[name], parent)
    prompts, trace = tmp_path / "prompts.json", tmp_path / "trace.jsonl"
    monkeypatch.setattr(WorkerProcesses, "launch", None)
    prompts.write_text("[[1, 2, 3]]")
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 600, "output_length": 32, "hash_ids": [0, 1]}) + "\n"
    )
    for command in (["generate", "--prompt-ids", prompts], ["replay", trace], ["serve", "--port", "0"]):
        done = CliRunner().invoke(app, [str(word) for word in (*command, "--model", directory)])
        assert done.exit_code == 1, done.output
        assert re.search(BY_NAME[name].refused, done.stderr), done.output
        assert done.stderr.count("\n") == 1


def test_the_window_of_a_linearly_scaled_model_is_stretched(parent):
    """As in vLLM, positions are those of the config times the factor; `llama3` scaling changes none."""
    assert check_model(str(make(BY_NAME["linear"], parent / "window"))).max_positions == 1024
    assert check_model(str(make(BY_NAME["llama3_in_order"], parent / "window"))).max_positions == 512


def test_a_window_may_be_of_any_size(tmp_path):
    """What counts is what the options leave of it."""
    base(tmp_path / "model")
    fields(max_position_embeddings=10**30)(tmp_path / "model")
    assert check_model(str(tmp_path / "model")).max_positions == 2**31 - 1


def test_a_name_that_is_no_folder_is_refused():
    """A name of the hub is not downloaded, and the error says so."""
    with pytest.raises(FileNotFoundError, match="there is no directory meta/llama; models are not downloaded"):
        check_model("meta/llama")
    with pytest.raises(ValueError, match="unknown model 'none'"):
        check_model("random:none")


@pytest.mark.parametrize("roles", [{}, {"coupled_nodes": 1}])
@pytest.mark.parametrize("window", [256, 64])
def test_a_short_window_is_timed_and_served(tmp_path, window, roles):
    """A model whose window is shorter than that of the options starts with its own, whatever the roles."""
    base(tmp_path / "model", max_position_embeddings=window)
    settings = {"model": str(tmp_path / "model"), "device": "cpu", "backend": "dense", "spares": 0}
    with LiveCluster(*flat.live(**settings, **roles)) as cluster:
        assert cluster.generate([PROMPT], max_new_tokens=12) == [tuple(greedy(tmp_path / "model", 12))]
        assert cluster.generate([[1] * (window - 1)], max_new_tokens=1)
        with pytest.raises(ValueError, match=f"together they may be {window}"):
            cluster.generate([[1] * window], max_new_tokens=1)


class Server:
    """`mooncake-lab serve` as a user starts it."""

    def __init__(self, directory, *options):
        program = [sys.executable, "-m", "mooncake_lab", "serve", "--model", directory, "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [*program, "--no-api-key", "--coupled-nodes", "1", "--device", "cpu", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        opened = json.loads(line)
        self.url, self.model = opened["url"], opened["model"]
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)

    def ask(self, path, **body):
        whole = {"model": self.model, "temperature": 0, "return_token_ids": True} | body
        return httpx.post(f"{self.url}/{path}", json=whole, timeout=60).json()["choices"][0]

    def streamed(self, path, **body):
        whole = {"model": self.model, "temperature": 0, "stream": True} | body
        lines = httpx.post(f"{self.url}/{path}", json=whole, timeout=60).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@pytest.mark.skipif(os.name != "posix", reason="ends the server with a signal")
def test_a_server_ends_at_the_end_token_of_the_tokenizer(tmp_path):
    """A server of a byte-fallback model gives transformers' tokens and texts, up to the tokenizer's end token.

    The engine goes on there, as `generate` of transformers does.
    """
    directory = tmp_path / "model"
    base(directory, "byte_fallback", max_position_embeddings=256)
    expected = greedy(directory, 24)
    theirs = AutoTokenizer.from_pretrained(directory)
    end = next(token for token in expected[4:] if theirs.convert_ids_to_tokens(token) is not None)
    fields("tokenizer_config.json", eos_token=theirs.convert_ids_to_tokens(end))(directory)
    ended = expected[: expected.index(end) + 1]
    model = load_model(str(directory), device="cpu", dtype="float32", backend="dense")
    engine = CoupledEngine(model, settings=EngineSettings(cache_blocks=16))
    engine.submit(GenerationRequest(prompt=PROMPT, max_new_tokens=24))
    assert list(engine.run()[0].tokens) == expected
    theirs = AutoTokenizer.from_pretrained(directory)
    with Server(directory) as server:
        found = server.ask("completions", prompt=PROMPT, max_tokens=24)
        assert (found["token_ids"], found["finish_reason"]) == (ended, "stop")
        assert found["text"] == theirs.decode(ended, skip_special_tokens=True)
        assert server.streamed("completions", prompt=PROMPT, max_tokens=24) == found["text"]
        found = server.ask("completions", prompt=PROMPT, max_tokens=24, ignore_eos=True)
        assert (found["token_ids"], found["finish_reason"]) == (expected, "length")
        assert found["text"] == theirs.decode(expected, skip_special_tokens=True)
        turns = [{"role": "developer", "content": "你好"}, {"role": "user", "content": "hi"}]
        chat = server.ask("chat/completions", messages=turns, max_tokens=4)
        prompt = theirs.apply_chat_template(turns, chat_template=TEMPLATE, return_dict=False)
        again = server.ask("completions", prompt=prompt, max_tokens=4)
        assert chat["token_ids"] == again["token_ids"]
