"""Requests of few families, as tests of clusters draw them."""

from collections.abc import Iterable

from mooncake_lab.core import Request, TracedRequest, blocks_for


def requests_of(rows: Iterable[tuple[float, int, int, int]], block_tokens: int = 512) -> list[TracedRequest]:
    """A request for each row of arrival (s), input tokens, output tokens and family.

    Within a family a shorter prompt is a prefix of a longer one.
    """
    return [
        TracedRequest(
            Request(
                id=i,
                arrival_s=arrival_s,
                input_tokens=tokens,
                block_keys=tuple(family * 100 + k for k in range(blocks_for(tokens, block_tokens))),
                block_size_tokens=block_tokens,
            ),
            output_tokens,
        )
        for i, (arrival_s, tokens, output_tokens, family) in enumerate(rows)
    ]
