"""Chapter 05's numbers held against SARATHI's claims; Sarathi-Serve's wait for a model of its machine."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import pandas as pd

from mooncake_lab.chapters.piggyback.model import FUSED_TOKENS, LARGEST, TABLE_4, TOTALS, orca_peak
from mooncake_lab.paper import ComparisonTable, claim, claimed, comparison_table, fact
from mooncake_lab.perf import balanced_ratio, decode_accounts
from mooncake_lab.testbeds.sarathi import TESTBEDS, llama_13b_on_a6000

_END, _DECODE = "Table 4, end to end", "Table 4, decode"
_ROWS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "S28": (_END, "LLaMA-13B/A6000/2K"),
        "S29": (_DECODE, "LLaMA-13B/A6000/2K"),
        "S30": (_END, "LLaMA-13B/A6000/3K"),
        "S31": (_DECODE, "LLaMA-13B/A6000/3K"),
        "S32": (_DECODE, "LLaMA-33B/A100/1K"),
        "S33": (_END, "LLaMA-33B/A100/2K"),
        "S34": (_DECODE, "LLaMA-33B/A100/2K"),
        "S35": (_END, "LLaMA-33B/A100/3K"),
        "S36": (_DECODE, "LLaMA-33B/A100/3K"),
    }
)
"""The rows of Table 4 beyond those of S01, S03 and S04."""


def beside_papers(cells: pd.DataFrame) -> ComparisonTable:
    """SARATHI's claims S01 to S06, S09, S12, S16 and S28 to S36, from the model; the step at a tile needs the GPU.

    Args:
        cells: rows of `predictions`.
    """
    names = zip(cells["place"].tolist(), cells["cell"].tolist(), strict=True)
    found: dict[tuple[str, str], float] = dict(zip(names, cells["model"].tolist(), strict=True))
    cost = llama_13b_on_a6000()
    small, large = (batch_of(f"{name}/1K") for name in TESTBEDS)
    mixed = decode_accounts(cost, fused_tokens=TOTALS["1K"], batch=4, context_tokens=TOTALS["1K"])
    ours: dict[str, float | None] = {
        "S01": found["Table 4, end to end", f"{TESTBEDS[0]}/1K, batch {small}"],
        "S02": found["Figure 11a", "SARATHI, 1K"],
        "S03": found["Table 4, end to end", f"{TESTBEDS[1]}/1K, batch {large}"],
        "S04": found["Table 4, decode", f"{TESTBEDS[0]}/1K, batch {small}"],
        "S05": found["Figure 8", "1K, batch 2"],
        "S06": mixed.alone_s / mixed.marginal_s,
        "S09": None,
        "S12": orca_peak(cost)[1],
        "S16": balanced_ratio(FUSED_TOKENS, LARGEST["1K"]),
    }
    ours |= {
        name: found[place, f"{testbed}, batch {batch_of(testbed)}"] for name, (place, testbed) in _ROWS.items()
    }
    return comparison_table(claimed(claim(name), each) for name, each in ours.items())


def batch_of(series: str) -> int:
    """The batch of a row of SARATHI's Table 4."""
    return int(fact(TABLE_4, series=series, x="batch_size").value)
