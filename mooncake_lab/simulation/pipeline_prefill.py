"""Chunked pipeline parallelism event by event: nodes and links as resources, chunks as processes.

It knows nothing of the recurrence in `perf.cpp`; the two check each other.
"""

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from mooncake_lab.perf import CppGroup, chunk_seconds


def simulate_cpp(group: CppGroup, sizes: Sequence[int], reused_tokens: int = 0) -> list[list[float]]:
    """When each node is done with each chunk, `[node][chunk]`, as `perf.cpp_finish_s` says it.

    Args:
        group: the nodes.
        sizes: tokens of the chunks, in order.
        reused_tokens: leading tokens whose KVCache exists.
    """
    env = simpy.Environment()
    nodes = [simpy.Resource(env) for _ in range(group.nodes)]
    links = [simpy.Resource(env) for _ in range(group.nodes - 1)]
    finish: list[list[float]] = [[0.0] * len(sizes) for _ in nodes]
    seconds = chunk_seconds(group, sizes, reused_tokens)

    def load(node: int) -> Generator[simpy.Event, Any, None]:
        with nodes[node].request() as turn:
            yield turn
            constant_s = 0.0 if node else group.prefill.constant_s
            share = group.layer_shares[node]
            yield env.timeout(constant_s + share * group.prefill.load_s_per_token * reused_tokens)

    def pass_through(chunk: int) -> Generator[simpy.Event, Any, None]:
        for node, share in enumerate(group.layer_shares):
            if node:
                with links[node - 1].request() as turn:
                    yield turn
                    yield env.timeout(group.hop_bytes(sizes[chunk]) / group.link.bytes_per_s)
                yield env.timeout(group.link.latency_s)
            with nodes[node].request() as turn:
                yield turn
                yield env.timeout(share * seconds[chunk])
                finish[node][chunk] = env.now

    for node in range(group.nodes):
        env.process(load(node))
    for chunk in range(len(sizes)):
        env.process(pass_through(chunk))
    env.run()
    return finish
