"""A prefill worker by itself: what it sends, what it reports, and what a stalled holder costs it."""

import os
import queue
import threading
import time
from types import SimpleNamespace

import flat
import numpy as np
import pytest
import torch
from fake_streams import OnDevice, fake_streams
from waiting import until

from mooncake_lab.cluster import events
from mooncake_lab.engine import load_model
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import fingerprint
from mooncake_lab.serving.kv_transfer import (
    Identity,
)
from mooncake_lab.serving.messages import (
    CacheUpdate,
    CancelOrder,
    EndTransfer,
    Fetch,
    Job,
    KVChunk,
    Measure,
    Measured,
    PrefillOrder,
    Report,
    SamplingParams,
    StartTransfer,
    UseSharedStore,
)
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.prefix_cache import PrefixCache
from mooncake_lab.serving.roles import WorkerContext
from mooncake_lab.serving.roles import prefill as prefill_module
from mooncake_lab.serving.roles.prefill import PrefillRole
from mooncake_lab.serving.spec import worker_spec
from mooncake_lab.store.backends.ssd_slab import layer_offset

BLOCK = 16


class Sent:
    """Takes the place of the senders: keeps what would leave the worker."""

    def __init__(self):
        self.messages = []

    def to(self, port):
        assert port == 1
        return self

    def send(self, message, payload=(), *, wait=lambda: None):
        wait()
        self.messages.append((message, [part.copy() for part in payload]))


class Bench:
    """A prefill role whose inbox, reports and transfers a test can see."""

    def __init__(self, **changes):
        cluster = flat.live(device="cpu", backend="dense", block_size_tokens=BLOCK, **changes)
        model = load_model("random:lab-tiny", device="cpu", backend="dense", positions=1024)
        name = fingerprint(model.config, model.weights_digest, model.embedding.dtype)
        self.layout = KVLayout.of(model, name, block_tokens=BLOCK)
        self.reports, self.inbox, self.sent = [], queue.SimpleQueue(), Sent()
        self.watch = lambda _: None
        self.role = PrefillRole(
            WorkerContext(
                spec=worker_spec(*cluster, "prefill-0", bytes(32)),
                model=model,
                layout=self.layout,
                identity=Identity(name="prefill-0", token=bytes(32), fingerprint=name, timeout_s=10.0),
                senders=self.sent,
                channel=None,
                link=PacedLink(),
                send=self.send,
                enqueue=self.inbox.put,
            )
        )

    def send(self, message):
        self.reports.append(message)
        self.watch(message)

    def order(self, prompt, n=1, fetch=None, reused_blocks=None):
        tokens, params = np.array(prompt, np.int32).tobytes(), SamplingParams(max_new_tokens=1)
        return PrefillOrder(
            job=Job(1, n, 1), prompt=tokens, params=params, deliver_to=1, fetch=fetch, reused_blocks=reused_blocks
        )

    def keys(self, prompt):
        return self.layout.keys(prompt)

    def serve(self, order):
        """Take an order and compute until it is done; the KVCache that the decode worker has then."""
        self.sent.messages.clear()
        self.role.take(order)
        while not self.role.busy:
            self.role.take(self.inbox.get(timeout=60))
        while self.role.busy:
            self.role.step()
        return self.delivered(order)

    def end(self, executor):
        """Wait for what runs on a thread of the role, and take what that leaves."""
        executor.shutdown(wait=True)
        while not self.inbox.empty():
            self.role.take(self.inbox.get())

    def layers(self, prompt):
        """What another worker would get of this prompt; the cache is empty afterwards."""
        kept = list(self.role._cache.prefix(self.keys(prompt)).layers())
        self.role._cache.forget()
        return kept

    def delivered(self, order):
        """The KVCache of an order that the decode worker has, and the first token."""
        messages = [(m, payload) for m, payload in self.sent.messages if m.job == order.job]
        [start] = [m for m, _ in messages if isinstance(m, StartTransfer)]
        [end] = [m for m, _ in messages if isinstance(m, EndTransfer)]
        layers, covered = self.layout.empty(start.tokens), [0] * self.layout.layers
        for layer in layers:
            layer.fill_(torch.nan)
        for message, payload in messages:
            if isinstance(message, KVChunk):
                assert message.start <= covered[message.layer], "a layer leaves from the front"
                [part] = payload
                place = layers[message.layer][:, message.start : message.start + message.tokens]
                place.copy_(torch.from_numpy(part).view(place.dtype).view(place.shape))
                covered[message.layer] = max(covered[message.layer], message.start + message.tokens)
        assert covered == [start.tokens] * self.layout.layers
        return layers, end.first_token

    def relayed(self, order):
        """What the decode worker was told to report of a prompt again."""
        [end] = [m for m, _ in self.sent.messages if isinstance(m, EndTransfer) and m.job == order.job]
        return list(end.reports)

    def told(self, kind):
        return [event for report in self.reports if isinstance(report, Report) for event in report.events
                if isinstance(event, kind)]  # fmt: skip


def same(one, other):
    """Whether two sets of layers are close: chunks and blocks change the order of sums."""
    for mine, theirs in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    return one[1] == other[1]


@pytest.mark.parametrize("streams_layers", [True, False])
@pytest.mark.parametrize("tokens", [79, 80, 81])
@pytest.mark.parametrize("held", [1, 4, 5])
def test_a_loaded_prefix_is_delivered_as_if_it_were_computed(streams_layers, tokens, held):
    """The decode worker gets the same KVCache and the same token, whichever part was loaded layer by layer."""
    prompt, cold = list(range(3, 3 + tokens)), Bench(streams_layers=streams_layers, prefix_caching=False)
    computed = cold.serve(cold.order(prompt))
    warm = Bench(streams_layers=streams_layers)
    warm.serve(warm.order(prompt[: held * BLOCK], n=1))
    assert same(warm.serve(warm.order(prompt, n=2)), computed)
    reused = warm.told(events.PrefillDone)[-1].reused_tokens
    assert reused == min(held * BLOCK, tokens // BLOCK * BLOCK, tokens - 1)


def test_a_block_lost_while_it_is_loaded_is_computed(monkeypatch):
    """A block that is gone after some layers were loaded and sent: the same KVCache leaves, and less is reused."""
    prompt, bench = list(range(3, 3 + 80)), Bench()
    computed = bench.serve(bench.order(prompt, n=1))
    real, keys = bench.role._cache.read_into, bench.keys(prompt)

    def read_into(key, layers, *, first_layer=0):
        if key == keys[2] and first_layer == bench.layout.layers - 1:
            return None
        return real(key, layers, first_layer=first_layer)

    monkeypatch.setattr(bench.role._cache, "read_into", read_into)
    assert same(bench.serve(bench.order(prompt, n=2)), computed)
    assert bench.told(events.PrefillDone)[-1].reused_tokens == 2 * BLOCK


def on_ssd(tmp_path, prompt):
    """A worker that has the blocks of a prompt on its SSD only, and what it delivers for that prompt."""
    bench = Bench(cache_tokens=8 * BLOCK, ssd_dir=str(tmp_path), ssd_tokens=4096)
    computed = bench.serve(bench.order(prompt, n=1))
    for n in range(2, 10):
        bench.serve(bench.order([n] * BLOCK, n=n))
        bench.role._cache._store.flush()
    bench.serve(bench.order([10] * BLOCK, n=10))
    return bench, computed


def test_what_was_read_from_the_ssd_is_reported_and_rises(tmp_path):
    """A prefix that DRAM evicted is read from the SSD layer by layer, reported once, and in DRAM afterwards."""
    prompt = list(range(3, 3 + 64))
    bench, computed = on_ssd(tmp_path, prompt)
    keys = set(bench.keys(prompt))
    updates = [each for each in bench.reports if isinstance(each, CacheUpdate)]
    assert keys <= set().union(*(each.demoted for each in updates)), "the cluster knows what is on the SSD only"
    order = bench.order(prompt, n=11)
    assert same(bench.serve(order), computed)
    [read] = bench.told(events.TierRead)
    assert bench.relayed(order) == [read, bench.told(events.PrefillDone)[-1]], "whichever worker is heard first"
    assert read.attempt.request_id == 11
    assert read.bytes == 64 * bench.layout.bytes_per_token
    assert read.start_s <= read.at_s <= bench.told(events.PrefillDone)[-1].at_s
    bench.end(bench.role._background)
    updates = [each for each in bench.reports if isinstance(each, CacheUpdate)]
    assert keys <= set().union(*(each.promoted for each in updates)), "and what is back in DRAM"
    assert all(bench.role._cache._store.tier_of(key) == "dram" for key in keys)


@pytest.mark.parametrize("counted", [0, 2])
def test_a_prefix_on_the_ssd_is_computed_where_the_conductor_says_so(tmp_path, counted):
    """Of reading from the SSD and computing again the Conductor chose: what it did not count is computed."""
    prompt = list(range(3, 3 + 64))
    bench, computed = on_ssd(tmp_path, prompt)
    assert same(bench.serve(bench.order(prompt, n=11, reused_blocks=counted)), computed)
    assert bench.told(events.PrefillDone)[-1].reused_tokens == counted * BLOCK
    assert len(bench.told(events.TierRead)) == (counted > 0)


def test_a_holder_reports_what_it_reads_from_its_ssd_for_another_worker(tmp_path):
    """The attempt is that of the worker that asks, and the blocks rise at the holder, too."""
    prompt = list(range(3, 3 + 64))
    bench, _ = on_ssd(tmp_path, prompt)
    layers = list(bench.role.lookup(Job(1, 77, 1), bench.keys(prompt)))
    assert [len(layer) for layer in layers] == [4] * bench.layout.layers
    [read] = bench.told(events.TierRead)
    assert (read.attempt.request_id, read.bytes) == (77, 64 * bench.layout.bytes_per_token)


def test_the_ssd_is_timed_without_a_trace(tmp_path):
    """Reads are timed with blocks that are there, or of its own, and nothing of these stays."""
    bench, computed = on_ssd(tmp_path, list(range(3, 3 + 64)))
    for one in (bench, Bench(cache_tokens=8 * BLOCK, ssd_dir=str(tmp_path / "empty"), ssd_tokens=4096)):
        before = one.role._cache._ssd.used_bytes
        times = one.role._cache.time_ssd()
        assert sum(size for size, _ in times) == 8 * BLOCK * one.layout.bytes_per_token
        assert one.role._cache._ssd.used_bytes == before
    assert same(bench.serve(bench.order(list(range(3, 3 + 64)), n=11)), computed)
    assert Bench().role._cache.time_ssd() == ()


def test_blocks_of_an_empty_ssd_are_synced_together(tmp_path, monkeypatch):
    """A worker starts without waiting for the device once per block that it times."""
    one = Bench(cache_tokens=8 * BLOCK, ssd_dir=str(tmp_path), ssd_tokens=4096)
    syncs, fdatasync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: syncs.append(file) or fdatasync(file))
    assert len(one.role._cache.time_ssd()) == 8 * one.layout.layers
    assert len(syncs) == 1


def test_a_damaged_or_small_ssd_is_timed_all_the_same(tmp_path):
    """A block whose bytes have changed is passed over, and a slab of few blocks is filled no further."""
    bench, _ = on_ssd(tmp_path / "damaged", list(range(3, 3 + 64)))
    ssd = bench.role._cache._ssd
    layers = bench.layout.layers
    [slab_file] = (tmp_path / "damaged").rglob("slab")
    with slab_file.open("r+b") as slab:
        block = next(iter(ssd.blocks()))
        slab.seek(layer_offset(block, 0))
        slab.write(b"\xff" * 64)
    assert len(bench.role._cache.time_ssd()) == 8 * layers
    small = Bench(cache_tokens=8 * BLOCK, ssd_dir=str(tmp_path / "small"), ssd_tokens=3 * BLOCK)
    assert 0 < len(small.role._cache.time_ssd()) <= 3 * layers
    assert small.role._cache._ssd.used_bytes == 0


def test_a_cancelled_prompt_waits_for_nothing(monkeypatch):
    """Its timer is stopped, a fetch that has not begun never begins, and what one that runs brings is dropped."""
    release, fetched = threading.Event(), []
    prompt, bench = list(range(3, 3 + 64)), Bench(fetch_timeout_s=600.0)
    bench.serve(bench.order(prompt, n=1))
    kept = bench.layers(prompt)

    def stalled(*_):
        fetched.append(True)
        release.wait()
        yield from kept

    monkeypatch.setattr(prefill_module, "fetch_layers", stalled)
    orders = [bench.order(prompt, n=n, fetch=Fetch("prefill-1", 9, 4)) for n in range(2, 6)]
    for order in orders:
        bench.role.take(order)
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert until(lambda: len(fetched) == 2)  # as many as fetch at once
    for order in orders:
        bench.role.take(CancelOrder(order.job))
    for timer in timers:
        timer.join(60)
    assert not any(timer.is_alive() for timer in timers)
    release.set()
    bench.end(bench.role._fetcher)
    assert len(fetched) == 2
    assert [event.bytes for event in bench.told(events.PrefixFetched)] == [0] * len(
        orders
    )  # nobody sends any more
    assert bench.role._cache.match(bench.keys(prompt)) == 0
    assert not bench.role.busy


def test_a_worker_that_ends_does_not_wait_for_a_pool(monkeypatch, tmp_path):
    """A pool that does not answer while the worker joins it delays nothing: `close` saves DRAM on the SSD."""
    came, release = threading.Event(), threading.Event()
    settings = {"cache_tokens": 8 * BLOCK, "ssd_dir": str(tmp_path), "ssd_tokens": 4096}
    prompt, bench = list(range(3, 3 + 64)), Bench(**settings)
    bench.serve(bench.order(prompt, n=1))

    def stalled(*_):
        came.set()
        assert release.wait(20), "nothing ends the worker"
        raise OSError("the pool does not answer")

    monkeypatch.setattr(prefill_module, "open_shared_store", stalled)
    bench.role.take(UseSharedStore("nowhere:1"))
    assert came.wait(60)
    bench.role.close()
    assert not release.is_set()
    release.set()
    bench.role._background.shutdown(wait=True)
    cache = PrefixCache(bench.role._context.spec, bench.layout)
    assert set(cache.news().added) == set(bench.keys(prompt))
    cache.close()


PROMPTS = [list(range(3 + tokens, 3 + 2 * tokens)) for tokens in (79, 30, 50, 100, 20)]


def packed(bench, orders):
    """How many iterations a role computes for orders that wait at the same time."""
    for order in orders:
        bench.role.take(order)
    iterations = 0
    while bench.role.busy:
        bench.role.step()
        iterations += 1
    return iterations


@pytest.mark.parametrize("streams_layers", [True, False])
@pytest.mark.parametrize(("pack_tokens", "iterations"), [(1, 5), (120, 3), (160, 2), (8192, 1)])
def test_packed_prompts_are_delivered_as_if_each_was_alone(streams_layers, pack_tokens, iterations):
    """Prompts that wait share iterations up to the limit, first come, first served, and arrive unchanged."""
    alone = Bench(streams_layers=streams_layers, prefix_caching=False)
    expected = [alone.serve(alone.order(prompt)) for prompt in PROMPTS]
    bench = Bench(streams_layers=streams_layers, prefix_caching=False, pack_tokens=pack_tokens)
    orders = [bench.order(prompt, n=n) for n, prompt in enumerate(PROMPTS)]
    assert packed(bench, orders) == iterations
    assert all(same(bench.delivered(order), each) for order, each in zip(orders, expected, strict=True))
    started, done = bench.told(events.PrefillStarted), bench.told(events.PrefillDone)
    assert [event.attempt.request_id for event in started] == list(range(5))
    assert [event.attempt.request_id for event in done] == list(range(5))
    assert len({event.start_s for event in done}) == iterations
    assert all(one.at_s == other.start_s for one, other in zip(started, done, strict=True))


def test_reused_tokens_take_no_room_in_a_packed_iteration():
    """What a prompt reuses is not computed: two prompts of 80 tokens share 32 when the cache holds 64 of each."""
    bench, prompts = Bench(pack_tokens=32), [list(range(first, first + 80)) for first in (3, 90)]
    expected = [bench.serve(bench.order(prompt)) for prompt in prompts]
    bench.role._cache.forget()
    for prompt in prompts:
        bench.serve(bench.order(prompt[:64]))
    orders = [bench.order(prompt, n=n) for n, prompt in enumerate(prompts, 7)]
    assert packed(bench, orders) == 1
    assert all(same(bench.delivered(order), each) for order, each in zip(orders, expected, strict=True))


def test_a_block_lost_in_a_packed_iteration_costs_its_own_prompt_alone(monkeypatch):
    """The prompt computes what is lost, and the other one of the iteration is delivered as it was."""
    bench, prompts = Bench(pack_tokens=8192), [list(range(first, first + 80)) for first in (3, 90)]
    expected = [bench.serve(bench.order(prompt)) for prompt in prompts]
    real, lost = bench.role._cache.read_into, bench.keys(prompts[0])[2]

    def read_into(key, layers, *, first_layer=0):
        if key == lost and first_layer == bench.layout.layers - 1:
            return None
        return real(key, layers, first_layer=first_layer)

    monkeypatch.setattr(bench.role._cache, "read_into", read_into)
    orders = [bench.order(prompt, n=n) for n, prompt in enumerate(prompts, 7)]
    packed(bench, orders)
    assert all(same(bench.delivered(order), each) for order, each in zip(orders, expected, strict=True))
    reused = {event.attempt.request_id: event.reused_tokens for event in bench.told(events.PrefillDone)[-2:]}
    assert reused == {7: 2 * BLOCK, 8: 79}


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_prompt_cancelled_in_a_packed_iteration_leaves_the_others_alone(cancelled):
    """It is dropped at the next iteration, and the others are delivered once, in order."""
    alone, prompts = Bench(prefix_caching=False), [list(range(first, first + 48)) for first in (3, 60, 90)]
    expected = [alone.serve(alone.order(prompt)) for prompt in prompts]
    bench = Bench(prefix_caching=False, pack_tokens=8192, chunk_tokens=32)
    orders = [bench.order(prompt, n=n) for n, prompt in enumerate(prompts)]
    for order in orders:
        bench.role.take(order)
    bench.role.step()
    bench.role.take(CancelOrder(orders[cancelled].job))
    assert packed(bench, []) > 0
    left = [n for n in range(3) if n != cancelled]
    assert all(same(bench.delivered(orders[n]), expected[n]) for n in left)
    assert [event.attempt.request_id for event in bench.told(events.PrefillDone)] == left
    assert [event.attempt.request_id for event in bench.told(events.PrefillDropped)] == [cancelled]
    job = orders[cancelled].job
    assert isinstance([m for m, _ in bench.sent.messages if m.job == job][-1], CancelOrder)


@pytest.mark.parametrize("way", ["whole", "late", "stalled", "cut", "shrinks"])
@pytest.mark.parametrize("streams_layers", [True, False])
def test_a_prompt_is_computed_while_its_prefix_arrives(monkeypatch, way, streams_layers):
    """It begins with the first layer; what of the prefix does not come, or too late, is computed instead."""
    prompt, is_late = list(range(3, 3 + 80)), way in {"late", "stalled"}
    bench = Bench(fetch_timeout_s=0.3 if is_late else 60.0, streams_layers=streams_layers)
    computed = bench.serve(bench.order(prompt, n=1))
    kept, began, leave = bench.layers(prompt[:64]), threading.Event(), threading.Event()
    bench.role._cache.adopt(bench.keys(prompt)[:1], [tuple(layer[0] for layer in kept)], first=0)

    def holder(_port, _identity, _layout, job, keys, _channel):
        assert job == Job(1, 2, 1)
        assert keys == bench.keys(prompt)[1:4]
        if way == "stalled":
            leave.wait(60)
        yield kept[0][1:]
        began.wait(60)
        if way == "late":
            leave.wait(60)
        for layer in kept[1:] if way != "cut" else []:
            yield layer[1 : 3 if way == "shrinks" else None]

    def note(_):
        if bench.told(events.PrefillStarted)[1:]:
            began.set()

    monkeypatch.setattr(prefill_module, "fetch_layers", holder)
    bench.watch = note
    assert same(bench.serve(bench.order(prompt, n=2, fetch=Fetch("prefill-1", 9, 4))), computed)
    if is_late:
        bench.role._cache.forget()  # what comes now is dropped
    leave.set()
    assert began.is_set(), "the prompt began only when all layers had come"
    bench.end(bench.role._fetcher)
    blocks = {"late": 0, "stalled": 0, "cut": 0, "shrinks": 2}.get(way, 3)
    [fetched] = bench.told(events.PrefixFetched)
    assert fetched.bytes == blocks * BLOCK * bench.layout.bytes_per_token
    assert fetched.start_s + 0.3 * is_late <= fetched.at_s <= time.monotonic()
    assert bench.told(events.PrefillDone)[-1].reused_tokens == (1 + blocks) * BLOCK
    assert bench.role._cache.match(bench.keys(prompt)) == (0 if is_late else 5)


@pytest.mark.parametrize("pooled", [0, 2])
def test_what_a_holder_lacks_comes_from_the_pool(monkeypatch, pooled):
    """Blocks behind those of the holder are taken from the pool, and each source is reported with its bytes."""
    prompt, bench = list(range(3, 3 + 80)), Bench(fetch_timeout_s=60.0)
    computed = bench.serve(bench.order(prompt, n=1))
    kept = bench.layers(prompt[:64])

    def pool(keys, first):
        assert (keys, first) == (bench.keys(prompt)[2:4], 2)
        yield from (layer[2 : 2 + pooled] for layer in kept if pooled)

    monkeypatch.setattr(prefill_module, "fetch_layers", lambda *_: (layer[:2] for layer in kept))
    monkeypatch.setattr(bench.role._cache, "shared", pool)
    order = bench.order(prompt, n=2, fetch=Fetch("prefill-1", 9, 4))
    assert same(bench.serve(order), computed)
    size = BLOCK * bench.layout.bytes_per_token
    expected = [("prefill-1", 2 * size), ("pool", pooled * size)]
    fetched = bench.told(events.PrefixFetched)
    assert [(one.source, one.bytes) for one in fetched] == expected[: 1 + (pooled > 0)]
    assert bench.relayed(order) == [*fetched, bench.told(events.PrefillDone)[-1]]
    assert bench.told(events.PrefillDone)[-1].reused_tokens == (2 + pooled) * BLOCK


@pytest.mark.parametrize("streams_layers", [True, False])
def test_prompts_are_timed_as_they_are_served(monkeypatch, streams_layers):
    """The KVCache of a timed prompt goes to the decode worker, prefix included, which is then told to drop it."""
    monkeypatch.setattr(prefill_module, "measure_transfer", lambda *_: ())
    bench = Bench(streams_layers=streams_layers, max_model_len=1024)
    bench.role.take(Measure(1))
    (measured,) = (report for report in bench.reports if isinstance(report, Measured))
    assert {(512, 0), (512, 256)} <= {row[:2] for row in measured.prefill}
    assert all(seconds > 0 for *_, seconds in measured.prefill)
    sent = {}
    for message, _ in bench.sent.messages:
        sent.setdefault(message.job, []).append(message)
    for start, *chunks, end in sent.values():
        assert (type(start), type(end)) == (StartTransfer, CancelOrder)
        tokens = [0] * bench.layout.layers
        for chunk in chunks:
            assert chunk.start == tokens[chunk.layer]
            tokens[chunk.layer] += chunk.tokens
        reused = {row[1] for row in measured.prefill if row[0] == start.tokens}
        assert set(tokens) <= ({start.tokens} if streams_layers else reused)


def test_kvcache_leaves_a_device_beside_the_computation(monkeypatch):
    """A layer is sent from pinned memory; the sender waits for the copy into it, and the engine does not."""
    bench = Bench()
    fake = fake_streams(monkeypatch)
    values = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 2, 2)
    given = []
    sender = SimpleNamespace(send=lambda message, payload, wait: given.append((message, payload, wait)))
    bench.role._send_layer(sender, Job(1, 1, 1), 1, 5, OnDevice(values))
    ((message, (payload,), wait),) = given
    assert (message.layer, message.start, message.tokens) == (1, 5, 3)
    (pinned,) = fake.pinned
    assert payload.ctypes.data == pinned.data_ptr()
    wait()
    assert bytes(payload) == values.numpy().tobytes()
