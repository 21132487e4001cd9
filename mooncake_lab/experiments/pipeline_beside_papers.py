"""Chapter 06's numbers held against SARATHI, Sarathi-Serve and KV-Runahead."""

import pandas as pd

from mooncake_lab.experiments.pipeline_serving import chunked_alone_over_both
from mooncake_lab.paper import ComparisonTable, claim, claimed, comparison_table, fact


def beside_papers(ratios: pd.DataFrame, capacities: pd.DataFrame, ahead: pd.DataFrame) -> ComparisonTable:
    """Claims S13 to S15, S17, S18 and K01.

    Args:
        ratios: rows of `sensitivity` of the three schemes; the one without any change to the roofline is judged.
        capacities: rows of `capacity`.
        ahead: rows of `runahead_sweep` for LLaMA-7B; the best gain on the fast network is judged.
    """
    plain = (ratios["decode_attention"] == 1.0) & (ratios["overhead_ms_a_layer"] == 0.0)
    ours = ratios[plain].iloc[0]
    fast = ahead["gb_per_s"] == max(ahead["gb_per_s"])
    found = {
        "S13": ours["bubbles_orca_over_sarathi"],
        "S14": ours["orca_over_sarathi"],
        "S15": ours["replicas_over_sarathi"],
        "S17": chunked_alone_over_both(),
        "S18": strict_gain(capacities),
        "K01": max(ahead[fast]["gain"].tolist()),
    }
    return comparison_table(claimed(claim(name), float(value)) for name, value in found.items())


def strict_gain(capacities: pd.DataFrame, budget: str = "Sarathi-Serve 512") -> float:
    """Capacity of Sarathi-Serve over vLLM at the strict limit for Yi-34B.

    Raises:
        ValueError: when vLLM meets the limit at none of the rates.
    """
    slo_s = fact("sarathi_serve_slo", series="Yi-34B", x="strict").value
    at = capacities[capacities["slo_s"] == slo_s].set_index("policy")["requests_per_s"].to_dict()
    if not at["vLLM"]:
        raise ValueError(f"vLLM meets {slo_s} s at none of the rates tried; begin with a lower one")
    return at[budget] / at["vLLM"]
