"""A request that cannot be served ends alone: its budget is free, its client is told, and no other is hurt."""

import asyncio

import httpx
import numpy as np
import openai
import pytest
from quiet_workers import QuietCluster

from mooncake_lab.cluster import events
from mooncake_lab.conductor import AdmitAll
from mooncake_lab.serving import FailedError
from mooncake_lab.serving.messages import CancelOrder, Job, PrefillOrder, SamplingParams

MODEL = "random:lab-tiny"
UNSAYABLE = 2**64
"""As top_k: more than a message can carry."""
UNUSABLE = 2**63
"""As top_k: more than an engine can use."""


def asked(**changes):
    return SamplingParams(max_new_tokens=4, **changes)


@pytest.fixture
def quiet(believed):
    """A cluster whose workers do nothing."""
    return QuietCluster(believed)


def submit(cluster, **asked):
    return cluster.submit(np.arange(40, dtype=np.int32), **asked)


def test_what_cannot_be_sent_ends(quiet):
    """A request that no message can carry is refused to its client, and nothing of it is left."""
    for _ in range(3):
        with pytest.raises(FailedError, match="cannot be served"):
            submit(quiet, top_k=UNSAYABLE)
    assert quiet.is_free()


def test_a_death_places_all_others_again(quiet):
    """One of three requests cannot be placed again: when a worker goes down it ends, and the other two go on."""
    streams = [submit(quiet) for _ in range(3)]
    streams[0].params = asked(top_k=UNSAYABLE)  # as if it had slipped through
    quiet.take_down("decode-0")
    quiet.bring_up("decode-0")
    assert isinstance(streams[0].end.error, FailedError)
    assert [stream.end for stream in streams[1:]] == [None, None]
    assert [quiet.attempt(stream).n for stream in streams[1:]] == [2, 2]
    assert list(quiet.runtime.streams.values()) == streams[1:]


class FailsOnArrival(AdmitAll):
    """Cannot check a prompt of 40 tokens again."""

    def double_check(self, request, decode, *, estimate, slo):
        """A mistake."""
        del decode, estimate, slo
        if request.input_tokens == 40:
            raise ZeroDivisionError


def test_a_double_check_that_fails_costs_its_request(believed):
    """A policy's error when KVCache has arrived ends that request, and the other goes on."""
    quiet = QuietCluster(believed, admission=FailsOnArrival())
    one, other = submit(quiet), quiet.submit(np.arange(50, dtype=np.int32))
    for stream in (one, other):
        attempt = quiet.attempt(stream)
        quiet.hear("decode-0", events.KVArrived(at_s=1.0, attempt=attempt, start_s=0.5, bytes=1))
    assert isinstance(one.end.error, FailedError)
    assert other.end is None
    assert quiet.lines["decode-0"].of(CancelOrder) == [CancelOrder(Job(1, one.request_id, 1))]


def test_the_log_fails_and_the_client_is_told(quiet, caplog):
    """A request ends for its client and at its workers even if its end cannot be written down."""
    stream = submit(quiet)

    def broken(_):
        raise OSError("no space")

    quiet.runtime._write = broken
    quiet.runtime.cancel(stream, "the client went away")
    assert stream.end is not None
    assert quiet.lines["prefill-0"].of(CancelOrder)
    assert "no space" in caplog.text


def test_workers_get_what_they_can_use(quiet):
    """A sound request is sent whole."""
    submit(quiet, top_k=7, min_new_tokens=2)
    [order] = quiet.lines["prefill-0"].of(PrefillOrder)
    assert (order.params.top_k, order.params.min_new_tokens) == (7, 2)


@pytest.mark.parametrize("layout", [{"prefill_nodes": 1, "decode_nodes": 2}, {"coupled_nodes": 2}])
def test_a_poisoned_request_and_a_death_under_40_streams(open_api, layout):
    """Poison is refused, a worker is killed under 40 streams, and every one of them has all its tokens."""
    with open_api(**layout) as api:
        headers = {"Authorization": f"Bearer {api.token}"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "top_k": UNSAYABLE}
        assert httpx.post(f"{api.url}/v1/completions", json=body, headers=headers).status_code == 400

        async def poison(top_k):
            stream = api.runtime.submit(np.arange(40, dtype=np.int32), asked(top_k=top_k, temperature=1.0))
            return [token async for token in stream]

        loop = api.loop

        def poisoned(top_k):
            with pytest.raises(FailedError):
                asyncio.run_coroutine_threadsafe(poison(top_k), loop).result(60)

        victim = "coupled-1" if "coupled_nodes" in layout else "decode-1"

        async def stream(client, number):
            made = await client.completions.create(
                model=MODEL, prompt=[number, 1, 2, 3], max_tokens=60, temperature=0, stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            found = []
            async for part in made:
                found += part.choices[0].token_ids
                if number == 0 and len(found) == 5:
                    loop.call_soon_threadsafe(api.runtime.supervisor.kill, victim)
            return found

        async def everybody():
            async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=api.token, max_retries=0) as client:
                return await asyncio.wait_for(asyncio.gather(*(stream(client, i) for i in range(40))), 120)

        before = {name: link.ready.pid for name, link in api.runtime.supervisor.connections.items()}
        for top_k in (UNSAYABLE, UNUSABLE):
            poisoned(top_k)
        assert {name: link.ready.pid for name, link in api.runtime.supervisor.connections.items()} == before
        assert [len(tokens) for tokens in asyncio.run(everybody())] == [60] * 40
        assert not api.runtime.streams
