"""A coupled worker by itself: what the cluster believes about it after each of its iterations."""

from dataclasses import replace

import flat
import numpy as np
import pytest
from modelled import make_runtime, request

from mooncake_lab.batching import named_policy
from mooncake_lab.cluster import events as e
from mooncake_lab.engine import Engine, load_model
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import fingerprint
from mooncake_lab.metrics import check_log
from mooncake_lab.serving.kv_transfer import Identity
from mooncake_lab.serving.messages import Job, PrefillOrder, Report, SamplingParams
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.roles import WorkerContext
from mooncake_lab.serving.roles.decode import CoupledRole, DecodeRole
from mooncake_lab.serving.spec import worker_spec

BLOCK = 16


def make_role(send, **changes):
    """A coupled role that sends its messages to a function."""
    cluster = flat.live(device="cpu", backend="dense", block_size_tokens=BLOCK, coupled_nodes=1, **changes)
    model = load_model("random:lab-tiny", device="cpu", backend="dense", positions=1024)
    name = fingerprint(model.config, model.weights_digest, model.embedding.dtype)
    return CoupledRole(
        WorkerContext(
            spec=worker_spec(*cluster, "coupled-0", bytes(32)),
            model=model,
            layout=KVLayout.of(model, name),
            identity=Identity(name="coupled-0", token=bytes(32), fingerprint=name, timeout_s=10.0),
            senders=None,
            channel=None,
            link=PacedLink(),
            send=send,
            enqueue=None,
        )
    )


def test_decode_steps_are_recorded_before_a_worker_serves(monkeypatch):
    """Workers that decode let their engine record all batch sizes while they start, and only then."""
    recorded = []
    monkeypatch.setattr(Engine, "record_steps", lambda engine: recorded.append(engine))  # noqa: PLW0108  # bound
    role = make_role(None)
    context = role._context
    assert recorded == [role._engine]
    decode = DecodeRole(replace(context, spec=replace(context.spec, role="decode", name="decode-0")))
    assert recorded[1:] == [decode._engine.engine]


@pytest.mark.parametrize("policy", ["vllm", "sarathi_serve"])
def test_the_cluster_knows_what_of_each_request_is_in_gpu_memory(policy):
    """Preempted requests count with their prompts alone until their KVCache is computed again."""
    messages, run, preempted = [], make_runtime(("coupled-0",)), 0
    role = make_role(messages.append, device_tokens=8 * BLOCK, batching=named_policy(policy))
    worker = run.coordinator.instances.by_name["coupled-0"]
    worker.up_s = worker.decode.stepped_until_s = -1.0
    for i in range(3):
        run.original[i] = request(i, 20)
        run.tell(e.RequestArrived, request=run.original[i])
        prompt = np.arange(20 * i, 20 * i + 20, dtype=np.int32).tobytes()
        params = SamplingParams(max_new_tokens=40, end_tokens=())
        role.take(PrefillOrder(job=Job(1, i, 1), prompt=prompt, params=params, deliver_to=None))
    while role.busy:
        role.step()
        for report in filter(lambda one: isinstance(one, Report), messages):
            for event in report.events:
                run.now = event.at_s
                run.report(event)
                preempted += isinstance(event, e.Preempted)
        messages.clear()
        instance = role._engine.instance
        here = [*instance.waiting, *instance.running.values()]
        assert worker.decode.context_tokens == sum(max(one.prompt_tokens, one.cached_tokens) for one in here)
    assert preempted
    assert run.ended.keys() == {0, 1, 2}
    assert check_log(run.log) == ()
