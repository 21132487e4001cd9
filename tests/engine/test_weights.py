"""Configs and weights from Hugging Face directories, and random ones."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from mooncake_lab.engine import (
    RopeScaling,
    config_from_shape,
    load_weights,
    random_weights,
    read_config,
)
from mooncake_lab.engine.config import config_from_mapping
from mooncake_lab.engine.loading import load_model
from mooncake_lab.perf.specs import MODELS

CPU = torch.device("cpu")
F32 = {"device": CPU, "dtype": torch.float32}


@pytest.fixture
def directory(tmp_path, make):
    """A model directory as transformers writes it."""
    twins = make(3, tie_word_embeddings=False)
    state = {name: tensor.contiguous() for name, tensor in twins.hugging_face.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(twins.hugging_face.config.to_dict()))
    return tmp_path


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestDirectories:
    def test_one_file_and_shards_are_the_same_model(self, directory, tmp_path, make):
        """Weights are those of transformers, whether in one safetensors file or in shards with an index."""
        whole = load_weights(directory, **F32)
        tensors = make(3, tie_word_embeddings=False).hugging_face.state_dict()
        names = sorted(tensors)
        shards = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
        for file, part in shards.items():
            save_file({name: tensors[name].contiguous() for name in part}, tmp_path / file)
        weight_map = {name: file for file, part in shards.items() for name in part}
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        sharded = load_weights(directory, **F32)
        assert torch.equal(whole.head, tensors["lm_head.weight"])
        assert torch.equal(whole.layers[1].down, tensors["model.layers.1.mlp.down_proj.weight"])
        assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(whole.layers, sharded.layers, strict=True))
        assert whole.config == sharded.config

    def test_a_missing_tensor_is_named(self, directory):
        """A layer that is not in the file is an error, never a random one."""
        edit(directory, num_hidden_layers=3)
        with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.2"):
            load_weights(directory, **F32)

    def test_an_unknown_tensor_is_named(self, directory):
        """A tensor of another architecture is an error, never ignored."""
        edit(directory, num_hidden_layers=1)
        with pytest.raises(ValueError, match=r"'model\.layers\.1.* is none a Llama"):
            load_weights(directory, **F32)

    def test_a_wrong_shape_is_named(self, directory):
        """Weights that contradict the config are an error."""
        edit(directory, intermediate_size=40)
        with pytest.raises(
            ValueError, match=r"model\.safetensors: tensor .* has shape \(32, 48\); the config says \(32, 40\)"
        ):
            load_weights(directory, **F32)


class TestConfigs:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"attention_bias": True}, "attention_bias is True"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_parameters": None}, "rope type 'yarn'"),
        ],
    )
    def test_what_is_not_computed_is_refused(self, directory, changes, message):
        """Another architecture is an error that names the field."""
        edit(directory, **changes)
        with pytest.raises(ValueError, match=message):
            read_config(directory)

    def test_old_and_new_spellings_of_rope_are_one(self):
        """The rope keys of transformers 4 and 5 describe the same config."""
        base = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 8}
        base |= {"vocab_size": 9}
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling |= {"original_max_position_embeddings": 8192}
        old = base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | scaling}
        new = base | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | scaling}
        assert config_from_mapping(old) == config_from_mapping(new)
        assert config_from_mapping(base | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope_scaling == (
            RopeScaling(kind="linear", factor=2.0)
        )

    def test_every_llama_shape_is_a_config_and_a_plain_one_is_not(self):
        """Shapes of `perf` count the parameters that the engine's config counts; GPT-3 has no gate."""
        for shape in MODELS.values():
            if shape.ffn_matrices == 3:
                config = config_from_shape(shape)
                assert config.linear_parameters * shape.bytes_per_element == shape.streamed_weight_bytes
                assert config.kv_bytes_per_token(shape.bytes_per_element) == shape.kv_bytes_per_token
        with pytest.raises(ValueError, match="a Llama has 3"):
            config_from_shape(MODELS["gpt3-175b"])


class TestDigest:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_every_number_counts(self, dtype):
        """Weights that differ in one number of one tensor, wherever it stands, have another digest."""
        config = replace(config_from_shape(MODELS["lab-tiny"], max_positions=64), tied_embeddings=False)
        weights = random_weights(config, device=CPU, dtype=dtype)
        digests = {weights.digest()}
        last = weights.layers[-1]
        tensors = [weights.embedding, weights.norm, weights.head, last.attention_norm, last.qkv, last.output]
        tensors += [last.ffn_norm, last.gate_up, last.down]
        for tensor in tensors:
            for at in (0, 1, tensor.numel() // 2 + 1, tensor.numel() - 1):
                place = tensor.view(-1)[at]
                before = place.clone()
                place.add_(1)
                digests.add(weights.digest())
                place.copy_(before)
        assert len(digests) == 1 + 4 * len(tensors)
        assert weights.digest() in digests


class TestRandom:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"name": "random:none"}, "unknown model 'none'"),
            ({"dtype": "int8"}, "unknown dtype 'int8'"),
            ({"device": "tpu"}, "unknown device 'tpu'"),
            ({"device": "mps"}, "not on 'mps'"),
            ({"backend": "metal"}, "no backend 'metal'"),
            ({"backend": "cpu", "dtype": "float16"}, "no backend 'cpu'"),
        ],
    )
    def test_unknown_names_are_refused(self, change, message):
        """The error names what is allowed."""
        with pytest.raises(ValueError, match=message):
            load_model(**({"name": "random:lab-tiny", "device": "cpu"} | change))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_a_gpu_that_is_not_there_is_an_error(self):
        """Asking for CUDA without a GPU says so; nothing falls back."""
        with pytest.raises(ValueError, match="finds no GPU here"):
            load_model("random:lab-tiny", device="cuda")


def test_a_truncated_file_is_named(directory):
    """A safetensors file that was cut is a ValueError with its path, whatever the library raises."""
    file = directory / "model.safetensors"
    for size in (file.stat().st_size - 100, 40, 3):
        os.truncate(file, size)
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .* truncated"):
            load_weights(directory, **F32)
