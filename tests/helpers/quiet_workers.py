"""A live cluster without processes: its workers only note what they are sent, and report what a test says."""

import flat

from mooncake_lab.conductor import LatencyEstimator
from mooncake_lab.perf import model_shape
from mooncake_lab.serving import ClusterRuntime
from mooncake_lab.serving.messages import (
    VERSION,
    Job,
    Ready,
    Report,
    SamplingParams,
    pack,
)


class Line:
    """A link to a worker that encodes what it is sent, as a real one, and does nothing."""

    def __init__(self, name, *, max_context_tokens, capacity_tokens):
        self.name, self.told = name, []
        self.ready = Ready(
            version=VERSION, name=name, pid=0, port=1, fingerprint=b"f", max_context_tokens=max_context_tokens,
            capacity_tokens=capacity_tokens, shape=model_shape("lab-tiny"), end_tokens=(), device="cpu",
        )  # fmt: skip

    def send(self, *orders):
        """Note them, if they can be sent."""
        pack(orders)
        self.told += orders

    def of(self, kind):
        """The orders of one kind."""
        return [order for order in self.told if isinstance(order, kind)]


class QuietCluster:
    """One prefill and one decode worker, and the log.

    Args:
        believed: the Conductor's latency model.
        estimate: what it estimates instead.
        max_context_tokens: longest context.
        capacity_tokens: KVCache that fits into each engine.
        changes: of the spec and the options.
    """

    def __init__(self, believed, *, estimate=None, max_context_tokens=4096, capacity_tokens=4096, **changes):
        self.records, self.lines, self._sizes = [], {}, (max_context_tokens, capacity_tokens)
        self.runtime = ClusterRuntime(
            *flat.live(**changes),
            model=believed,
            estimate=estimate or LatencyEstimator(believed),
            write=self.write,
        )
        self.runtime.supervisor.ready = self.line("decode-0").ready
        self.runtime.begin_run()
        for name in self.runtime.spec.roles:
            self.bring_up(name)

    def write(self, record):
        """One record of the log."""
        self.records.append(record)

    def line(self, name):
        """A link to a worker of this cluster."""
        max_context_tokens, capacity_tokens = self._sizes
        return Line(name, max_context_tokens=max_context_tokens, capacity_tokens=capacity_tokens)

    def bring_up(self, name):
        """A worker comes up."""
        line = self.lines[name] = self.line(name)
        self.runtime.supervisor.connections[name] = line
        self.runtime._worker_up(name, line)

    def take_down(self, name):
        """A worker is gone."""
        del self.runtime.supervisor.connections[name]
        self.runtime._worker_exit(name)

    def submit(self, prompt, max_new_tokens=4, traced=None, **asked):
        """A client sends a prompt; its stream."""
        generation = SamplingParams(max_new_tokens=max_new_tokens, **asked)
        return self.runtime.submit(prompt, generation, traced=traced)

    def hear(self, name, *events, tokens=()):
        """A worker reports events of the run."""
        self.runtime._heard(name, Report(self.runtime._run, events, tuple(tokens)))

    def receive(self, name, message):
        """A worker sends another message."""
        self.runtime._heard(name, message)

    def attempt(self, stream):
        """The present attempt of a request."""
        return self.runtime.coordinator.requests[stream.request_id].attempt

    def job(self, stream):
        """It as workers name it."""
        attempt = self.attempt(stream)
        return Job(self.runtime._run, attempt.request_id, attempt.n)

    def is_free(self):
        """Whether nothing of any request is left."""
        workers = self.runtime.workers
        return not self.runtime.streams and not any(
            w.prefill.prompts or w.decode.contexts or w.prefill.sending for w in workers
        )
