# /// script
# dependencies = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors", "numpy"]
# ///
"""llama.cpp as a peer: weights as GGUF in the model's type, KVCache in it too, in float16 for bfloat16."""

# pyright: basic
# ctypes has no types, and this environment has not the libraries

import json
import time
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from gguf_file import write_gguf
from protocol import answer

_CACHE_TYPES = {"float32": llama.GGML_TYPE_F32, "bfloat16": llama.GGML_TYPE_F16}


@llama.llama_log_callback
def _silent(*_: object) -> None:
    """It would tell of each tensor."""


class LlamaCpp:
    """See `protocol.Peer`. Mutable: a context of the KVCache in use."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        path = write_gguf(directory, dtype)
        llama.llama_log_set(_silent, None)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.version = f"llama-cpp-python {_version()}"
        self._cache_type, self._threads, self._vocabulary = _CACHE_TYPES[dtype], threads, config["vocab_size"]
        self._context: Any = None
        self._room = (0, 0)
        self._made: list[int] = []
        self._lengths, self._last = 0, np.zeros(0, np.int64)

    def prefill(self, prompt: list[int]) -> float:
        """Its batches are 512 tokens, as ours."""
        self._open(len(prompt) + 1, 1)
        start = time.perf_counter()
        self._step(prompt, range(len(prompt)), [0] * len(prompt), [len(prompt) - 1])
        return time.perf_counter() - start

    def begin(self, prompt: list[int], batch: int, most_tokens: int) -> None:
        """The prompt is computed once and its KVCache copied."""
        self._open(len(prompt) + most_tokens, batch)
        first = self._step(prompt, range(len(prompt)), [0] * len(prompt), [len(prompt) - 1])
        for sequence in range(1, batch):
            llama.llama_memory_seq_cp(llama.llama_get_memory(self._context), 0, sequence, -1, -1)
        self._last, self._lengths, self._made = np.repeat(first, batch), len(prompt), first.tolist()

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

    def _decode(self) -> None:
        batch = range(len(self._last))
        self._last = self._step(self._last.tolist(), [self._lengths] * len(batch), batch, batch)
        self._lengths += 1
        self._made.append(int(self._last[0]))

    def _open(self, tokens: int, sequences: int) -> None:
        """An empty KVCache with room for so many sequences of so many tokens."""
        if self._room == (tokens, sequences):
            llama.llama_memory_clear(llama.llama_get_memory(self._context), True)  # noqa: FBT003  # C's signature
            return
        if self._context is not None:
            llama.llama_free(self._context)
        params = llama.llama_context_default_params()
        params.n_ctx = -(-tokens // 256) * 256 * sequences
        params.n_batch, params.n_ubatch, params.n_seq_max = max(tokens, sequences), 512, sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._cache_type
        params.no_perf = True
        self._context, self._room = llama.llama_init_from_model(self._model, params), (tokens, sequences)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make room for {sequences} sequences of {tokens} tokens")

    def _step(self, tokens: Any, positions: Any, sequences: Any, wanted: Any) -> np.ndarray:
        """One call; the likeliest next tokens of the places wanted."""
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0], batch.logits[place] = sequence, False
        for place in wanted:
            batch.logits[place] = True
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode says {status}")
        rows = [llama.llama_get_logits_ith(self._context, place) for place in wanted]
        likeliest = [int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in rows]
        llama.llama_batch_free(batch)
        return np.array(likeliest, np.int64)


def _version() -> str:
    import llama_cpp  # its package prints when imported early

    return llama_cpp.__version__


if __name__ == "__main__":
    answer(LlamaCpp)
