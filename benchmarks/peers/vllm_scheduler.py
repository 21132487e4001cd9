"""Records what the scheduler of vLLM V1 does: runs scenarios in a real engine, writes each step into their files.

Run: .peers/vllm_peer/bin/python benchmarks/peers/vllm_scheduler.py tests/batching/vllm_v1 [--out elsewhere]

The interpreter is that of vLLM's environment (`python benchmarks/peers/environments.py vLLM` makes it). The engine
runs in this process with a Llama of one small layer and random weights, prefix caching and chunked prefill on, all
else as vLLM has it by default. A scenario is a JSON file:

    about                   what it is there for, one sentence
    block_size              tokens of a block; vLLM on CPUs takes multiples of 32
    max_num_batched_tokens  of a step
    max_num_seqs            most running requests
    num_blocks              blocks that requests can have; vLLM gets one more, its null block
    requests                in order of arrival, each with `arrives_step`, `max_tokens`, and `prompt`, a list of
                            pieces: `[first, count]` are consecutive token ids, `["prompt", k]` and `["answer", k]`
                            those of an earlier request; who continues an answer does not arrive before its end

and this program adds

    vllm      the release
    outputs   the generated token ids of each request
    steps     of each: `scheduled`, in order, `[request, tokens computed before, new tokens]`, where the tokens
              before the first piece of an admitted request are its prefix hit; and `preempted`, newest first
"""  # noqa: INP001  # scripts, not a package

# pyright: basic
# this environment has not the libraries

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A model of which only the token ids matter."""
_SHAPE = ("block_size", "max_num_batched_tokens", "max_num_seqs", "num_blocks")
_MAX_STEPS = 2_000


def engine(directory: Path, scenario: dict[str, Any]) -> Any:
    """An engine of the scenario's size, which computes in this process."""
    (directory / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
    return vllm.LLM(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=scenario["block_size"],
        max_num_batched_tokens=scenario["max_num_batched_tokens"],
        max_num_seqs=scenario["max_num_seqs"],
        num_gpu_blocks_override=scenario["num_blocks"] + 1,
        max_model_len=min(4096, scenario["num_blocks"] * scenario["block_size"]),
    ).llm_engine


def prompt_tokens(
    pieces: Sequence[Sequence[Any]], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[int]:
    """The token ids of a prompt."""
    tokens: list[int] = []
    for first, second in pieces:
        if first == "prompt":
            tokens += prompts[second]
        elif first == "answer":
            tokens += answers[second]
        else:
            tokens += range(first, first + second)
    return tokens


def record(llm: Any, scenario: dict[str, Any]) -> dict[str, Any]:
    """The scenario with what the scheduler did.

    Raises:
        RuntimeError: when it does not come to an end.
    """
    requests: list[dict[str, Any]] = scenario["requests"]
    scheduler = llm.engine_core.engine_core.scheduler
    scheduler.reset_prefix_cache()
    outputs: list[Any] = []
    schedule = scheduler.schedule
    scheduler.schedule = lambda *args, **kwargs: outputs.append(schedule(*args, **kwargs)) or outputs[-1]
    prompts: list[list[int]] = []
    answers: list[list[int]] = [[] for _ in requests]
    finished: set[int] = set()
    steps: list[dict[str, Any]] = []
    try:
        for step in range(_MAX_STEPS):
            while len(prompts) < len(requests) and requests[len(prompts)]["arrives_step"] <= step:
                request = requests[len(prompts)]
                if not {k for kind, k in request["prompt"] if kind == "answer"} <= finished:
                    break
                request["arrives_step"] = step
                prompts.append(prompt_tokens(request["prompt"], prompts, answers))
                params = vllm.SamplingParams(
                    max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False
                )
                llm.add_request(str(len(prompts) - 1), {"prompt_token_ids": prompts[-1]}, params)
            if not llm.has_unfinished_requests():
                if len(prompts) == len(requests):
                    break
                steps.append({"scheduled": [], "preempted": []})
                continue
            outputs.clear()
            for result in llm.step():
                answers[int(result.request_id)] = list(result.outputs[0].token_ids)
                if result.finished:
                    finished.add(int(result.request_id))
            (output,) = outputs
            steps.append(_told(output))
        else:
            raise RuntimeError(f"{scenario['about']} is not done after {_MAX_STEPS} steps")
    finally:
        scheduler.schedule = schedule
    told = {key: value for key, value in scenario.items() if key not in {"vllm", "outputs", "steps"}}
    return told | {"vllm": vllm.__version__, "outputs": answers, "steps": steps}


def _told(output: Any) -> dict[str, Any]:
    """A step as numbers; vLLM adds a random end to the ids of requests."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return {
        "scheduled": [
            [_number(name), computed[name], tokens] for name, tokens in output.num_scheduled_tokens.items()
        ],
        # a set in vLLM, so its order is that of the names' hashes
        "preempted": sorted(map(_number, output.preempted_req_ids or ()), reverse=True),
    }


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def as_text(scenario: dict[str, Any]) -> str:
    """JSON with one line for each value, request, output and step."""

    def lines(values: Iterable[Any]) -> str:
        return "[\n" + ",\n".join("  " + json.dumps(value) for value in values) + "\n ]"

    parts = [
        f" {json.dumps(key)}: {lines(value) if isinstance(value, list) else json.dumps(value)}"
        for key, value in scenario.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Record every scenario of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", type=Path, help="a folder of scenarios")
    parser.add_argument("--out", type=Path, help="where the recordings are written; by default over the scenarios")
    chosen = parser.parse_args()
    out = chosen.out or chosen.scenarios
    out.mkdir(parents=True, exist_ok=True)
    read = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in chosen.scenarios.glob("*.json")]

    def shape(named: tuple[str, dict[str, Any]]) -> tuple[int, ...]:
        return tuple(named[1][key] for key in _SHAPE)

    # an engine takes seconds to start: scenarios of one size share one
    for _, same in groupby(sorted(read, key=lambda named: (*shape(named), named[0])), key=shape):
        scenarios = list(same)
        with tempfile.TemporaryDirectory() as directory:
            llm = engine(Path(directory), scenarios[0][1])
            for name, scenario in scenarios:
                (out / name).write_text(as_text(record(llm, scenario)), encoding="utf-8")
            llm.engine_core.shutdown()


if __name__ == "__main__":
    main()
