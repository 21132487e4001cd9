"""One small live cluster a module, and the tokens that it must give."""

import asyncio
import threading

import flat
import numpy as np
import openai
import pytest
import torch

from mooncake_lab.core import Request, TracedRequest, blocks_for
from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model
from mooncake_lab.perf import (
    DecodeLatency,
    HybridLatency,
    LatencyModel,
    LinkLatency,
    PrefillLatency,
    model_shape,
)
from mooncake_lab.serving import ClusterRuntime, LiveCluster, LiveOptions, WorkerProcesses
from mooncake_lab.serving.openai_api.server import Address, listen, web_server
from mooncake_lab.serving.openai_api.telemetry import Telemetry
from mooncake_lab.workload.transforms import prompt_of

MODEL = "random:lab-tiny"
BLOCK = 16


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models gain nothing from threads, and lose much where other tests run beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference():
    """What one engine in this process generates: `reference(prompts, new_tokens)`, nothing reused."""
    model = load_model(MODEL, device="cpu", positions=8192, backend="dense")

    def generate(prompts, new_tokens):
        settings = EngineSettings(cache_blocks=2000, prefix_caching=False, keep_log=False)
        outputs = CoupledEngine(model, None, settings).generate(prompts, max_new_tokens=new_tokens)
        return [output.tokens for output in outputs]

    return generate


@pytest.fixture(scope="session")
def traced():
    """Makes a trace: `traced(requests, every_s=..)`, every third beginning alike."""

    def make(requests, *, every_s=0.01, tokens=70, output_tokens=12, shared_blocks=3, first_id=0):
        made = []
        for i in range(first_id, first_id + requests):
            count = blocks_for(tokens + i % 5, BLOCK)
            shared = [10_000 + i % 3 * 100 + k for k in range(shared_blocks)]
            keys = (shared + [1_000_000 + i * 100 + k for k in range(count)])[:count]
            request = Request(
                id=i, arrival_s=(i - first_id) * every_s, input_tokens=tokens + i % 5, block_keys=tuple(keys),
                block_size_tokens=BLOCK,
            )  # fmt: skip
            made.append(TracedRequest(request, output_tokens + i % 4))
        return made

    return make


@pytest.fixture(scope="session")
def expected(reference):
    """The tokens that requests of a trace must get, by id."""

    def tokens(requests):
        longest = max(one.output_tokens for one in requests)
        found = reference([prompt_of(one.request, 256) for one in requests], longest)
        return {one.request.id: full[: one.output_tokens] for one, full in zip(requests, found, strict=True)}

    return tokens


@pytest.fixture(scope="session")
def pool():
    """Processes that the clusters of these tests use one after the other: most tests load torch in none."""
    with WorkerProcesses(LiveOptions(model=MODEL, device="cpu", backend="dense")) as one:
        yield one


@pytest.fixture(scope="session")
def believed():
    """A latency model to place by, so that not every cluster measures its own."""
    return LatencyModel(
        name="for tests",
        shape=model_shape("lab-tiny"),
        prefill=PrefillLatency(constant_s=2e-3, per_token_s=4e-6, per_token_squared_s=1e-8),
        decode=DecodeLatency(2e-3, 1e-5, 1e-7),
        hybrid=HybridLatency(floor_s=2e-3, per_token_s=4e-6, per_token_squared_s=1e-8, per_context_token_s=1e-7),
        transfer=LinkLatency(1e9, 1e-4),
        dram=LinkLatency(1e9),
        ssd=LinkLatency(1e9),
    )


@pytest.fixture(scope="session")
def open_cluster(pool, believed):
    """Makes a cluster: `open_cluster(prefill_nodes=2)`, to be used in a `with` block."""

    def make(model=believed, **changes):
        spec, options = flat.live(model=MODEL, device="cpu", backend="dense", **changes)
        return LiveCluster(spec, options, model=model, launcher=pool)

    return make


class APIServer:
    """A cluster and its web server on a thread."""

    token = "a-token-for-tests"  # noqa: S105  # of no other use

    def __init__(self, settings, believed, pool, address):
        self.settings, self.believed, self.pool = settings, believed, pool
        self.endings = []
        self.watch = lambda _: None
        """Called with each record of the log, on the server's thread."""
        self.address = Address(**{"token": self.token, "drain_s": 5, "port": 0} | address)
        self.listener, self.url = listen(self.address.host, self.address.port)
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self):
        telemetry = Telemetry()
        self.loop = asyncio.get_running_loop()
        self.log = []

        def write(record):
            self.log.append(record)
            telemetry.note(record)
            self.watch(record)

        async with ClusterRuntime(
            *self.settings, model=self.believed, launcher=self.pool, write=write
        ) as self.runtime:
            self.server = web_server(self.runtime, telemetry, self.address, self.endings.append)
            self.ready.set()
            await self.server.serve(sockets=[self.listener])

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(120)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()

    def client(self, token=token):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0)


@pytest.fixture(scope="session")
def open_api(pool, believed):
    """Makes a cluster behind HTTP: `open_api(prefill_nodes=2, address={..})`, to be used in a `with` block."""

    def make(*, address=None, **changes):
        settings = flat.live(model=MODEL, device="cpu", backend="dense", **changes)
        return APIServer(settings, believed, pool, address or {})

    return make


@pytest.fixture(scope="module")
def cluster(open_cluster):
    """One prefill and one decode worker."""
    with open_cluster() as live:
        yield live


@pytest.fixture
def rng():
    return np.random.default_rng(0)
