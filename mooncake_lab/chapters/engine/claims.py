"""Chapter 03's verdict, and statements of Sarathi-Serve's Figure 7 without a number: counted, not timed."""

import pandas as pd

from mooncake_lab.paper import ComparisonTable, claim, claimed, comparison_table


def beside_papers(waited: pd.DataFrame) -> ComparisonTable:
    """The claim of stall-free batching on the iteration log of the real engine.

    Args:
        waited: what `chapters.engine.experiment.waits` gives.
    """
    stalls: dict[str, int] = waited["stalls"].to_dict()
    return comparison_table([claimed(claim("S19"), stalls["sarathi_serve"])])


def statements(waited: pd.DataFrame, *, equal: bool) -> pd.DataFrame:
    """What the figure says in words, and whether the log agrees.

    Args:
        waited: what `chapters.engine.experiment.waits` gives.
        equal: whether all answers were those of Hugging Face.

    Returns:
        One row a statement: verdict, `holds` or `does not hold`.
    """
    gap, stalls = waited["gap_tokens"], waited["stalls"]
    checks = {
        "answers equal Hugging Face (ours)": equal,
        "vLLM stalls decodes for prompts": bool(stalls["vllm"] > 0),
        "Orca delays decodes without a stall": bool(stalls["orca"] == 0 and gap["orca"] > gap["sarathi_serve"]),
        "request level makes C wait for most iterations": waited["first_c_iterations"].idxmax() == "request_level",
    }
    return pd.DataFrame({"verdict": pd.Series(checks).map({True: "holds", False: "does not hold"})})
