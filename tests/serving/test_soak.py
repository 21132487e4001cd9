"""Long runs: many streams at once, many faults, and no process left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import openai
import pytest
from waiting import until

from mooncake_lab.bench.faults import FAULTS, strike
from mooncake_lab.cluster import SHARED_STORE
from mooncake_lab.core import FirstToken, Moved, Placed
from mooncake_lab.metrics import check_log
from mooncake_lab.serving.openai_api.connections import ClientLimits

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # looked at, not used
MODEL = "random:lab-tiny"
EXTRA = {"return_token_ids": True, "ignore_eos": True}

pytestmark = pytest.mark.slow


COUPLED = {"coupled_nodes": 2}


def prompts_of_families(streams):
    """Prompts of up to 150 tokens; half of them begin as 8 others do."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, 256, (8, 80)).tolist()
    return [
        first[i % 16 // 2] * (i % 2) + rng.integers(0, 256, rng.integers(4, 70)).tolist() for i in range(streams)
    ]


@pytest.mark.parametrize("killed", [None, "prefill-0", "decode-0", "coupled-0", SHARED_STORE])
def test_500_streams(open_api, reference, killed):
    """Of 500 concurrent streams none fails and none is mixed up, whatever kind of process is killed meanwhile."""
    prompts = prompts_of_families(500)
    expected = reference(prompts, 24)
    nodes = COUPLED if killed == "coupled-0" else {"prefill_nodes": 2, "decode_nodes": 2}
    pool = {"shared_store": "remote", "cache_tokens": 512} if killed == SHARED_STORE else {}
    found = {"killed": killed, "streams": len(prompts), "failed": 0}
    why = Counter()
    # all clients share this process: on a busy machine one takes longer for its headers than a server waits
    patient = ClientLimits(header_s=600.0, body_s=600.0, idle_s=600.0, stalled_s=600.0)
    with open_api(**nodes, **pool, address={"limits": patient}) as api:
        runtime = api.runtime

        def strike():
            found["in_flight"] = len(runtime.streams)
            runtime.supervisor.kill(killed)

        def wait_and_strike():
            assert until(lambda: sum(isinstance(record, FirstToken) for record in list(api.log)) >= 20)
            api.loop.call_soon_threadsafe(strike)

        async def stream(client, prompt):
            tokens = []
            try:
                made = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=True, extra_body=EXTRA
                )
                async for part in made:
                    tokens += [token for choice in part.choices for token in choice.token_ids]
            except openai.APIError as error:
                found["failed"] += 1
                why[f"{type(error).__name__}: {error}"[:200]] += 1
            return tuple(tokens)

        async def everybody():
            asked = {"base_url": f"{api.url}/v1", "api_key": api.token, "max_retries": 0, "timeout": 600.0}
            async with openai.AsyncOpenAI(**asked) as client:
                return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

        begun_s = time.monotonic()
        striker = threading.Thread(target=wait_and_strike if killed else lambda: None)
        striker.start()
        outputs = asyncio.run(everybody())
        striker.join()
        found["seconds"] = round(time.monotonic() - begun_s, 1)
        log = list(api.log)
    placed = sum(isinstance(record, Placed) for record in log)
    found |= {"placed_again": placed - len(prompts), "from_pool": sum(map(comes_from_pool, log))}
    found["wrong"] = sum(tokens != right for tokens, right in zip(outputs, expected, strict=True))
    sys.stdout.write(f"{json.dumps(found)}\n")
    assert (found["failed"], found["wrong"]) == (0, 0), why
    assert killed is None or found["in_flight"] > 0


def comes_from_pool(record):
    return isinstance(record, Moved) and record.source == SHARED_STORE


@pytest.mark.parametrize("fault", FAULTS)
def test_soak(open_cluster, traced, expected, fault):
    """Struck again and again under load, the cluster loses nothing and answers nothing wrongly."""
    requests = traced(80, every_s=0.02, output_tokens=40)
    undisturbed = expected(requests)
    with open_cluster(prefill_nodes=2, decode_nodes=2) as live:
        for at_s in (0.4, 0.9):
            live.reset_prefix_cache()
            report = strike(live, requests, fault, at_s=at_s, expected=undisturbed)
            sys.stdout.write(f"{report}\n")
            assert (report.lost, report.wrong) == (0, 0)
            assert report.in_flight > 0
            assert check_log(live.log) == ()


def is_ours(path, pids):
    """Whether a file of shared memory may be of these processes; other programs of the machine make some, too."""
    return path.stat().st_uid == os.getuid() and any(str(pid) in path.name for pid in pids)


def family(pid):
    """A process and all below it."""
    found = [pid]
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += family(int(status.parent.name))
    return found


@pytest.mark.parametrize(
    ("end", "transfer"),
    [
        (signal.SIGTERM, "tcp"),
        (signal.SIGKILL, "tcp"),
        (signal.SIGINT, "tcp"),
        pytest.param(signal.SIGKILL, "mooncake", marks=pytest.mark.wheel),
    ],
)
def test_no_orphans(end, transfer):
    """However `serve` ends, in the middle of a stream, no process and no shared memory of it is left."""
    before = set(Path(SHARED_MEMORY).iterdir())
    command = [
        sys.executable,
        "-m",
        "mooncake_lab",
        "serve",
        "--model",
        MODEL,
        "--port",
        "0",
        "--backend",
        "dense",
        "--transfer",
        transfer,
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        listening = json.loads(server.stdout.readline())
        deadline_s = time.monotonic() + 60
        while len(pids := family(server.pid)) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert len(pids) == 4  # serve, two workers, a spare that may still load
        # other programs keep files there too: ours map none, so that none can be left
        mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        assert transfer == "mooncake" or not any(SHARED_MEMORY in text for text in mapped)
        with openai.OpenAI(base_url=listening["url"], api_key=listening["api_key"], max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL, prompt="x", max_tokens=300, temperature=0, stream=True, extra_body=EXTRA
            )
            next(iter(stream))
            server.send_signal(end)
            if end != signal.SIGKILL:  # what is under way is finished first
                assert sum(len(choice.token_ids) for part in stream for choice in part.choices) == 299
        assert server.wait(60) == (0 if end != signal.SIGKILL else -signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert {
        path.name for path in Path(SHARED_MEMORY).iterdir() if path not in before and is_ours(path, pids)
    } == set()


def test_silent_worker(open_cluster, traced, expected):
    """A worker that stops without dying is noticed by its silence and replaced; nothing is lost or wrong."""
    requests = traced(30, every_s=0.02, output_tokens=40)
    undisturbed = expected(requests)
    with open_cluster(prefill_nodes=1, decode_nodes=2, heartbeat_timeout_s=3.0) as live:
        deaf = live.pids()["decode-0"]
        timer = threading.Timer(0.3, os.kill, (deaf, signal.SIGSTOP))
        timer.start()
        log = live.run(requests)
        assert live.outputs == undisturbed
        assert check_log(log) == ()
        deadline_s = time.monotonic() + 60
        while live.pids().get("decode-0") in {None, deaf} and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert live.pids()["decode-0"] != deaf
        assert live.generate([[1, 2, 3]], max_new_tokens=4)
