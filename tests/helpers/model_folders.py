"""Folders of models as downloads and other programs leave them, and what must become of each.

`python tests/helpers/model_folders.py FOLDER` writes all of them, to be tried by hand.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizer_kinds
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n"
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILES = FIRST, _ = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Folder:
    """One folder: how it differs from a good one, and what is right."""

    name: str
    change: Callable[[Path], None]
    refused: str = ""
    """What the error says, as a regular expression; empty where the model must start."""
    kind: str = "byte_level"
    """Of its tokenizer."""


def base(directory, kind="byte_level", **config):
    """A good folder: a seeded random Llama, its tokenizer and a chat template."""
    directory.mkdir(parents=True)
    sizes = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**(sizes | config))).save_pretrained(directory)
    tokenizer_kinds.save(tokenizer_kinds.KINDS[kind](), directory)
    name = "LlamaTokenizer" if kind == "byte_fallback" else "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": name, "bos_token": "<s>", "unk_token": tokenizer_kinds.UNKNOWN}
    write(directory / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})


def read(path):
    return json.loads(path.read_text())


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def fields(file="config.json", *, without=(), **changes):
    """Change fields of a JSON file, and leave out others."""

    def change(directory):
        path = directory / file
        found = (read(path) if path.is_file() else {}) | changes
        write(path, {name: value for name, value in found.items() if name not in without})

    return change


def content(file, text):
    return lambda directory: write(directory / file, text)


def without(*files):
    return lambda directory: [(directory / file).unlink() for file in files]


def cut(file, keep):
    """A file of which only some bytes came; fewer than 0 are counted from the end."""

    def change(directory):
        path = directory / file
        path.write_bytes(path.read_bytes()[:keep])

    return change


def rope(scaling, **changes):
    """A config of transformers 4."""
    return fields(without=("rope_parameters",), rope_theta=10000.0, rope_scaling=scaling, **changes)


def sharded(directory):
    """The same weights in two files and their index."""
    tensors = load_file(directory / SINGLE)
    names = sorted(tensors)
    shards = {file: names[i::2] for i, file in enumerate(FILES)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    write(directory / INDEX, {"metadata": {}, "weight_map": weight_map})
    (directory / SINGLE).unlink()


def after(*changes):
    return lambda directory: [change(directory) for change in changes]


def tensors(change):
    """Change the tensors of the single file."""

    def changed(directory):
        found = load_file(directory / SINGLE)
        change(found)
        save_file(found, directory / SINGLE, metadata={"format": "pt"})

    return changed


def headless(found):
    """As `LlamaModel` saves them: no head, and no `model.` before the names."""
    found.pop("lm_head.weight")
    renamed = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    found.clear()
    found.update(renamed)


def swapped(directory):
    """An index that names the other file for each tensor."""
    index = read(directory / INDEX)
    other = dict(zip(FILES, reversed(FILES), strict=True))
    write(
        directory / INDEX,
        index | {"weight_map": {name: other[file] for name, file in index["weight_map"].items()}},
    )


def stale_index(*, old_shards):
    """An index of former weights beside the single file of new ones."""

    def change(directory):
        shutil.copy(directory / SINGLE, directory / "new")
        tensors(lambda found: [tensor.mul_(-1.5) for tensor in found.values()])(directory)
        sharded(directory)
        (directory / "new").rename(directory / SINGLE)
        if not old_shards:
            without(*(path.name for path in directory.glob("model-*.safetensors")))(directory)

    return change


def as_is(_directory):
    """No change."""


def only_tokenizer_files(*names, **files):
    """No other files of the tokenizer than these."""

    def change(directory):
        for path in directory.glob("tokenizer*"):
            if path.name not in names:
                path.unlink()
        for name, text in files.items():
            write(directory / name.replace("_model", ".model"), text)

    return change


FOLDERS = (
    Folder("good", as_is),
    # text from tokens
    Folder("byte_fallback", as_is, kind="byte_fallback"),
    Folder("unigram", as_is, kind="unigram"),
    Folder("unigram_bytes", as_is, kind="unigram_bytes"),
    # a folder without a usable tokenizer
    Folder("no_tokenizer_file", only_tokenizer_files("tokenizer_config.json"), "_config.json but no tok"),
    Folder("only_spm", only_tokenizer_files("tokenizer_config.json", tokenizer_model="\n\x0e\n\x05<unk>"),
           "needs the package sentencepiece"),
    Folder("only_tiktoken", only_tokenizer_files(tokenizer_model="IQ== 0\nIg== 1\n"), "package tiktoken"),
    Folder("tokenizer_lfs", content("tokenizer.json", LFS), r"tokenizer\.json is a pointer of Git LFS"),
    Folder("tokenizer_cut", cut("tokenizer.json", 500), r"tokenizer\.json: its 500 bytes are no JSON"),
    Folder("tokenizer_empty", content("tokenizer.json", ""), r"tokenizer\.json is empty"),
    Folder("settings_html", content("tokenizer_config.json", "<html>"), "its 6 bytes are no"),
    # two descriptions of one thing
    Folder("stale_old", stale_index(old_shards=True)),
    Folder("stale_missing", stale_index(old_shards=False)),
    Folder("shards", sharded),
    Folder("index_names_other_files", after(sharded, swapped)),
    Folder("tied_with_other_head", fields(tie_word_embeddings=True)),
    Folder("tied_with_equal_head", after(fields(tie_word_embeddings=True), tensors(
        lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()})))),
    Folder("tied_without_head", after(fields(tie_word_embeddings=True), tensors(
        lambda found: found.pop("lm_head.weight")))),
    Folder("tied_with_head_alone", after(fields(tie_word_embeddings=True), tensors(
        lambda found: found.pop("model.embed_tokens.weight")))),
    Folder("tied_without_prefix", after(fields(tie_word_embeddings=True), tensors(headless))),
    Folder("untied_without_prefix", tensors(headless), r"no tensor 'model\.embed_tokens\.weight' and 20 more"),
    Folder("two_dtypes", fields(torch_dtype="float16", dtype="float32")),
    # forms of rope
    Folder("llama3_no_original", rope(LLAMA3)),
    Folder("llama3_top_level", rope(LLAMA3, **{ORIGINAL: 64})),
    Folder("llama3_both", rope(LLAMA3 | {ORIGINAL: 128}, **{ORIGINAL: 32})),
    Folder("llama3_in_order", rope(LLAMA3 | {ORIGINAL: 64})),
    Folder("llama3_equal_cutoffs", rope(LLAMA3 | {ORIGINAL: 64, "low_freq_factor": 4.0})),
    Folder("llama3_other_order", rope(LLAMA3 | {ORIGINAL: 64, "low_freq_factor": 9.0})),
    Folder("rope_type_counts", rope(LLAMA3 | {"type": "linear", ORIGINAL: 64})),
    Folder("linear", rope({"type": "linear", "factor": 2.0})),
    Folder("linear_1", rope({"type": "linear", "factor": 1})),
    Folder("scaling_beside_parameters", fields(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=500.0)),
    Folder("scaling_null", rope(None)),
    Folder("scaling_empty", rope({})),
    Folder("scaling_without_type", rope({"factor": 2.0})),
    Folder("scaling_with_theta", rope({"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0})),
    Folder("parameters_without_theta", fields(rope_parameters={"rope_type": "default"}, rope_theta=700.0)),
    Folder("type_null", rope({"rope_type": None, "factor": 2.0}), r"config\.json: rope_scaling: rope type None"),
    Folder("original_null", rope(LLAMA3 | {ORIGINAL: None}), "original_max_position_embedd"),
    Folder("factor_null", rope({"type": "linear", "factor": None}), "rope_scaling: factor is None"),
    Folder("factor_text", rope({"type": "linear", "factor": "2.0"}), r"factor is '2\.0'; allowed is a number"),
    Folder("factor_missing", rope({"type": "linear"}), "rope_scaling: factor is missing"),
    Folder("low_missing", rope({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}), "low_freq"),
    Folder("parameters_nested", fields(rope_parameters={"full_attention": {"rope_type": "default"}}),
           r"config\.json: rope_parameters has a table of its own for 'full_attention'"),
    Folder("type_list", rope({"type": ["linear"], "factor": 2.0}), r"json: rope_scaling: rope type \['linear'\]"),
    Folder("partial_list", rope({"type": "linear", "factor": 2.0, "partial_rotary_factor": [1]}),
           r"json: rope_scaling: partial_rotary_factor is \[1\]"),
    Folder("original_fraction", rope(LLAMA3 | {ORIGINAL: 0.5}), r"json: RopeScaling\(.*original_positions=0"),
    Folder("theta_huge", fields(without=("rope_parameters",), rope_theta=10**400), "rope_theta is 1000.*000; all"),
    Folder("scaling_list", rope([1]), r"rope_scaling is \[1\]; allowed is an object or null"),
    Folder("theta_null", fields(without=("rope_parameters",), rope_theta=None), "json: rope_theta is None"),
    Folder("theta_null_inside", fields(rope_parameters={"rope_type": "default", "rope_theta": None}),
           r"config\.json: rope_parameters: rope_theta is None"),
    # other fields
    Folder("window_256", fields(max_position_embeddings=256)),
    Folder("window_64", fields(max_position_embeddings=64)),
    Folder("window_missing", fields(without=("max_position_embeddings",))),
    Folder("heads_null", fields(num_key_value_heads=None, hidden_size=32), r"tensor '.*k_proj\.weight' has shape"),
    Folder("head_dim_null", fields(head_dim=None)),
    Folder("head_dim_missing", fields(without=("head_dim",))),
    Folder("activation_swish", fields(hidden_act="swish")),
    Folder("eps_missing", fields(without=("rms_norm_eps",))),
    Folder("end_null", fields(eos_token_id=None)),
    Folder("end_list", fields(eos_token_id=[5, 9])),
    Folder("end_beyond", fields(eos_token_id=[5, 4000])),
    Folder("end_missing", fields(without=("eos_token_id",))),
    Folder("window_null", fields(max_position_embeddings=None), r"config\.json: max_position_embeddings is None"),
    Folder("window_text", fields(max_position_embeddings="512"), "max_position_embeddings is '512'"),
    Folder("eps_null", fields(rms_norm_eps=None), r"config\.json: rms_norm_eps is None; allowed is a number"),
    Folder("eps_text", fields(rms_norm_eps="1e-5"), r"config\.json: rms_norm_eps is '1e-5'"),
    Folder("end_list_null", fields(eos_token_id=[2, None]), r"config\.json: eos_token_id is \[2, None\]"),
    Folder("end_text", content("generation_config.json", '{"eos_token_id": "2"}'), "eos_token_id is '2'"),
    Folder("layers_many", fields(num_hidden_layers=100_000), "21 tensors in the .* that there are 100000 layers"),
    Folder("vocabulary_huge", fields(vocab_size=10**30), "vocab_size is 1000.*; allowed is a whole number from"),
    Folder("layers_null", fields(num_hidden_layers=None), r"config\.json: num_hidden_layers is None"),
    Folder("width_text", fields(hidden_size="32"), r"config\.json: hidden_size is '32'"),
    Folder("tie_null", fields(tie_word_embeddings=None), r"config\.json: tie_word_embeddings is None"),
    Folder("heads_3", fields(num_key_value_heads=3), r"config\.json: 4 query heads .* on 3 KV heads"),
    # half-downloaded
    Folder("config_missing", without("config.json"), r"config_missing .*has no config\.json"),
    Folder("config_html", content("config.json", "<html>404"), "its 9 bytes are no"),
    Folder("config_cut", cut("config.json", 200), r"config\.json: its 200 bytes are no JSON"),
    Folder("config_empty", content("config.json", ""), r"config\.json is empty"),
    Folder("config_lfs", content("config.json", LFS), r"config\.json is a pointer of Git LFS"),
    Folder("config_list", content("config.json", "[]"), r"config\.json: it holds list"),
    Folder("weights_missing", without(SINGLE), r"neither model\.safetensors nor its index"),
    Folder("weights_begun", lambda directory: (directory / SINGLE).rename(directory / f"{SINGLE}.incomplete"),
           r"download of model\.safetensors\.incomplete has not ended"),
    Folder("weights_part", lambda directory: (directory / SINGLE).rename(directory / f"{SINGLE}.part"),
           r"download of model\.safetensors\.part has not ended"),
    Folder("weights_empty", content(SINGLE, ""), r"model\.safetensors is empty"),
    Folder("weights_lfs", content(SINGLE, LFS), "model.safetensors is a pointer of Git LFS"),
    Folder("weights_html", content(SINGLE, "<html>" * 99), r"model\.safetensors cannot be read as safetensors"),
    Folder("weights_cut", cut(SINGLE, -40), r"model\.safetensors cannot be read as safetensors"),
    Folder("weights_head_only", cut(SINGLE, 300), r"model\.safetensors cannot be read as safetensors"),
    Folder("pickled", lambda directory: (directory / SINGLE).rename(directory / "pytorch_model.bin"), "pickled"),
    Folder("shard_missing", after(sharded, without(FIRST)), f"1 of 2 files are not there, .* {FIRST}"),
    Folder("shard_cut", after(sharded, cut(FIRST, -8)), f"{FIRST} cannot be read as safetensors"),
    Folder("shard_lfs", after(sharded, content(FIRST, LFS)), f"{FIRST} is a pointer of Git LFS"),
    Folder("shard_empty", after(sharded, content(FIRST, "")), f"{FIRST} is empty"),
    Folder("index_cut", after(sharded, cut(INDEX, 100)), r"index\.json: its 100 bytes are no JSON"),
    Folder("index_without_map", after(sharded, content(INDEX, "{}")), r"index\.json: weight_map is None"),
    Folder("tensor_missing", tensors(lambda found: found.pop("model.layers.1.mlp.up_proj.weight")),
           r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
    Folder("tensor_of_other_shape", tensors(lambda found: found.update({"model.norm.weight": torch.ones(31)})),
           r"tensor 'model\.norm\.weight' has shape \(31,\)"),
    Folder("tensor_of_integers", tensors(lambda found: found.update(
        {"model.norm.weight": torch.ones(32, dtype=torch.int8)})), "of type I8"),
    Folder("generation_config_empty", content("generation_config.json", ""), r"generation_config\.json is empty"),
)  # fmt: skip
BY_NAME = {folder.name: folder for folder in FOLDERS}


def make(folder, parent):
    """Write a folder into another one; where it is."""
    good, directory = parent / f"good {folder.kind}", parent / folder.name
    if not good.is_dir():
        base(good, folder.kind)
    shutil.copytree(good, directory)
    folder.change(directory)
    return directory


if __name__ == "__main__":
    for each in FOLDERS:
        make(each, Path(sys.argv[1]))
        sys.stdout.write(f"{each.name} {'is refused' if each.refused else 'starts'}\n")
