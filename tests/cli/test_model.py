"""`mooncake-lab model describe`: what it prints, and how it fails."""

import json

import pytest
from typer.testing import CliRunner

from mooncake_lab.cli import app

CONFIG = {
    "model_type": "mistral", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32, "sliding_window": 100, "torch_dtype": "bfloat16",
}  # fmt: skip


def describe(*arguments):
    return CliRunner().invoke(app, ["model", "describe", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path):
    """The folder of a model."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_and_its_config_are_one(folder):
    """Both print the same, and JSON has the numbers of the text."""
    found = describe(folder, "--tokens", 1000, "--json")
    assert found.exit_code == 0, found.output
    assert found.stdout == describe(folder / "config.json", "--tokens", 1000, "--json").stdout
    told = json.loads(found.stdout)
    assert told["lengths"] == [
        {"tokens": 1000, "kv_bytes": 4 * 256 * 100, "read_tokens": 100, "reusable_tokens": 512}
    ]
    assert told["equations"][0] == "kv_bytes(n) = 1,024 min(n, 100)"
    assert "kv_bytes(n) = 1,024 min(n, 100)" in describe(folder).stdout


def test_options_change_what_they_say(folder):
    """Half the bytes in fp8, checkpoints where they are asked for, and ignored fields."""
    of = {
        name: json.loads(describe(folder, "--tokens", 1000, "--json", *options).stdout)["lengths"][0]
        for name, options in (
            ("plain", ()), ("fp8", ("--kv-dtype", "fp8")), ("near", ("--checkpoint-tokens", 100)),
        )
    }  # fmt: skip
    assert of["fp8"]["kv_bytes"] == of["plain"]["kv_bytes"] / 2
    assert (of["plain"]["reusable_tokens"], of["near"]["reusable_tokens"]) == (512, 1000)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"new_field": 3}))
    assert describe(folder, "--ignore-field", "new_field").exit_code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(CONFIG | {"new_field": 3}), "new_field: not known for a 'mistral'"),
        (json.dumps(CONFIG | {"model_type": "t5"}), "model_type 't5' is not known"),
        ("[1]", "is not a JSON object"),
        ("{", "is not a JSON object"),
        ("", "is not a JSON object"),
    ],
)
def test_a_bad_config_is_one_sentence(folder, content, says):
    """The command says what is wrong on one line, and fails."""
    (folder / "config.json").write_text(content)
    found = describe(folder)
    assert (found.exit_code, found.stdout) == (1, "")
    (line,) = found.stderr.splitlines()
    assert says in line


def test_a_shape_takes_no_options_of_configs():
    """What would have no effect is refused, and an unknown name lists the shapes."""
    assert describe("llama3-70b", "--kv-dtype", "fp8").exit_code == 2
    found = describe("llama9")
    assert found.exit_code == 1
    assert "llama9 is no file, and no shape; shapes are llama2-70b, " in found.stderr
