"""`mooncake-lab generate`: generate tokens from token ids with the real engine."""

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from mooncake_lab.batching import BatchingPolicy, named_policy
from mooncake_lab.cli.options import Backend, Batching, Device, DType, Json, Model, at_least, failing

_WARM_UP_TOKENS: Final = 16
"""That the model has to be able to take, whatever the prompts are."""


def generate(
    model: Model,
    prompt_ids: Annotated[
        Path, typer.Option(help="JSON: a list of lists of token ids.", exists=True, dir_okay=False)
    ],
    max_new_tokens: Annotated[int, at_least(1, "Maximum number of tokens to generate per request.")] = 16,
    batching: Batching = "sarathi_serve",
    chunk_tokens: Annotated[
        int | None, at_least(1, "Tokens per iteration, for policies that cut prompts.")
    ] = None,
    device: Device = "auto",
    dtype: DType = None,
    backend: Backend = "auto",
    device_tokens: Annotated[
        int | None, at_least(1, "Tokens of KVCache; by default derived from the memory.")
    ] = None,
    block_size: Annotated[int, at_least(1, "Tokens per KVCache block.")] = 16,
    max_batch_tokens: Annotated[int, at_least(1, "Maximum number of tokens per iteration.")] = 2048,
    max_requests: Annotated[int, at_least(1, "Maximum number of running requests.")] = 256,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KVCache of equal prefixes.")] = True,
    temperature: Annotated[float, at_least(0, "Sampling temperature; 0 takes the most probable token.")] = 0.0,
    top_k: Annotated[int | None, at_least(1, "Sample from this many of the most probable tokens.")] = None,
    top_p: Annotated[
        float,
        at_least(1e-9, "Sample from the most probable tokens that together reach this probability.", most=1),
    ] = 1.0,
    seed: Annotated[int, at_least(0, "Seed of random weights and of sampling.")] = 0,
    json_: Json = False,
) -> None:
    """Generate answers to all prompts of a file, with continuous batching and a paged KVCache.

    In the JSON object, `outputs` has the order of the prompts, and `requests` contains their timings. If the
    batching policy can never serve a request, its output is empty and its `error` gives the reason.

    Example: mooncake-lab generate --model random:lab-tiny --prompt-ids prompts.json --max-new-tokens 8 --json
    """
    try:
        policy = named_policy(batching, chunk_tokens=chunk_tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--chunk-tokens") from error
    if device_tokens is not None and device_tokens < block_size:
        raise typer.BadParameter(f"--device-tokens {device_tokens} is less than one block of {block_size}")
    with failing("generate", MemoryError):
        prompts = _read_prompts(prompt_ids)
        found = _generate(
            prompts,
            policy,
            model={"name": model, "device": device, "dtype": dtype, "backend": backend, "seed": seed},
            settings={
                "cache_blocks": None if device_tokens is None else device_tokens // block_size,
                "block_size_tokens": block_size, "prefix_caching": prefix_caching,
                "max_batch_tokens": max_batch_tokens, "max_requests": max_requests,
            },
            sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed},
            max_new_tokens=max_new_tokens,
        )  # fmt: skip
    if json_:
        typer.echo(msgspec.json.encode({"model": model, "batching": batching} | found))
    else:
        for tokens, request in zip(found["outputs"], found["requests"], strict=True):
            typer.echo(" ".join(map(str, tokens)) or f"({request['finish_reason']}: {request['error']})")
        rate = found["generated_tokens"] / found["seconds"]
        typer.echo(
            f"{found['generated_tokens']} tokens in {found['seconds']:.3f} s, {rate:.0f} tokens per second",
            err=True,
        )


def _read_prompts(file: Path) -> list[list[int]]:
    """The prompts of a file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        prompts = msgspec.json.decode(file.read_bytes(), type=list[list[int]])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: not a JSON list of lists of token ids: {error}") from error
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty or not prompts:
        raise ValueError(f"{file}: {f'prompt {empty[0]} has no tokens' if empty else 'there are no prompts'}")
    return prompts


def _generate(
    prompts: list[list[int]],
    policy: BatchingPolicy,
    *,
    model: dict[str, Any],
    settings: dict[str, Any],
    sampling: dict[str, Any],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Run the engine; outputs and timings as plain values."""
    from mooncake_lab.engine import CoupledEngine, EngineSettings, GenerationRequest, Sampling, load_model, warm_up

    longest = max(map(len, prompts)) + max_new_tokens
    llama = load_model(
        **model, positions=max(longest, _WARM_UP_TOKENS)
    )  # a context may be millions of tokens long
    warm_up(llama)
    engine = CoupledEngine(llama, policy, EngineSettings(**settings))
    how = Sampling(**sampling)
    for index, prompt in enumerate(prompts):
        own = how.of_request(index)
        try:
            engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=max_new_tokens, sampling=own))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    done = engine.run()
    begin = min(output.submitted_s for output in done)
    return {
        "device": str(llama.embedding.device),
        "dtype": str(llama.embedding.dtype).removeprefix("torch."),
        "backend": llama.backend.name,
        "outputs": [output.tokens for output in done],
        "requests": [
            {
                "prompt_tokens": output.prompt_tokens,
                "reused_tokens": output.reused_tokens,
                "finish_reason": output.finish_reason,
                "error": output.error,
                "ttft_s": output.ttft_s,
                "token_s": [at - output.submitted_s for at in output.token_s],
                "preemptions": output.preemptions,
            }
            for output in done
        ],
        "prompt_tokens": sum(output.prompt_tokens for output in done),
        "generated_tokens": sum(len(output.tokens) for output in done),
        "iterations": len(engine.engine.log),
        "seconds": max(output.finished_s for output in done) - begin,
    }
