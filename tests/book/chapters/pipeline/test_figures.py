"""The figures of the pipeline chapter."""

import pandas as pd
import pytest
from figure_laws import FigureLaws

from mooncake_lab.book.chapters.pipeline import experiment as pipeline
from mooncake_lab.book.chapters.pipeline import figures as draw
from mooncake_lab.book.chapters.pipeline import long as pipeline_long
from mooncake_lab.book.chapters.pipeline import serving as pipeline_serving
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import curve

NAMES = [
    "timelines", "fig12", "causes", "sensitivity", "chunks", "measured",
    "long", "busy", "cpp", "runahead", "slices", "capacity",
]  # fmt: skip


@pytest.fixture(scope="module")
def figures():
    """Every figure of the chapter, by name."""
    runs = run(vary(pipeline.Gpt3(requests=40), scheme=pipeline.SCHEMES), cache=False)
    paper = curve("sarathi_fig12_pipeline")
    served = run(vary(pipeline_serving.Serving(requests=10), policy=("vLLM", "Sarathi-Serve 512")), cache=False)
    one_row = pd.DataFrame([{"rank": 0, "what": "compute", "piece": 0, "start_ms": 0.0, "end_ms": 2.0}])
    return {
        "timelines": draw.timelines({"SARATHI": pipeline.timeline(pipeline.two_stages("SARATHI"))}),
        "fig12": draw.bubbles_and_completion(
            pipeline.quantiles(runs, "bubble"), pipeline.quantiles(runs, "done"), paper
        ),
        "causes": draw.causes(pipeline.shares_by_cause(runs)),
        "sensitivity": draw.sensitivity(pipeline.sensitivity(runs), paper),
        "chunks": draw.chunk_sizes(runs[runs["scheme"] == "SARATHI"], runs[runs["scheme"] == "Orca-best"]),
        "measured": draw.measured({"CPP": one_row}, "a machine"),
        "long": draw.long_prompts(pipeline_long.three_ways((32_768, 65_536))),
        "busy": draw.busy_network(pipeline_long.three_ways((32_768,), (4,), (1.0, 0.1))),
        "cpp": draw.chunks(pipeline_long.chunk_sweep()),
        "runahead": draw.runahead(pipeline_long.runahead_sweep((1024, 2048), (2,))),
        "slices": draw.slices(pipeline_long.runahead_sweep((1024,), (2,))),
        "capacity": draw.capacity(served, pipeline_serving.capacity(served, (0.2, 1.0)), 0.2, 1.0),
    }


@pytest.mark.parametrize("name", NAMES)
class TestEvery(FigureLaws):
    """Laws of every figure."""


def test_the_papers_completions_are_drawn(figures):
    """Figure 12 carries the printed ratios as diamonds: SARATHI's own, Orca's and that of the replicas."""
    _, right = figures["fig12"].axes
    (points,) = [line for line in right.get_lines() if line.get_marker() == "D"]
    assert sorted(points.get_xdata()) == pytest.approx([1.0, 1.48, 1.91])


@pytest.mark.parametrize(("seeds", "said"), [(1, "one seed"), (3, "means over 3 seeds")])
def test_the_footer_of_capacities_counts_their_seeds(seeds, said):
    """Bars that are means over seeds do not pass for a single run."""
    runs = pd.DataFrame(
        {"testbed": "Yi-34B", "workload": "w", "limit": "strict", "policy": policy, "requests": 9, "seed": seed,
         "requests_per_s": 1.0}
        for policy in ("vLLM", "Sarathi-Serve 512")
        for seed in range(seeds)
    )  # fmt: skip
    figure = draw.capacities(pipeline_serving.over_vllm(runs), curve("sarathi_serve_capacity_over_vllm"))
    assert figure.get_supxlabel().endswith(f"; {said}")
