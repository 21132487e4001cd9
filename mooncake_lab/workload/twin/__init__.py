"""Twins: generated traces with the statistics of the released ones, for machines that have none.

Each workload is a small story, told at the top of its module and driven by one frozen dataclass of numbers:
people who talk (`conversation`), a pool of chats and documents (`synthetic`), conversations beside two busy
programs (`toolagent`). A story ends in drafts, requests that know whose prefix they continue (`drafts`); the
recorder gives them block ids and timestamps. The numbers are counts, chances and quantile tables
(`data/measured/twin_quantiles.json`), measured on the released traces or published; no row is copied. What a twin
must meet, and how closely, is in `data/measured/twin_targets.csv`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from mooncake_lab.core.extras import naming_extra
from mooncake_lab.workload.trace import Trace

with naming_extra("stats"):
    import numpy as np

    from mooncake_lab.workload.twin.conversation import (
        ConversationProcess,
        ToolAgentProcess,
        conversation,
        toolagent,
    )
    from mooncake_lab.workload.twin.drafts import BLOCK_SIZE_TOKENS, Drafts, earliest, lay_blocks
    from mooncake_lab.workload.twin.synthetic import SyntheticProcess, synthetic

__all__ = ["make_twin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one twin is made."""

    requests: int
    """Requests of the released trace (FAST'25 Table 2)."""
    prefixes_blocks: tuple[int, ...]
    """Lengths of the prefixes that unrelated requests share."""
    tick_s: float
    """The recorder's clock: arrivals are rounded down to whole ticks."""
    draft: Callable[[int, int], Drafts]
    """Drafts of at least `requests` requests, from a seed."""


_CHAT, _CALLS = ConversationProcess(), ToolAgentProcess()
_TOOLAGENT: Final = Recipe(
    requests=23_608,
    prefixes_blocks=_CALLS.prefixes_blocks,
    tick_s=3.0,
    draft=partial(toolagent, process=_CALLS),
)
_RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "conversation": Recipe(
            requests=12_031,
            prefixes_blocks=(_CHAT.system_blocks,),
            tick_s=3.0,
            draft=partial(conversation, process=_CHAT),
        ),
        "synthetic": Recipe(
            requests=3_993,
            prefixes_blocks=(0,),
            tick_s=0.001,
            draft=partial(synthetic, process=SyntheticProcess()),
        ),
        "toolagent": _TOOLAGENT,
        "arxiv": _TOOLAGENT,  # the arXiv trace is the same hour: as many requests, the same first blocks
    }
)


def make_twin(name: str, *, seed: int = 0, requests: int | None = None) -> Trace:
    """The twin of a released trace: a generated trace with its statistics and none of its rows.

    The same name and seed give the same trace, and a shorter one is the beginning of a longer one: rates are kept.

    Args:
        name: conversation, synthetic, toolagent, or arxiv (the same generator as toolagent).
        seed: from 0.
        requests: how many; as many as the released trace has where nothing is said.

    Raises:
        ValueError: when there is no such twin, the seed is negative, or fewer than one request is asked for.
    """
    if name not in _RECIPES:
        raise ValueError(f"there is no twin called {name!r}; allowed are {', '.join(_RECIPES)}")
    recipe = _RECIPES[name]
    n = recipe.requests if requests is None else requests
    if n < 1:
        raise ValueError(f"a twin of {n} requests was asked for; at least 1 is needed")
    drafts = earliest(recipe.draft(n, seed), n)
    laid = lay_blocks(drafts, recipe.prefixes_blocks)
    ticks = np.floor(drafts.arrival_s / recipe.tick_s)
    return Trace(
        name=name,
        origin="twin",
        block_size_tokens=BLOCK_SIZE_TOKENS,
        arrival_s=np.round(ticks * recipe.tick_s, 3),
        input_tokens=drafts.input_tokens,
        output_tokens=drafts.output_tokens,
        block_ids=np.concatenate(laid),
        block_starts=np.cumsum([0, *(len(blocks) for blocks in laid)]),
        source=f"twin of the {name} trace, seed {seed}",
    )
