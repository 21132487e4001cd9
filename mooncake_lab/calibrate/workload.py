"""What a server is asked to predict it: requests of a trace at several rates, with prompts that it never saw."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from mooncake_lab.calibrate.observations import CalibrationError, Inquiry, Reply, Tokens, random_tokens
from mooncake_lab.calibrate.settings import TEMPLATE_TOKENS, ServerSettings
from mooncake_lab.core import Request, TracedRequest, blocks_for
from mooncake_lab.workload import Trace
from mooncake_lab.workload.transforms import poisson_arrivals_s, scaled_down, with_larger_blocks


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Two slices of a trace: the first for calibration, the second is predicted."""

    source: str
    block_size_tokens: int
    slices: tuple[tuple[TracedRequest, ...], tuple[TracedRequest, ...]]

    @classmethod
    def of(cls, trace: Trace, settings: ServerSettings, *, divide: int, requests: int) -> Self:
        """Slices of a trace whose lengths are divided, in blocks that the server can share.

        Raises:
            CalibrationError: when the trace cannot be divided so, or has too few requests that fit.
        """
        most = min(settings.max_model_len - TEMPLATE_TOKENS, settings.kv_tokens)
        try:
            scaled = scaled_down(trace, divide, most_tokens=most)
            size, own = scaled.block_size_tokens, settings.block_size
            if size % own:
                scaled = with_larger_blocks(scaled, own // size if own % size == 0 else own)
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        if len(scaled) < 2 * requests:
            raise CalibrationError(
                f"{len(scaled)} requests of the trace have at most {most} tokens after division by {divide};"
                f" {2 * requests} are needed: half to calibrate, half to predict"
            )
        found = tuple(scaled.head(2 * requests).requests())
        return cls(scaled.source, scaled.block_size_tokens, (found[:requests], found[requests:]))

    def timed(self, which: int, requests_per_s: float, seed: int) -> list[TracedRequest]:
        """A slice as a Poisson process from time 0."""
        chosen = self.slices[which]
        at_s = poisson_arrivals_s(len(chosen), requests_per_s, seed=seed).tolist()
        return [
            replace(one, request=replace(one.request, id=k, arrival_s=at_s[k])) for k, one in enumerate(chosen)
        ]

    def inquiry(self, traced: TracedRequest, salt: int) -> Inquiry:
        """What is sent for a request: equal blocks have equal tokens, and another salt gives others."""
        request = traced.request
        blocks = [random_tokens(self.block_size_tokens, salt, _number(key)) for key in request.block_keys]
        tokens: Tokens = np.concatenate(blocks)[: request.input_tokens]
        return Inquiry(tokens, traced.output_tokens, request.arrival_s)


def _number(key: int | bytes) -> int:
    return key if isinstance(key, int) else int.from_bytes(key, "little")


def as_observed(traced: TracedRequest, reply: Reply) -> TracedRequest:
    """A request with the lengths that the server counted; keys of blocks beyond its prompt's are its own."""
    request, tokens = traced.request, reply.prompt_tokens
    if tokens != request.input_tokens:
        count = blocks_for(tokens, request.block_size_tokens)
        own: list[int | bytes] = [f"{request.id}/{k}".encode() for k in range(count)]
        keys = (*request.block_keys, *own[len(request.block_keys) :])[:count]
        request = Request(
            id=request.id,
            arrival_s=request.arrival_s,
            input_tokens=tokens,
            block_keys=keys,
            block_size_tokens=request.block_size_tokens,
        )
    return TracedRequest(replace(request, max_tokens=len(reply.times_s)), len(reply.times_s))


def shareable_tokens(requests: Sequence[TracedRequest]) -> int:
    """Prompt tokens whose blocks an earlier request of the same run began with: more can come only from before."""
    seen, found = set[int | bytes](), 0
    for traced in requests:
        request = traced.request
        blocks = 0
        while blocks < len(request.block_keys) and request.block_keys[blocks] in seen:
            blocks += 1
        found += min(blocks * request.block_size_tokens, request.input_tokens)
        seen.update(request.block_keys)
    return found
