# /// script
# dependencies = ["optimum-intel==2.2.0", "openvino==2026.4.1", "torch==2.13.0+cpu", "safetensors", "numpy"]
# ///
"""OpenVINO as a peer: the stateful model that GenAI runs, exported by Optimum, not quantized."""

# pyright: basic
# this environment has not the libraries

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from optimum.intel import OVModelForCausalLM
from protocol import answer

_HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    """See `protocol.Peer`. Mutable: the model's state is its KVCache."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        exported = directory / f"openvino-{dtype}"
        whole = OVModelForCausalLM.from_pretrained(directory, export=True, compile=False, load_in_8bit=False)
        if dtype == "bfloat16":
            whole.half()  # weights of two bytes, as the original's
        whole.save_pretrained(exported)
        settings = {
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "KV_CACHE_PRECISION": _HINTS[dtype],  # it would take eight bits
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_HYPER_THREADING": True,
        }
        compiled = openvino.Core().compile_model(exported / "openvino_model.xml", "CPU", settings)
        self._request = compiled.create_infer_request()
        self.version = f"OpenVINO {openvino.__version__.split('-')[0]}"
        self._made: list[int] = []
        self._lengths, self._last = 0, np.zeros((0, 1), np.int64)

    def prefill(self, prompt: list[int]) -> float:
        """In one piece."""
        start = time.perf_counter()
        self._start(prompt, 1)
        return time.perf_counter() - start

    def begin(self, prompt: list[int], batch: int, most_tokens: int) -> None:
        """Every request computes the prompt: a state cannot be copied."""
        del most_tokens
        self._start(prompt, batch)
        self._made = [int(self._last[0, 0])]

    def turn(self, steps: int) -> float:
        """One token of every request a step."""
        self._decode()
        start = time.perf_counter()
        for _ in range(steps):
            self._decode()
        return time.perf_counter() - start

    def tokens(self) -> list[int]:
        """Of the first request."""
        return self._made

    def _start(self, prompt: list[int], batch: int) -> None:
        self._request.reset_state()
        self._lengths = 0
        self._step(np.tile(np.array(prompt, np.int64), (batch, 1)))

    def _decode(self) -> None:
        self._step(self._last)
        self._made.append(int(self._last[0, 0]))

    def _step(self, tokens: np.ndarray) -> None:
        batch, count = tokens.shape
        places = np.arange(self._lengths, self._lengths + count, dtype=np.int64)
        self._lengths += count
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": np.ones((batch, self._lengths), np.int64),
            "position_ids": np.tile(places, (batch, 1)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        logits = self._request.infer(inputs, share_inputs=True, share_outputs=True)["logits"]
        self._last = logits[:, -1].argmax(-1)[:, None].astype(np.int64)


if __name__ == "__main__":
    answer(OpenVino)
