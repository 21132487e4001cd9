"""`mooncake-lab generate`: what it prints, and how it fails."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import mooncake_lab.engine.model
from mooncake_lab.cli import app

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture
def run(tmp_path):
    """Runs the command on a file of prompts."""

    def invoke(*arguments, content=None, model="random:lab-tiny"):
        file = tmp_path / "prompts.json"
        file.write_text(json.dumps(PROMPTS) if content is None else content)
        return CliRunner().invoke(
            app, ["generate", "--model", model, "--prompt-ids", str(file), *map(str, arguments)]
        )

    return invoke


def outputs(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["outputs"]


def test_json_is_one_object_with_outputs_and_timings_in_order(run):
    """One object; a token list and a timing a prompt, in the order of the file."""
    found = json.loads(run("--max-new-tokens", 5, "--json").stdout)
    assert [len(tokens) for tokens in found["outputs"]] == [5, 5, 5]
    assert [request["prompt_tokens"] for request in found["requests"]] == [7, 1, 8]
    assert all(0 < request["ttft_s"] == request["token_s"][0] for request in found["requests"])
    assert (found["device"], found["dtype"], found["generated_tokens"]) == ("cpu", "float32", 15)


def test_a_long_window_costs_no_memory(run, monkeypatch):
    """Rotary tables are as long as the longest prompt with its answer, not as the window of the model."""
    made, make_rope = [], mooncake_lab.engine.model.make_rope
    monkeypatch.setattr(
        mooncake_lab.engine.model,
        "make_rope",
        lambda config, *rest: made.append(rest[0]) or make_rope(config, *rest),
    )
    outputs(run("--max-new-tokens", 90, "--json"))
    assert made == [98]


@pytest.mark.parametrize(
    "options",
    [
        ("--batching", "request_level"),
        ("--batching", "vllm", "--block-size", 1),
        ("--batching", "sarathi", "--chunk-tokens", 3, "--max-requests", 2),
        ("--device-tokens", 16, "--block-size", 8, "--no-prefix-caching"),
        ("--backend", "dense"),
    ],
)
def test_no_option_of_the_engine_changes_greedy_tokens(run, options):
    """Batching, chunks, blocks and backends change when, never what."""
    plain = outputs(run("--max-new-tokens", 5, "--json"))
    assert outputs(run("--max-new-tokens", 5, "--json", *options)) == plain


def test_a_model_folder_gives_the_tokens_of_transformers(run, tmp_path):
    """`--model DIR` reads what `save_pretrained` wrote, and continues each prompt as transformers does."""
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    theirs = LlamaForCausalLM(shape).eval()
    theirs.save_pretrained(tmp_path / "llama")
    found = outputs(run("--max-new-tokens", 5, "--json", model=str(tmp_path / "llama")))
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5, pad_token_id=0
            )
        assert tokens == whole[0, len(prompt) :].tolist()


def test_without_json_each_line_is_an_output(run):
    """Token ids of one prompt a line on stdout, the rate on stderr."""
    result = run("--max-new-tokens", 3, "--temperature", 1, "--seed", 4)
    assert [len(line.split()) for line in result.stdout.splitlines()] == [3, 3, 3]
    assert "9 tokens in" in result.stderr


def test_a_request_that_a_policy_never_serves_says_why(run):
    """Orca cannot cut a prompt wider than an iteration: no tokens, and the reason; the others are served."""
    result = run("--batching", "orca", "--max-batch-tokens", 7, "--max-requests", 4, "--json")
    found = json.loads(result.stdout)
    assert [request["finish_reason"] for request in found["requests"]] == ["length", "length", "rejected"]
    assert "8 tokens of its prompt" in found["requests"][2]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arguments": ("--device-tokens", 16)}, "prompt 0: prompt and new tokens make 22 tokens of KVCache"),
        ({"content": "[[1, 300]]"}, "prompt 0: the prompt holds tokens 1 to 300"),
        ({"content": "[[1], []]"}, "prompt 1 has no tokens"),
        ({"content": "[]"}, "there are no prompts"),
        ({"content": '{"a": 1}'}, "not a JSON list of lists"),
        ({"content": "[[1.5]]"}, "not a JSON list of lists"),
        ({"model": "random:lab-giant"}, "unknown model 'lab-giant'"),
        ({"model": "no/such/directory"}, "has no config.json"),
        ({"arguments": ("--device", "abacus")}, "unknown device 'abacus'"),
    ],
)
def test_failures_are_one_sentence_and_exit_code_1(run, options, message):
    """What cannot be done is said on stderr, with nothing on stdout."""
    result = run(*options.pop("arguments", ()), **options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--batching", "magic"),
        ("--max-new-tokens", 0),
        ("--batching", "orca", "--chunk-tokens", 4),
        ("--device-tokens", 15),
    ],
)
def test_bad_usage_is_exit_code_2(run, options):
    """Unknown names, numbers out of range and options that exclude each other."""
    assert run(*options).exit_code == 2
