"""Sarathi-Serve's machines, its ideas one by one, and capacity: laws first, then measurements and errata."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.book.chapters.pipeline import claims as stalls
from mooncake_lab.book.chapters.pipeline import serving
from mooncake_lab.book.paper import fact
from mooncake_lab.book.testbeds import sarathi_serve as beds
from mooncake_lab.book.testbeds.sarathi import machine
from mooncake_lab.perf import model_shape, prefill_work
from mooncake_lab.perf.roofline import decode_work


class TestMachines:
    @pytest.mark.parametrize("name", beds.TESTBEDS)
    def test_no_iteration_beats_its_hardware(self, name):
        """Whole prompts and decodes take longer than the roofline of the devices that share a layer allows."""
        bed = beds.testbed(name)
        cost, shape, node = beds.cost_of(bed), model_shape(bed.model), bed.node()
        for tokens in (128, 1024, 4096):
            assert cost.step_s(tokens, 0) > prefill_work(shape, tokens, 0).floor_s(node)
        for batch in (1, 32):
            assert cost.step_s(0, 0, batch, batch * 4096) > decode_work(shape, batch, batch * 4096).floor_s(node)

    def test_only_layers_cut_over_nodes_pay_for_sums(self):
        """The latency of an all-reduce is paid twice a layer by TP8 over two nodes, and by nobody else."""
        for name, bed in beds.TESTBEDS.items():
            paid = bed.clock(1e-3).overhead_s
            assert paid == pytest.approx(0.160 if name == stalls.FALCON_TP8 else 0.0)

    @pytest.mark.parametrize("name", beds.TESTBEDS)
    def test_a_printed_decode_time_is_met_where_it_leaves_room(self, name):
        """Weights and attention can take all of a short one: then decodes cost nothing more, and nothing fails."""
        bed, whole_s = beds.testbed(name), 0.25
        long, short = (bed.clock(decode_s=seconds).cost for seconds in (whole_s, 1e-3))
        assert long.step_s(0, 0, 32, 32 * 4096) == pytest.approx(whole_s)
        assert short.step_s(0, 0, 32, 32 * 4096) < beds.cost_of(bed).step_s(0, 0, 32, 32 * 4096)

    def test_limits_foretell_the_large_machines(self):
        """A fifth of the strict limit is a decode iteration: within a quarter for both pipelines only."""
        table = beds.machines_beside_paper().set_index("testbed")
        ratio = table["model_decode_ms"] / table["paper_decode_ms"]
        assert ratio[["LLaMA2-70B", "Falcon-180B"]].between(0.75, 1.25).all()
        assert (ratio[["Mistral-7B", "Yi-34B"]] > 2).all()


class TestIdeas:
    def test_a_budget_bounds_the_wait_and_a_prompt_does_not(self):
        """Whole prompts delay decodes without bound; within a budget the delay grows by attention only."""
        table = stalls.stalls().query("decodes == 32").set_index(["way", "prompt_tokens"])["over_decode"]
        for prompt in (2048, 8192):
            assert 1 < table["chunk 512", prompt] < table["whole prompt", prompt]
        assert table["chunk 512", 16_384] < 3
        assert table["whole prompt", 16_384] > 28

    def test_overheads_are_foretold_but_for_the_slow_kernel(self):
        """The model, which saw whole prompts only, meets nine of twelve overheads within six percent."""
        table = stalls.chunk_overhead()
        long = table["prompt_tokens"] == 16_384
        assert table[~long]["miss_percent"].abs().max() < 6
        assert (table[long]["paper"] < 1).all()
        assert (table[long]["model"] > 1).all()

    def test_turns_take_as_long_as_their_parts(self):
        """Apart, a chunk and decodes take the sum of both; a plan of one kind takes what it takes anyway."""
        point = serving.Serving(policy="Sarathi-Serve 512", requests=6, rate=2.0)
        together, turns = (
            serving.run_pipeline(each.spec(), each.work()) for each in (point, replace(point, apart=True))
        )
        assert turns.makespan_s > together.makespan_s
        assert sum(turns.prompt_tokens) == sum(together.prompt_tokens)
        assert sum(turns.decodes) == sum(together.decodes)

    def test_layouts_cross(self):
        """Tensor parallelism over nodes is faster with free sums and as slow as printed at `sum_ms_for_twice`."""
        free, found = stalls.layouts((0.0, stalls.sum_ms_for_twice()))["over"]
        assert free < 1
        assert found == pytest.approx(fact(beds.TEXT, series=stalls.FALCON, x="tbt_tp8_over_tp4_pp2").value)


class TestCapacity:
    @pytest.mark.parametrize("policy", ["vLLM", "Sarathi-Serve 512"])
    def test_what_is_found_is_served_and_a_step_more_is_not(self, policy):
        """The rate found meets the limit, and the next step of the search does not."""
        point = serving.CapacitySearch(policy=policy, requests=16, seconds=10.0)
        (row,) = point.rows()
        tried: dict[float, bool] = {}
        assert point._serves(row["requests_per_s"], tried)
        assert not point._serves(row["requests_per_s"] * 2 ** (1 / 4), tried)

    def test_all_bars_are_searched(self):
        """`full` has every machine, workload, limit and policy; other scales what a printed ratio needs."""
        assert len(serving.cells("full")) == 5 * 2 * 2 * 3
        few = serving.cells("classroom")
        assert {each.workload for each in few} == {"openchat_sharegpt4"}
        assert sum(each.seed < 3 for each in few) == (4 * 2 + 2 + 2 + 1) * 3
        assert {(each.testbed, each.limit) for each in few if each.seed >= 3} == {("LLaMA2-70B", "strict")}
        assert {each.sum_ms > 0 for each in few if each.testbed == "Falcon-180B, TP8"} == {True}
        assert len({each.seed for each in few}) == 9
        assert serving.budget_of("LLaMA2-70B", "relaxed") == "Sarathi-Serve 1536"

    def test_capacities_are_means_over_seeds(self):
        """A machine has one row, whose ratio is that of the mean capacities."""
        rows = [
            {"testbed": "x", "workload": "w", "limit": "strict", "policy": policy, "requests": 9,
             "seed": seed, "requests_per_s": rate}
            for policy, rates in (("vLLM", (1.0, 3.0)), ("Sarathi-Serve 512", (4.0, 8.0)))
            for seed, rate in enumerate(rates)
        ]  # fmt: skip
        (row,) = serving.over_vllm(pd.DataFrame(rows)).to_dict(orient="records")
        assert (row["vllm"], row["sarathi"], row["over_vllm"], row["seeds"]) == (2.0, 6.0, 3.0, 2)

    def test_a_machine_may_lack_a_policy(self):
        """Where only vLLM is searched, Sarathi-Serve has no capacity, and no ratio."""
        row = {"testbed": "x", "workload": "w", "limit": "strict", "policy": "vLLM", "requests": 9, "seed": 0}
        (found,) = serving.over_vllm(pd.DataFrame([row | {"requests_per_s": 2.0}])).to_dict(orient="records")
        assert found["vllm"] == 2.0
        assert np.isnan([found["sarathi"], found["orca"], found["over_vllm"]]).all()


class TestErrata:
    def test_table_4_had_not_the_budget_that_it_prints(self):
        """The printed tail lies between the shipped times of prompts of 512 and of 1024 tokens."""
        printed_s = fact(stalls.ABLATION, series="both", x="openchat_tbt_p99").value
        assert printed_s < fact(beds.PREFILLS, x=1024).value / 1000
        assert printed_s > fact(beds.PREFILLS, x=512).value / 1000

    def test_85_times_cheaper_follows_from_neither_account(self):
        """The shipped rows of Yi-34B give 124 by margin and 80 by average; the artifact's text says 85."""
        name = "sarathi_serve_artifact_mixed_batch"
        alone = fact(name, series="decode only, batch 4", x="total_ms").value / 4
        mixed = fact(name, series="1021 prefill tokens + 3 decodes", x="total_ms").value
        prompt = fact(name, series="prefill only, 1024 tokens", x="total_ms").value
        assert round(alone / ((mixed - prompt) / 3)) == 125
        assert round(alone / (mixed / 1024)) == 80


@pytest.mark.parametrize("make", [beds.testbed, machine])
def test_an_unknown_testbed_is_refused_with_those_that_there_are(make):
    """A reader who mistypes a name in a what-if cell sees the names, not the inside of a table."""
    with pytest.raises(ValueError, match=r"no testbed 'A100'; allowed are .+, "):
        make("A100")
