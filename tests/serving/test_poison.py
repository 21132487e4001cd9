"""A request that cannot be served ends alone: its budget is free, its client is told, and no other is hurt."""

import asyncio
import time

import httpx
import numpy as np
import openai
import pytest

from mooncake_lab.conductor import LatencyEstimator
from mooncake_lab.perf import model_shape
from mooncake_lab.serving import LiveSpec
from mooncake_lab.serving.dispatcher import Dispatcher
from mooncake_lab.serving.frames import pack
from mooncake_lab.serving.journal import Journal
from mooncake_lab.serving.messages import VERSION, Cancel, Compute, Generation, Joined, Ready, Span, Stepped
from mooncake_lab.serving.ticket import FailedError

MODEL = "random:lab-tiny"
UNSAYABLE = 2**64
"""As top_k: more than a message can carry."""
UNUSABLE = 2**63
"""As top_k: more than an engine can use."""


class Line:
    """A link to a worker that encodes what it is told, as a real one, and can be made to fail."""

    def __init__(self, name):
        self.name, self.told = name, []
        self.ready = Ready(
            version=VERSION, name=name, pid=0, port=1, fingerprint=b"f", window=4096, capacity_tokens=4096,
            shape=model_shape("lab-tiny"), end_tokens=(), device="cpu",
        )  # fmt: skip

    def send(self, *orders):
        pack(orders)
        self.told += orders


class Full(list):
    """Tokens of a request that cannot take one more."""

    def append(self, _):
        """No."""
        raise ZeroDivisionError


def asked(**changes):
    return Generation(prompt=b"", max_new_tokens=4, **changes)


@pytest.fixture
def records():
    return []


@pytest.fixture
def floor(believed, records):
    """A dispatcher and its two lines."""
    dispatcher = Dispatcher(LiveSpec(), Journal(time.monotonic(), records.append), lambda _: None)
    dispatcher.placer.estimate = LatencyEstimator(believed)
    for name in ("prefill-0", "decode-0"):
        dispatcher.born(name, Line(name))
    return dispatcher


def is_free(dispatcher):
    """Whether nothing of any request is left in the front."""
    accounts = dispatcher.placer.books.accounts.values()
    return not dispatcher.placer.tickets and not any(a.prompts or a.contexts or a.sending for a in accounts)


def submit(dispatcher, **changes):
    return dispatcher.submit(np.arange(40, dtype=np.int32), asked(**changes))


def test_what_cannot_be_said_ends(floor):
    """A request that no message can carry is refused to its client, and nothing of it is left."""
    for _ in range(3):
        with pytest.raises(FailedError, match="cannot be served"):
            submit(floor, top_k=UNSAYABLE)
    assert is_free(floor)


def test_a_death_places_all_others_again(floor):
    """One of three requests cannot be placed again: when a worker dies it ends, and the other two go on."""
    tickets = [submit(floor) for _ in range(3)]
    tickets[0].asked = asked(top_k=UNSAYABLE)  # as if it had slipped through
    floor.died("decode-0", "it is gone")
    floor.born("decode-0", Line("decode-0"))
    assert isinstance(tickets[0].end.error, FailedError)
    assert [ticket.end for ticket in tickets[1:]] == [None, None]
    assert [ticket.attempt for ticket in tickets[1:]] == [2, 2]
    assert list(floor.placer.tickets.values()) == tickets[1:]


def test_what_a_worker_says_of_one_request_hurts_no_other(floor):
    """News that cannot be dealt with end the request that they are about, not the worker and not the others."""
    one, other = submit(floor), submit(floor)
    one.tokens = Full()
    span = Span(one.job, 0.0, 1.0, 40, 0)
    floor.heard("decode-0", Joined(job=one.job, at_s=1.0, first_token=1, moves=(), span=span))
    assert isinstance(one.end.error, FailedError)
    assert other.end is None


def test_one_of_a_batch(floor):
    """A step's tokens reach all requests of the batch but the one whose token cannot be shown."""
    one, other = submit(floor), submit(floor)
    one.tokens = Full()
    tokens = ((one.job, 5), (other.job, 6))
    floor.heard("decode-0", Stepped(start_s=0.0, end_s=1.0, tokens=tokens))
    assert isinstance(one.end.error, FailedError)
    assert other.tokens == [6]
    assert floor.placer.links["decode-0"].told[-1] == Cancel(one.job)


def test_the_log_fails_and_the_client_is_told(floor):
    """A request ends for its client and in the books even if its end cannot be written down."""
    ticket = submit(floor)

    def broken(_):
        raise OSError("no space")

    floor.journal._tell = broken
    with pytest.raises(OSError, match="no space"):
        floor.cancel(ticket)
    assert ticket.end is not None
    assert is_free(floor)


def test_workers_get_what_they_can_use(floor):
    """A sound request is sent whole."""
    submit(floor, top_k=7, min_new_tokens=2)
    [order] = [one for one in floor.placer.links["prefill-0"].told if isinstance(one, Compute)]
    assert (order.asked.top_k, order.asked.min_new_tokens) == (7, 2)


@pytest.mark.parametrize("layout", [{"prefill_nodes": 1, "decode_nodes": 2}, {"coupled_nodes": 2}])
def test_a_poisoned_request_and_a_death_under_40_streams(open_door, layout):
    """Poison is refused, a worker is killed under 40 streams, and every one of them has all its tokens."""
    none = {"prefill_nodes": 0, "decode_nodes": 0} if "coupled_nodes" in layout else {}
    with open_door(**none, **layout) as door:
        headers = {"Authorization": f"Bearer {door.token}"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "top_k": UNSAYABLE}
        assert httpx.post(f"{door.url}/v1/completions", json=body, headers=headers).status_code == 400

        async def poison(top_k):
            ticket = door.hall.submit(np.arange(40, dtype=np.int32), asked(top_k=top_k, temperature=1.0))
            return [token async for token in ticket]

        loop = door.loop

        def poisoned(top_k):
            with pytest.raises(FailedError):
                asyncio.run_coroutine_threadsafe(poison(top_k), loop).result(60)

        victim = "coupled-1" if none else "decode-1"

        async def stream(client, number):
            made = await client.completions.create(
                model=MODEL, prompt=[number, 1, 2, 3], max_tokens=60, temperature=0, stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            found = []
            async for part in made:
                found += part.choices[0].token_ids
                if number == 0 and len(found) == 5:
                    loop.call_soon_threadsafe(door.hall.supervisor.kill, victim)
            return found

        async def everybody():
            async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
                return await asyncio.wait_for(asyncio.gather(*(stream(client, i) for i in range(40))), 120)

        before = {name: link.ready.pid for name, link in door.hall.supervisor.links.items()}
        for top_k in (UNSAYABLE, UNUSABLE):
            poisoned(top_k)
        assert {name: link.ready.pid for name, link in door.hall.supervisor.links.items()} == before
        assert [len(tokens) for tokens in asyncio.run(everybody())] == [60] * 40
        assert not door.hall.dispatcher.placer.tickets
