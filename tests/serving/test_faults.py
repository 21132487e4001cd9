"""Faults in the middle of work: nothing that was accepted is lost or answered wrongly, and capacity comes back."""

import asyncio
import itertools
import os
import signal
import threading

import httpx
import openai
import pytest
from waiting import until

from mooncake_lab.batching import named_policy
from mooncake_lab.core import DecodeStretch, Placed
from mooncake_lab.metrics import check_log

MODEL = "random:lab-tiny"
TOKENS = 300  # of an answer: a worker is killed after ten steps and far from the last

FAULTS = {
    "prefill worker killed": lambda live: live.kill("prefill-0"),
    "decode worker killed": lambda live: live.kill("decode-0"),
    "messenger connections broken": lambda live: (
        live.drop_connections("prefill-0"),
        live.drop_connections("decode-0"),
    ),
}


@pytest.fixture(scope="module")
def cluster(open_cluster):
    """Two workers of each kind."""
    with open_cluster(prefill_nodes=2, decode_nodes=2) as live:
        yield live


def kill_at_step(number, name, pid):
    """Kills a worker when the cluster hears of this step of its decoding: called with each record of the log."""
    steps = itertools.count(1)

    def watch(record):
        if isinstance(record, DecodeStretch) and record.instance == name and next(steps) == number:
            os.kill(pid, signal.SIGKILL)

    return watch


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_or_wrong(cluster, traced, expected, fault):
    """After a kill or a broken connection under load, every request has the tokens of an undisturbed run."""
    cluster.reset_prefix_cache()
    requests = traced(24, output_tokens=24)
    timer = threading.Timer(0.15, FAULTS[fault], (cluster,))
    timer.start()
    log = cluster.run(requests)
    timer.join()
    assert cluster.outputs == expected(requests)
    assert check_log(log) == ()
    assert until(lambda: len(cluster.pids()) == 4)


@pytest.mark.parametrize("batching", ["sarathi_serve", pytest.param("vllm", marks=pytest.mark.slow)])
def test_coupled_worker_killed(open_cluster, traced, expected, batching):
    """The baseline keeps the promise too: what ran on a killed coupled worker ends on another, token for token."""
    requests = traced(24, output_tokens=24)
    with open_cluster(coupled_nodes=2, batching=named_policy(batching)) as live:
        live.on_record = kill_at_step(10, "coupled-0", live.pids()["coupled-0"])
        log = live.run(requests)
        assert live.outputs == expected(requests)
        assert until(lambda: len(live.pids()) == 2)
    assert check_log(log) == ()
    assert any("after coupled-0 failed" in record.reason for record in log if isinstance(record, Placed))


def test_sampled_tokens_survive_a_kill(open_api):
    """A draw depends on seed and position alone: streams cut by a kill go on as they would have."""
    prompts = [[i, 7, 9] * 20 for i in range(12)]

    async def streams(api):
        async def one(client, i):
            stream = await client.completions.create(
                model=MODEL, prompt=prompts[i], max_tokens=TOKENS, temperature=0.9, top_p=0.95, seed=i,
                stream=True, extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            return [token async for part in stream for choice in part.choices for token in choice.token_ids]

        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=api.token, max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(len(prompts))))

    with open_api(decode_nodes=2) as api:
        undisturbed = asyncio.run(streams(api))
        placements = metric(api, "mooncake_placements_total")
        api.watch = kill_at_step(10, "decode-0", api.runtime.supervisor.connections["decode-0"].ready.pid)
        assert asyncio.run(streams(api)) == undisturbed
        assert metric(api, "mooncake_placements_total") > placements + len(prompts)  # some a second time
    assert all(len(tokens) == TOKENS for tokens in undisturbed)
    assert len({tuple(tokens) for tokens in undisturbed}) == len(prompts)


def metric(api, name):
    """A counter, as Prometheus is told."""
    page = httpx.get(f"{api.url}/metrics", headers={"Authorization": f"Bearer {api.token}"}).text
    return float(next(line.split()[-1] for line in page.splitlines() if line.startswith(name + " ")))


def test_capacity_returns(cluster, traced, expected):
    """With every decode worker dead, requests wait; they are served when the workers are replaced."""
    requests = traced(6)
    for name in ("decode-0", "decode-1"):
        cluster.kill(name)
    cluster.run(requests)
    assert cluster.outputs == expected(requests)
    assert until(lambda: len(cluster.pids()) == 4)
