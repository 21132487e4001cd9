"""A prefix in DRAM, on SSD, on another worker and in the pool: reused with the same tokens, until it is gone."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import flat
import openai
import pytest
from waiting import until

from mooncake_lab.cluster import SHARED_STORE, events
from mooncake_lab.conductor import Placement
from mooncake_lab.core import Finished, Moved, Prefilled, Request, TracedRequest, blocks_for
from mooncake_lab.perf import LinkLatency
from mooncake_lab.serving import ClusterRuntime, LiveOptions, WorkerError
from mooncake_lab.serving.launch import pause_before_restart_s
from mooncake_lab.serving.spec import worker_spec

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class ByParity:
    """Prefill on worker `id % workers`, and fetch what the longest holder has more."""

    def place(self, request, view, estimate):
        del estimate
        here = view.prefill[request.id % len(view.prefill)]
        best = max(view.prefill, key=lambda each: each.matched_blocks)
        local, most = (min(each.matched_blocks * BLOCK, request.input_tokens - 1) for each in (here, best))
        fetches = most > local
        return Placement(
            request_id=request.id, prefill=here.name, decode=view.decode[0].name,
            reused_tokens=most if fetches else local, fetch_from=best.name if fetches else None,
            fetched_tokens=most - local, expected_ttft_s=0.0, expected_tbt_s=0.0, reason="for tests",
        )  # fmt: skip


def turn(number, *, conversation, tokens=70, arrival_s=0.0):
    """A request whose prompt begins as every other prompt of its conversation does."""
    keys = tuple(1000 * conversation + k for k in range(blocks_for(tokens, BLOCK)))
    request = Request(
        id=number, arrival_s=arrival_s, input_tokens=tokens, block_keys=keys, block_size_tokens=BLOCK
    )
    return TracedRequest(request, 5)


def settle(live):
    """Wait until no worker writes to a lower tier any more, and the cluster knows."""
    before = None
    for _ in range(100):
        workers = live._runtime.coordinator.instances
        now = {cache: len(workers.cached(cache)) for cache in workers.index.instances}
        if now == before:
            return now
        before = now
        time.sleep(0.2)
    raise AssertionError("the caches do not come to rest")


def knows(runtime, worker, blocks):
    """Wait until the cluster knows how many blocks a worker holds: it is told after the prompt was answered."""
    return until(lambda: len(runtime.coordinator.instances.cached(worker)) == blocks)


def moved(log, source, destination):
    """The bytes that moved between two places."""
    return sum(r.bytes for r in log if isinstance(r, Moved) and (r.source, r.destination) == (source, destination))


def reused(log):
    """Reused tokens by request."""
    return {r.request_id: r.reused_tokens for r in log if isinstance(r, Prefilled)}


def evict(live, first, conversations):
    """Push the blocks of others out of DRAM, slowly enough that none is dropped on its way down."""
    for number in conversations:
        live.run([turn(first, conversation=number, tokens=2 * BLOCK + 1)])
        settle(live)


@pytest.mark.parametrize(
    "tier", ["dram", "ssd", "slow ssd", "worker", "pool", pytest.param("mooncake", marks=pytest.mark.wheel)]
)
def test_a_second_turn_has_the_same_tokens_wherever_its_prefix_lies(
    open_cluster, believed, expected, tmp_path, tier
):
    """The prefix is read from that place and from nowhere else, and the tokens are those of recomputation.

    It is computed where that is faster than reading (FAST'25 Eq. 2).
    """
    model = dataclasses.replace(believed, ssd=LinkLatency(1e3)) if tier == "slow ssd" else believed
    changes = {
        "dram": {},
        "ssd": {"cache_tokens": 12 * BLOCK, "ssd_dir": str(tmp_path), "ssd_tokens": 4096},
        "slow ssd": {"cache_tokens": 12 * BLOCK, "ssd_dir": str(tmp_path), "ssd_tokens": 4096},
        "worker": {"prefill_nodes": 2, "placement": ByParity()},
        "pool": {"cache_tokens": 12 * BLOCK, "shared_store": "remote"},
        "mooncake": {"cache_tokens": 12 * BLOCK, "shared_store": "mooncake"},
    }[tier]
    first, second = turn(0, conversation=1), turn(1, conversation=1, tokens=101)
    with open_cluster(model, **changes) as live:
        live.run([first])
        assert live.outputs == expected([first])
        if tier not in {"dram", "worker"}:
            evict(live, 0, range(2, 9))
        log = live.run([second])
        assert live.outputs == expected([second])
    here = "prefill-1" if tier == "worker" else "prefill-0"
    size = moved(log, here, "decode-0") // 101
    came = {
        "ssd": moved(log, "prefill-0/ssd", "prefill-0/dram"),
        "worker": moved(log, "prefill-0", here),
        "pool": moved(log, SHARED_STORE, here),
    }
    assert {place: found // size // BLOCK for place, found in came.items()} == {
        place: 4 * (place == tier.replace("mooncake", SHARED_STORE)) for place in came
    }
    assert reused(log) == {1: 0 if tier == "slow ssd" else 4 * BLOCK}


def test_what_one_worker_puts_into_the_pool_another_finds(open_cluster, expected):
    """A prefix that its worker evicted is found by the other worker, without the first: that is dead by then."""
    with open_cluster(
        prefill_nodes=2, placement=ByParity(), cache_tokens=12 * BLOCK, shared_store="remote"
    ) as live:
        live.run([turn(0, conversation=1)])
        evict(live, 0, range(2, 9))
        os.kill(live.pids()["prefill-0"], signal.SIGKILL)
        log = live.run([turn(1, conversation=1)])
        assert live.outputs == expected([turn(1, conversation=1)])
    assert reused(log) == {1: 4 * BLOCK}
    assert moved(log, SHARED_STORE, "prefill-1")


def descendants(pid):
    """The processes that a process started, and those that they started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def kill(live, victim):
    """Kill -9 of a worker, of the pool, or of the master of a Mooncake Store."""
    if victim == "master":
        os.kill(descendants(live._runtime.supervisor.shared_store.pid)[-1], signal.SIGKILL)
    else:
        live.kill(victim)


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("remote", "prefill-0"),
        ("remote", SHARED_STORE),
        pytest.param("mooncake", SHARED_STORE, marks=pytest.mark.wheel),
        pytest.param("mooncake", "master", marks=pytest.mark.wheel),
    ],
)
def test_the_death_of_a_worker_or_of_the_pool_costs_no_request(open_cluster, expected, kind, victim):
    """Kill -9 under load: every request ends with its own tokens, and the pool is used again afterwards."""
    changes = {"prefill_nodes": 2, "cache_tokens": 16 * BLOCK, "shared_store": kind, "fetch_timeout_s": 1.0}
    requests = [turn(i, conversation=i % 8, arrival_s=0.02 * i) for i in range(60)]
    with open_cluster(**changes) as live:
        before = live._runtime.supervisor.shared_store.pid
        killer = threading.Timer(0.5, kill, [live, victim])
        killer.start()
        log = live.run(requests)
        killer.join()
        assert live.outputs == expected(requests)
        assert sum(isinstance(record, Finished) for record in log) == len(requests)
        deadline_s = time.monotonic() + 60
        while len(live.pids()) < 3 or live._runtime.supervisor.shared_store.address is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert (live._runtime.supervisor.shared_store.pid == before) == (victim == "prefill-0")
        for number in range(1000, 20_000, 100):  # until workers have joined the pool again
            first, again = (turn(number + k, conversation=number) for k in range(2))
            live.run([first])
            evict(live, number + 2, range(number + 1, number + 11))
            log = live.run([again])
            assert live.outputs == expected([again])
            if any(isinstance(record, Moved) and record.source == SHARED_STORE for record in log):
                break
            assert time.monotonic() < deadline_s
    assert reused(log) == {again.request.id: 4 * BLOCK}


class FirstElsewhere(ByParity):
    """Prefill the first request on one worker and all others on the next one."""

    def place(self, request, view, estimate):
        placed = super().place(dataclasses.replace(request, id=min(request.id, 1)), view, estimate)
        return dataclasses.replace(placed, request_id=request.id)


def test_a_prompt_that_is_cancelled_during_its_fetch_holds_nobody(open_api, reference):
    """Its client leaves while its prefix is awaited from a worker that stalls: the next prompt is computed."""
    prompts = [[1] * 70, [1] * 90, [2] * 70]
    expected = reference(prompts, 5)
    policy = FirstElsewhere()
    with open_api(prefill_nodes=2, placement=policy, fetch_timeout_s=600.0, heartbeat_timeout_s=600.0) as api:

        def answer(prompt, **limits):
            with api.client() as one:
                made = one.completions.create(
                    model="random:lab-tiny", prompt=prompt, max_tokens=5, temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True}, **limits,
                )  # fmt: skip
            return tuple(made.choices[0].token_ids)

        assert answer(prompts[0]) == expected[0]
        assert knows(api.runtime, "prefill-0", 70 // BLOCK)
        holder = api.runtime.supervisor.connections["prefill-0"].ready.pid
        os.kill(holder, signal.SIGSTOP)
        try:
            with pytest.raises(openai.APITimeoutError):
                answer(prompts[1], timeout=2.0)
            assert until(lambda: not api.runtime.streams)
            assert answer(prompts[2]) == expected[2]
            assert not api.runtime.coordinator.instances.by_name[
                "prefill-0"
            ].prefill.sending  # as far as the cluster knows
        finally:
            os.kill(holder, signal.SIGCONT)
        assert answer(prompts[1]) == expected[1]


def test_a_holder_that_stalls_holds_nobody(open_cluster, expected):
    """The holder of a prefix is stopped: the prompt is computed after the deadline, before that is noticed."""
    with open_cluster(prefill_nodes=2, placement=ByParity(), fetch_timeout_s=0.3, peer_timeout_s=600.0) as live:
        live.run([turn(0, conversation=1)])
        assert knows(live._runtime, "prefill-0", 70 // BLOCK)
        pid = live.pids()["prefill-0"]
        os.kill(pid, signal.SIGSTOP)
        live.on_record = lambda record: os.kill(pid, signal.SIGCONT) if isinstance(record, Finished) else None
        log = live.run([turn(1, conversation=1)])
        assert live.outputs == expected([turn(1, conversation=1)])
        assert live.pids()["prefill-0"] == pid
    [fetched] = {event for event, _ in live.events if isinstance(event, events.PrefixFetched)}
    assert (fetched.source, fetched.bytes) == ("prefill-0", 0)
    assert reused(log) == {1: 0}


def test_a_cluster_that_ends_takes_its_pool_with_it(open_cluster):
    """The process of the pool is gone when the cluster is closed."""
    with open_cluster(shared_store="remote") as live:
        pid = live._runtime.supervisor.shared_store.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.wheel
def test_a_cluster_uses_a_mooncake_store_that_runs_already(open_cluster, expected):
    """Its workers put blocks there and find them again; the store outlives the cluster."""
    with open_cluster(shared_store="mooncake") as owner:
        address = owner._runtime.supervisor.shared_store.address
        shared = {"shared_store": "mooncake", "shared_store_address": address, "cache_tokens": 12 * BLOCK}
        with open_cluster(**shared) as live:
            assert live._runtime.supervisor.shared_store.pid is None
            evict(live, 0, range(8))
            log = live.run([turn(50, conversation=0)])
            assert live.outputs == expected([turn(50, conversation=0)])
            assert reused(log) == {50: 2 * BLOCK}
            assert moved(log, SHARED_STORE, "prefill-0")
        assert owner._runtime.supervisor.shared_store.pid is not None


def test_a_pool_that_cannot_be_used_is_refused_in_a_sentence():
    """Only a Mooncake Store may run elsewhere, at HOST:PORT."""
    for changes, words in (
        ({"shared_store_address": "127.0.0.1:1"}, "only a Mooncake Store has one"),
        ({"shared_store": "remote", "shared_store_address": "127.0.0.1:1"}, "only a Mooncake Store"),
        ({"shared_store": "mooncake", "shared_store_address": "nowhere"}, "HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=words):
            LiveOptions(**changes)


@pytest.mark.wheel
def test_a_pool_that_does_not_answer_is_refused_in_a_sentence(open_cluster):
    """Something has to listen at the address of a Mooncake Store."""
    with (
        pytest.raises(WorkerError, match=r"no shared store answers at 127\.0\.0\.1:1"),
        open_cluster(shared_store="mooncake", shared_store_address="127.0.0.1:1"),
    ):
        pass


def test_a_pool_elsewhere_is_as_large_as_it_is():
    """How much a worker remembers of a Mooncake Store at an address does not depend on `shared_store_tokens`."""
    clusters = [
        flat.live(shared_store="mooncake", shared_store_address="127.0.0.1:1", shared_store_tokens=tokens)
        for tokens in (1024, 65_536)
    ]
    told = {worker_spec(*each, "prefill-0", bytes(32)).shared_store_tokens for each in clusters}
    assert len(told) == 1
    assert min(told) > 2**20


PARENT_OF_A_POOL = """
import asyncio
from mooncake_lab.serving import LiveOptions
from mooncake_lab.serving.launch.shared_store import SharedStoreServer
async def main():
    options = LiveOptions(shared_store="remote", shared_store_tokens=4096)
    pool = SharedStoreServer(options, bytes(32), lambda address: None)
    await pool.start(64)
    print(pool.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the process")
def test_a_stopped_pool_ends_with_its_parent():
    """Kill -9 of the cluster's process ends the process of the pool, even one that is stopped."""
    with subprocess.Popen([sys.executable, "-c", PARENT_OF_A_POOL], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    ended = until(lambda: not Path(f"/proc/{pid}").exists(), 20)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


def test_a_process_that_ran_long_is_started_again_at_once():
    """Each short run doubles the pause before the next start, and a long one sets it back."""
    pauses = [0.0]
    for ran_s in (1, 1, 1, 100, 1):
        pauses.append(pause_before_restart_s(pauses[-1], ran_s))
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.0, 0.1]


def test_a_pool_that_ends_before_the_first_run_is_started_again():
    """During calibration there is no run yet whose coordinator could be told."""

    async def run():
        runtime = ClusterRuntime(
            *flat.live(shared_store="remote", shared_store_tokens=4096, spares=0), write=lambda _: None
        )
        calibrate = runtime.calibrate

        async def calibrate_without_pool():
            first = runtime.supervisor.shared_store.address
            runtime.supervisor.kill("pool")
            while runtime.supervisor.shared_store.address in (None, first):  # noqa: ASYNC110  # a process has no event
                await asyncio.sleep(0.05)
            return await calibrate()

        runtime.calibrate = calibrate_without_pool
        async with runtime:
            assert runtime.supervisor.shared_store.address is not None

    asyncio.run(asyncio.wait_for(run(), 60))
