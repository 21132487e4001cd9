"""Our server beside vLLM's, as clients see them over HTTP; `serve.py --peers vLLM` prints it."""  # noqa: INP001  # scripts, not a package

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from http_clients import Question, closed_loop
from http_servers import (
    cores,
    free_port,
    our_words,
    pinned,
    running,
    save_model,
    vllm_environment,
    vllm_words,
    wait_until_open,
)
from peer_environments import SCRIPTS, environment

from mooncake_lab.bench.rounds import Rounds, alternating_rounds
from mooncake_lab.perf import model_shape

PROMPT_TOKENS: Final = 32


def beside_vllm(
    model: str, environments: Path, clients: Sequence[int], new_tokens: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Our server and vLLM's under so many clients at once, in alternating rounds after one that does not count.

    Args:
        model: `random:SHAPE`.
        environments: where vLLM is installed, or will be.
        clients: how many at once, a row each.
        new_tokens: of each answer.
        rounds: that count.

    Raises:
        ValueError: when vLLM does not run here, the model is a folder, or a server fails.
    """
    if not model.startswith("random:"):
        raise ValueError(f"over HTTP both load random weights that are saved for them; {model} is a folder")
    python, shape = environment(SCRIPTS["vLLM"], environments), model.removeprefix("random:")
    vocabulary, (servers, here) = model_shape(shape).vocabulary, cores()
    with ExitStack() as stack, pinned(here):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(shape, "float32", folder)
        ports = {name: free_port() for name in ("ours", "vLLM")}
        words = our_words(folder, "float32", ports["ours"], "--coupled-nodes", "1")
        started = {"ours": stack.enter_context(running(words, servers))}
        words = vllm_words(python, folder, "float32", ports["vLLM"])
        started["vLLM"] = stack.enter_context(running(words, servers, vllm_environment(python)))
        for name, process in started.items():
            wait_until_open(process, ports[name], f"{name}'s server")
        for count in clients:
            works = {
                name: partial(_round_s, f"http://127.0.0.1:{port}", count, vocabulary, new_tokens)
                for name, port in ports.items()
            }
            taken = alternating_rounds(works, rounds)
            yield {"peer": "vLLM", "clients": count, **beside_each_other(taken, count * new_tokens)}


def _round_s(url: str, count: int, vocabulary: int, new_tokens: int, number: int) -> float:
    """Seconds of one round on one server."""
    prompts = fresh_prompts(count, vocabulary, number)
    return served_s(url, [Question(prompt=prompt, new_tokens=new_tokens) for prompt in prompts])


def fresh_prompts(count: int, vocabulary: int, number: int) -> list[list[int]]:
    """Prompts that no other round has, so that no prefix is found again."""
    return np.random.default_rng([count, number]).integers(0, vocabulary, (count, PROMPT_TOKENS)).tolist()


def served_s(url: str, questions: Sequence[Question]) -> float:
    """Seconds until each of as many clients as questions has its answer.

    Raises:
        ValueError: when one has none.
    """
    began_s = time.perf_counter()
    answers = closed_loop(url, questions, len(questions))
    seconds = time.perf_counter() - began_s
    for answer in answers:
        if answer.error is not None:
            raise ValueError(f"{url} gave a client no whole answer: {answer.error}")
    return seconds


def beside_each_other(taken: Rounds[str], tokens: int) -> dict[str, float]:
    """Tokens per second of two servers, and our share over the other's, in rounds of so many tokens."""
    ratio = taken.ratio("vLLM", "ours")
    return {
        "ours_per_s": tokens / taken.median_s("ours"),
        "peer_per_s": tokens / taken.median_s("vLLM"),
        "ratio": ratio.median,
        "least": ratio.least,
        "most": ratio.most,
        "load_average": taken.load_average,
    }
