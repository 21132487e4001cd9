"""What an exercise hands to a reader does not win yet, and what its solution says does."""

import ast
from dataclasses import dataclass
from pathlib import Path

from mooncake_lab.batching import Sarathi, SarathiServe
from mooncake_lab.book.chapters.compression import experiment as compression
from mooncake_lab.book.chapters.endtoend import experiment as endtoend
from mooncake_lab.book.chapters.pipeline import experiment as pipeline
from mooncake_lab.book.chapters.placement import experiment as placement
from mooncake_lab.book.rendering.notebook import read_notebook
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import AfterPrefill, EarlyRejection, KVCacheCentric, LoadBalance
from mooncake_lab.conductor.placement import FewestRequests
from mooncake_lab.course.admission import goodput
from mooncake_lab.course.eviction import check_policy

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def starter(chapter, name):
    """The class of a chapter's last exercise, as the reader finds it."""
    cells = [cell for cell in read_notebook(NOTEBOOKS / f"{chapter}.ipynb").cells if cell.cell_type == "code"]
    known: dict[str, object] = {}
    for cell in cells:
        kept = [
            statement
            for statement in ast.parse(cell.text).body
            if isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef)
        ]
        exec(compile(ast.Module(kept, type_ignores=[]), chapter, "exec"), known)  # noqa: S102  # our own cells
    return known[name]


def test_a_pipeline_policy():
    """Small chunks at the end take longer than SARATHI; filling every iteration takes less and idles less."""
    policies = (starter("06_pipeline", "MyPolicy")(), Sarathi(chunk_tokens=256), SarathiServe(chunk_tokens=256))
    mine, plain, filled = (pipeline.with_policy(policy) for policy in policies)
    assert mine[0] > plain[0] > filled[0]
    assert plain[1] > filled[1]


def test_an_eviction_policy():
    """Evicting the most recent key keeps the contract and has far fewer hits than LRU."""
    found = check_policy(lambda _capacity_blocks: starter("07_store", "MyPolicy")())
    assert found.passed
    assert found.hit_rate < 0.5 * found.lru_hit_rate


def test_a_placement_policy():
    """Round robin takes longer than Algorithm 1."""
    assert placement.mean_ttft_s(starter("09_placement", "MyPolicy")()) > placement.mean_ttft_s(KVCacheCentric())


def test_a_router():
    """The shortest queue serves less than fewest requests; keeping long prompts apart serves more."""

    @dataclass(frozen=True)
    class Apart:
        """Long prompts on three instances."""

        def place(self, request, view, estimate):
            """As the solution says."""
            few, many = view.decode[:3], view.decode[3:]
            instances = few if request.input_tokens > 20_000 else many
            least = min(instances, key=lambda each: each.requests)
            chosen = view.prefill[view.decode.index(least)]
            return LoadBalance().place(request, view.replace(prefill=(chosen,)), estimate)

    routers = (starter("10_endtoend", "MyRouter")(), FewestRequests(), Apart())
    mine, fewest, apart = (endtoend.capacity_of_router(router) for router in routers)
    assert mine < fewest < apart


def test_an_admission_policy():
    """Early rejection serves more than the baseline and less than counting the coming, which is the solution."""
    model = paper_node_latency()
    served = [
        goodput(policy, model)
        for policy in (AfterPrefill(), starter("11_overload", "MyPolicy")(), EarlyRejection(with_coming=True))
    ]
    assert served == sorted(set(served))


def test_an_eviction_before_the_question():
    """Equal distances find no answer; keys far from the mean key, as the solution says, find most."""

    class Unusual(starter("14_compression", "MyEviction")):
        """The tokens with the most unusual keys."""

        def keep(self, prefilled, layer):
            """As the solution says."""
            keys = prefilled.keys[layer]
            apart = (keys - keys.mean(dim=1, keepdim=True)).norm(dim=-1)
            return apart.topk(self.capacity, dim=-1).indices.sort(dim=-1).values

    mine = starter("14_compression", "MyEviction")()
    found = compression.compare({"mine": mine, "unusual": Unusual()}, prompts=4, when="later")
    assert found["mine"] < 0.5 < found["unusual"]
