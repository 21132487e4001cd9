"""A prefill worker by itself: what it sends, what it reports, and what a stalled holder costs it."""

import queue
import threading
import time

import numpy as np
import pytest
import torch

from mooncake_lab.cluster import PrefillDone, PrefixFetched, TierRead
from mooncake_lab.engine import load_model
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import fingerprint
from mooncake_lab.serving import LiveSpec
from mooncake_lab.serving.kv_transfer.protocol import EndTransfer, KVChunk, StartTransfer
from mooncake_lab.serving.kv_transfer.sender import Identity
from mooncake_lab.serving.messages import Fetch, Generation, Job, PrefillOrder, Report
from mooncake_lab.serving.roles import PrefillRole, WorkerContext
from mooncake_lab.serving.roles import prefill as prefill_module
from mooncake_lab.serving.spec import worker_spec

BLOCK = 16


class Sent:
    """Takes the place of the senders: keeps what would leave the worker."""

    def __init__(self):
        self.messages = []

    def to(self, port):
        assert port == 1
        return self

    def send(self, message, payload=()):
        self.messages.append((message, [part.copy() for part in payload]))


class Bench:
    """A prefill role whose inbox, reports and transfers a test can see."""

    def __init__(self, **changes):
        spec = LiveSpec(model="random:lab-tiny", device="cpu", backend="dense", block_size_tokens=BLOCK, **changes)
        model = load_model(spec.model, device="cpu", backend="dense", positions=1024)
        name = fingerprint(model.config, model.weights_digest, model.embedding.dtype)
        self.shape = KVLayout.of(model, name)
        self.reports, self.inbox, self.sent = [], queue.SimpleQueue(), Sent()
        self.role = PrefillRole(
            WorkerContext(
                spec=worker_spec(spec, "prefill-0", bytes(32)),
                model=model,
                shape=self.shape,
                identity=Identity(name="prefill-0", token=bytes(32), fingerprint=name, timeout_s=10.0),
                senders=self.sent,
                channel=None,
                send=self.reports.append,
                enqueue=self.inbox.put,
            )
        )

    def order(self, prompt, n=1, fetch=None):
        asked = Generation(prompt=np.array(prompt, np.int32).tobytes(), max_new_tokens=1)
        return PrefillOrder(job=Job(1, n, 1), asked=asked, deliver_to=1, fetch=fetch)

    def keys(self, prompt):
        return self.role._context.keys(np.array(prompt, np.int32))

    def serve(self, order):
        """Take an order and compute until it is done; the KVCache that the decode worker has then."""
        self.sent.messages.clear()
        self.role.take(order)
        while not self.role.busy:
            self.role.take(self.inbox.get(timeout=60))
        while self.role.busy:
            self.role.step()
        [start] = [m for m, _ in self.sent.messages if isinstance(m, StartTransfer)]
        [end] = [m for m, _ in self.sent.messages if isinstance(m, EndTransfer)]
        layers, covered = self.shape.empty(start.tokens), [0] * self.shape.layers
        for layer in layers:
            layer.fill_(torch.nan)
        for message, payload in self.sent.messages:
            if isinstance(message, KVChunk):
                assert message.start <= covered[message.layer], "a layer leaves from the front"
                [part] = payload
                place = layers[message.layer][:, message.start : message.start + message.tokens]
                place.copy_(torch.from_numpy(part).view(place.dtype).view(place.shape))
                covered[message.layer] = max(covered[message.layer], message.start + message.tokens)
        assert covered == [start.tokens] * self.shape.layers
        return layers, end.first_token

    def told(self, kind):
        return [event for report in self.reports if isinstance(report, Report) for event in report.events
                if isinstance(event, kind)]  # fmt: skip


def same(one, other):
    """Whether two sets of layers are close: chunks and blocks change the order of sums."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return one[1] == other[1]


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("tokens", [79, 80, 81])
@pytest.mark.parametrize("held", [1, 4, 5])
def test_a_loaded_prefix_is_delivered_as_if_it_were_computed(layerwise, tokens, held):
    """The decode worker gets the same KVCache and the same token, whichever part was loaded layer by layer."""
    prompt, cold = list(range(3, 3 + tokens)), Bench(layerwise=layerwise, prefix_reuse=False)
    computed = cold.serve(cold.order(prompt))
    warm = Bench(layerwise=layerwise)
    warm.serve(warm.order(prompt[: held * BLOCK], n=1))
    assert same(warm.serve(warm.order(prompt, n=2)), computed)
    reused = warm.told(PrefillDone)[-1].reused_tokens
    assert reused == min(held * BLOCK, tokens // BLOCK * BLOCK, tokens - 1)


def test_a_block_lost_while_it_is_loaded_is_computed(monkeypatch):
    """A block that is gone after some layers were loaded and sent: the same KVCache leaves, and less is reused."""
    prompt, bench = list(range(3, 3 + 80)), Bench()
    computed = bench.serve(bench.order(prompt, n=1))
    real, keys = bench.role._cache.read_into, bench.keys(prompt)

    def read_into(key, layers, *, first_layer=0):
        if key == keys[2] and first_layer == bench.shape.layers - 1:
            return None
        return real(key, layers, first_layer=first_layer)

    monkeypatch.setattr(bench.role._cache, "read_into", read_into)
    assert same(bench.serve(bench.order(prompt, n=2)), computed)
    assert bench.told(PrefillDone)[-1].reused_tokens == 2 * BLOCK


def test_what_was_read_from_the_ssd_is_reported_and_rises(tmp_path):
    """A prefix that DRAM evicted is read from the SSD layer by layer, reported once, and in DRAM afterwards."""
    bench = Bench(cache_tokens=8 * BLOCK, ssd_dir=str(tmp_path), ssd_tokens=4096)
    prompt = list(range(3, 3 + 64))
    computed = bench.serve(bench.order(prompt, n=1))
    for n in range(2, 10):
        bench.serve(bench.order([n] * BLOCK, n=n))
        bench.role._cache._store.flush()
    assert same(bench.serve(bench.order(prompt, n=10)), computed)
    [read] = bench.told(TierRead)
    assert read.attempt.request_id == 10
    assert read.bytes == 64 * bench.shape.bytes_per_token
    assert read.start_s <= read.at_s <= bench.told(PrefillDone)[-1].at_s
    bench.role._background.shutdown(wait=True)
    keys = bench.keys(prompt)
    assert bench.role._cache._store.tier_of(keys[0]) == "dram"


def test_a_stalled_holder_costs_a_prompt_its_deadline_and_no_more(monkeypatch):
    """After the deadline the prompt is computed, the fetch counts as 0 bytes, and what comes later is dropped."""
    came, release = threading.Event(), threading.Event()
    prompt, bench = list(range(3, 3 + 64)), Bench(fetch_timeout_s=0.05)
    computed = bench.serve(bench.order(prompt, n=1))
    kept = bench.role._cache.blocks(bench.keys(prompt))
    bench.role._cache.forget()

    def stalled(*_):
        came.set()
        release.wait()
        return kept

    monkeypatch.setattr(prefill_module, "fetch", stalled)
    assert same(bench.serve(bench.order(prompt, n=2, fetch=Fetch("prefill-1", 9, 4))), computed)
    assert came.is_set()
    bench.role._cache.forget()
    release.set()
    bench.role._fetcher.shutdown(wait=True)
    while not bench.inbox.empty():
        bench.role.take(bench.inbox.get())
    [fetched] = bench.told(PrefixFetched)
    assert fetched.bytes == 0
    assert fetched.at_s >= fetched.start_s + 0.05
    assert bench.told(PrefillDone)[-1].reused_tokens == 0
    assert bench.role._cache.match(bench.keys(prompt)) == 0


def test_a_prefix_that_comes_in_time_is_reused(monkeypatch):
    """Blocks of another worker are adopted before the prompt begins, and reported with their bytes, once."""
    prompt, bench = list(range(3, 3 + 64)), Bench(fetch_timeout_s=60.0)
    computed = bench.serve(bench.order(prompt, n=1))
    kept = bench.role._cache.blocks(bench.keys(prompt))
    bench.role._cache.forget()
    monkeypatch.setattr(prefill_module, "fetch", lambda *_: kept)
    assert same(bench.serve(bench.order(prompt, n=2, fetch=Fetch("prefill-1", 9, 4))), computed)
    [fetched] = bench.told(PrefixFetched)
    assert fetched.bytes == 64 * bench.shape.bytes_per_token
    assert bench.told(PrefillDone)[-1].reused_tokens == 63
    assert fetched.at_s <= time.monotonic()
