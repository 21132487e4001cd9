# /// script
# dependencies = [
#   "openvino-genai==2026.4.1.0",
#   "optimum-intel[openvino]==2.2.0",
#   "torch==2.13.0+cpu",
#   "torchvision==0.28.0+cpu",
# ]
# [tool.uv]
# extra-index-url = ["https://download.pytorch.org/whl/cpu"]
# ///
"""OpenVINO GenAI as a peer: the model as Optimum exports it, weights and KVCache in its own type, unquantized."""

# pyright: basic
# this environment has not the libraries

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import torch
from optimum.intel import OVModelForCausalLM
from protocol import answer
from transformers import AutoModelForCausalLM

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    """See `protocol.Peer`. Mutable: it remembers what it has generated."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        exported, precision = directory / f"openvino-{dtype}", _PRECISIONS[dtype]
        _export(directory, exported, getattr(torch, dtype))
        self.version = f"openvino-genai {genai.__version__}"
        schedule = genai.SchedulerConfig()
        schedule.enable_prefix_caching = False  # the same prompt comes in every round
        schedule.max_num_batched_tokens = 2**16  # a batch of prompts is one piece
        self._pipeline = genai.LLMPipeline(
            exported,
            "CPU",
            scheduler_config=schedule,
            INFERENCE_PRECISION_HINT=precision,
            KV_CACHE_PRECISION=precision,
            INFERENCE_NUM_THREADS=threads,
        )
        self._prompt: list[int] = []
        self._made: list[int] = []
        self._batch = 1

    def prefill(self, prompt: list[int]) -> float:
        """Up to the first token."""
        start = time.perf_counter()
        self._generate(prompt, 1, 1)
        return time.perf_counter() - start

    def begin(self, prompt: list[int], batch: int, most_tokens: int) -> None:
        """It cannot pause, so nothing is kept but the tokens."""
        del most_tokens
        self._prompt, self._batch, self._made = prompt, batch, []
        self._made += self._generate(prompt, 1, 1)[0]

    def turn(self, steps: int) -> float:
        """What was generated before is a prompt, computed outside the seconds that count."""
        tokens, at_s = self._generate([*self._prompt, *self._made], steps + 1, self._batch)
        self._made += tokens
        return sum(later - earlier for earlier, later in pairwise(at_s))

    def tokens(self) -> list[int]:
        """Of the first request."""
        return self._made

    def _generate(self, prompt: list[int], new_tokens: int, batch: int) -> tuple[list[int], list[float]]:
        """The first request's new tokens, and when each was there (s)."""
        asked = np.array([prompt] * batch, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(asked), ov.Tensor(np.ones_like(asked)))
        config = genai.GenerationConfig(
            max_new_tokens=new_tokens, eos_token_id=0, ignore_eos=True, do_sample=False
        )
        found = self._pipeline.generate(inputs, config)
        at_s = [float(moment) / 1e3 for moment in found.perf_metrics.raw_metrics.m_new_token_times]
        return list(found.tokens[0]), at_s


def _export(directory: Path, exported: Path, dtype: torch.dtype) -> None:
    """The model in OpenVINO's form, its weights as they are."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    whole = directory / f"typed-{exported.name}"
    model.save_pretrained(whole)
    OVModelForCausalLM.from_pretrained(whole, export=True, load_in_8bit=False).save_pretrained(exported)


if __name__ == "__main__":
    answer(OpenVino)
