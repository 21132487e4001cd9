"""Wrong solutions of every assignment, and the points that the rubric gives each of them.

Each is the teacher's solution with changes, or with cells replaced. The points are those of the tasks in order.
"""

# ruff: noqa: E501  # a line for each solution

from types import MappingProxyType
from typing import NamedTuple


class Wrong(NamedTuple):
    """One wrong solution."""

    points: tuple[int, ...]
    """Of each task."""
    changes: MappingProxyType = MappingProxyType({})
    """In the text of the teacher's solutions."""
    cells: MappingProxyType = MappingProxyType({})
    """Solution cells that are replaced, by name."""


def keys(points, body):
    """Another `chain_keys`; the rest is right."""
    return Wrong(points, cells={"chain-keys": f"def chain_keys(tokens, n):\n    {body}\n"})


def matched(points, body):
    """Another `matched_blocks`; the rest is right."""
    return Wrong(points, cells={"matched-blocks": f"def matched_blocks(keys, held):\n    {body}\n"})


BLOCKS = "[tokens[i : i + n] for i in range(0, len(tokens), n)]"
CHAIN = "from itertools import accumulate\n    return list(accumulate("
DECODES = 'segments = [Segment(r.request_id, "decode", 1, r.cached_tokens, True) for r in running if r.decoding]'
PROMPTS = "[*unfinished, *waiting[: max(places, 0)]]"
VICTIM = "for queue in (self.once, self.often) if first_once else (self.often, self.once):"
EVICTION = """from mooncake_lab.store import NothingToEvictError

class MyPolicy:
    def __init__(self, capacity_blocks):
        self.keys, self.hits, self.bits = {{}}, {{}}, {{}}
    def touch(self, key):
        {touch}
    def insert(self, key, position=0):
        self.keys[key] = position
        self.hits.setdefault(key, 0)
    def remove(self, key):
        del self.keys[key]
    def victim(self, incoming=None, spared=frozenset()):
        for key in {order}:
            if key not in spared:
                del self.keys[key]
                return key
        raise NothingToEvictError(len(self.keys))
    def __len__(self):
        return len(self.keys)
    def __contains__(self, key):
        return key in self.keys
"""
CLOCK = """
    def second_chance(self, spared):
        while set(self.keys) - spared:
            key = next(iter(self.keys))
            self.keys[key] = self.keys.pop(key)
            if key not in spared and not self.bits.pop(key, False):
                yield key
"""
RECENT = "self.keys[key] = self.keys.pop(key)"


def eviction(points, touch, order, more=""):
    """A policy that orders its keys in another way."""
    return Wrong(points, cells={"my-policy": EVICTION.format(touch=touch, order=order) + more})


ADMIT_NOTHING_LATE = "if estimate.decode_step_s(requests, tokens) > slo.tbt_s"
CHECK_TWICE = "if step_s > slo.tbt_s"
PRESENT = {"node.requests for": "node.present_requests for", "node.context_tokens for": "node.present_tokens for"}
IF_LATE = "if proposed.expected_ttft_s > slo.ttft_s"

WRONG = MappingProxyType(
    {
        "keys": {
            "only the own block": Wrong((2, 0, 0, 2, 2), {"key + repr(tokens[start": "repr(tokens[start"}),
            "prefix sums": keys((0, 0, 0, 2, 2), f"{CHAIN}sum(b) for b in {BLOCKS}))"),
            "sorted prefix": keys(
                (0, 0, 0, 2, 2),
                "return [str(sorted(tokens[: i + n])) for i in range(0, len(tokens), n)]",
            ),
            "a chain that adds": keys((2, 0, 0, 2, 2), f"{CHAIN}hash(tuple(b)) for b in {BLOCKS}))"),
            "a chain of block sums": keys(
                (0, 0, 0, 2, 2),
                f"{CHAIN}(sum(b) for b in {BLOCKS}), lambda key, new: hash((key, new)), initial=0))[1:]",
            ),
            "16 bits": Wrong((2, 0, 1, 2, 2), {".encode()).digest()": ".encode()).digest()[:2]"}),
            "a polynomial": Wrong(
                (2, 0, 1, 2, 2),
                cells={
                    "chain-keys": "def chain_keys(tokens, n):\n    keys, key = [], 7\n    for i, token in enumerate(tokens):\n        key = key * 31 + token\n        if i % n == n - 1 or i == len(tokens) - 1:\n            keys.append(key)\n    return keys\n"
                },
            ),
            "block numbers": keys((0, 0, 0, 2, 2), f"return list(range(len({BLOCKS})))"),
            "keys by chance": keys((0, 0, 0, 2, 2), f"import os\n    return [os.urandom(16) for _ in {BLOCKS}]"),
            "no key for a partial block": Wrong(
                (0, 3, 1, 2, 2),
                {
                    "range(0, len(tokens), block_tokens)": "range(0, len(tokens) // block_tokens * block_tokens, block_tokens)"
                },
            ),
            "a partial block is padded": Wrong(
                (0, 3, 1, 2, 2),
                {
                    "repr(tokens[start : start + block_tokens])": "repr((tokens[start : start + block_tokens] + [0] * block_tokens)[:block_tokens])"
                },
            ),
            "held in order of the prompt": matched(
                (2, 3, 1, 0, 2),
                "return next((i for i, (a, b) in enumerate(zip(keys, held)) if a != b), min(len(keys), len(held)))",
            ),
            "counts all that is held": matched((2, 3, 1, 0, 2), "return len(set(keys) & set(held))"),
            "first in, first out": Wrong((2, 3, 1, 2, 0), {"cache.move_to_end(key)": "pass"}),
            "one block too many": Wrong((2, 3, 1, 2, 0), {"len(cache) >= capacity": "len(cache) > capacity"}),
            "hits per request": Wrong((2, 3, 1, 2, 0), {"hits / accesses": "hits / len(requests)"}),
        },
        "eviction": {
            "LRU": eviction((1, 2, 2, 0, 0), RECENT, "self.keys"),
            "first in, first out": eviction((1, 2, 2, 0, 0), "pass", "self.keys"),
            "most recently used": eviction((1, 2, 2, 0, 0), RECENT, "reversed(list(self.keys))"),
            "least frequently used": eviction(
                (1, 2, 2, 0, 0), "self.hits[key] += 1", "sorted(self.keys, key=self.hits.get)"
            ),
            "deepest first": eviction(
                (1, 2, 2, 0, 0), RECENT, "sorted(self.keys, key=self.keys.get, reverse=True)"
            ),
            "documents by their keys, after LRU": eviction(
                (1, 2, 2, 0, 0),
                RECENT,
                "[*(k for k in self.keys if isinstance(k, int) and k >= 10**6), *(k for k in self.keys if not isinstance(k, int) or k < 10**6)]",
            ),
            "clock": eviction((1, 2, 2, 3, 0), "self.bits[key] = True", "self.second_chance(spared)", CLOCK),
            "ignores what is spared": Wrong((1, 0, 0, 3, 2), {"if key not in spared:": "if True:"}),
            "forgets to remove": Wrong((0, 2, 0, 0, 0), {"del queue[key]": "pass"}),
            "by chance": eviction(
                (1, 2, 0, 0, 0), "pass", "__import__('random').sample(list(self.keys), len(self.keys))"
            ),
        },
        "chunked": {
            "wrong labels": Wrong((0, 2, 3, 2, 2), {"new == r.pending_tokens": "True"}),
            "whole prompts": Wrong(
                (1, 0, 3, 0, 2),
                {"left, places = self.chunk_tokens,": "left, places = limits.max_batch_tokens // 2,"},
            ),
            "prompts stall decodes": Wrong(
                (1, 2, 0, 2, 2),
                {
                    "return Plan(segments=tuple(segments))": "return Plan(segments=tuple([s for s in segments if s.kind == 'prefill'] or segments))"
                },
            ),
            "whole prompts that stall decodes": Wrong(
                (1, 0, 0, 0, 2),
                {
                    "left, places = self.chunk_tokens,": "left, places = limits.max_batch_tokens // 2,",
                    "return Plan(segments=tuple(segments))": "return Plan(segments=tuple([s for s in segments if s.kind == 'prefill'] or segments))",
                },
            ),
            "rejects everything": Wrong(
                (0, 0, 0, 0, 0),
                {
                    DECODES: "from mooncake_lab.batching import Refusal\n        return Plan(rejected=tuple(Refusal(r.request_id, 'no') for r in waiting))"
                },
            ),
            "one request at a time": Wrong(
                (1, 2, 0, 0, 2), {PROMPTS: "[*unfinished, *(waiting[:1] if not running else [])]"}
            ),
            "one prompt in an iteration": Wrong(
                (1, 2, 3, 0, 2), {PROMPTS: "[*unfinished, *waiting[: max(places, 0)]][:1]"}
            ),
            "one prompt token in an iteration": Wrong(
                (1, 2, 3, 0, 2), {"left, places = self.chunk_tokens,": "left, places = 1,"}
            ),
            "decodes take from the chunk": Wrong(
                (1, 2, 3, 0, 2),
                {"left, places = self.chunk_tokens,": "left, places = max(self.chunk_tokens - len(segments), 1),"},
            ),
            "at most four decodes": Wrong(
                (1, 2, 0, 2, 2),
                {"for r in running if r.decoding]": "for r in [r for r in running if r.decoding][:4]]"},
            ),
            "newest first": Wrong((1, 2, 3, 0, 2), {PROMPTS: "[*unfinished, *waiting[: max(places, 0)]][::-1]"}),
            "waiting before running": Wrong(
                (1, 2, 3, 0, 2), {PROMPTS: "[*waiting[: max(places, 0)], *unfinished]"}
            ),
            "ignores max_requests": Wrong((0, 2, 3, 0, 2), {PROMPTS: "[*unfinished, *waiting]"}),
            "too large chunks": Wrong((1, 0, 3, 0, 2), {"left -= new": "pass"}),
        },
        "placement": {
            "never fetches, also in a policy of its own": Wrong(
                (1, 0, 0, 0, 0, 0, 0),
                {"fetches = ratio > self.threshold": "fetches = False", "> longest_tokens": "> 10**9"},
            ),
            "always fetches": Wrong((1, 0, 0, 0, 1, 2, 1), {"fetches = ratio > self.threshold": "fetches = True"}),
            "fetches at the threshold": Wrong(
                (1, 2, 0, 1, 1, 2, 1), {"ratio > self.threshold": "ratio >= self.threshold"}
            ),
            "ignores transfers of holders": Wrong(
                (1, 2, 0, 1, 1, 2, 1), {"(-node.matched_blocks, node.outgoing_flows)": "-node.matched_blocks"}
            ),
            "later nodes win ties": Wrong(
                (0, 2, 0, 1, 1, 2, 1),
                {"min(answers, key=lambda answer: answer[0])": "min(answers[::-1], key=lambda answer: answer[0])"},
            ),
            "divides by zero": Wrong(
                (1, 2, 0, 1, 0, 0, 0), {"best / own if own else (math.inf if best else 1.0)": "best / own"}
            ),
            "forgets the missing prefill": Wrong(
                (1, 0, 2, 0, 1, 2, 1),
                {"ttft += estimate.prefill_s(request.id, request.input_tokens, reused)": "pass"},
            ),
            "least backlog": Wrong(
                (1, 0, 0, 0, 1, 2, 1),
                {
                    "min(answers, key=lambda answer: answer[0])": "min(answers, key=lambda answer: answer[1].backlog_s)"
                },
            ),
            "no policy of its own": Wrong((1, 2, 2, 1, 1, 0, 0), {"> longest_tokens": "> 10**9"}),
            "longest match": Wrong(
                (0, 0, 0, 0, 0, 0, 0),
                {
                    "min(answers, key=lambda answer: answer[0])": "min(answers, key=lambda answer: -answer[1].matched_blocks)"
                },
            ),
        },
        "admission": {
            "admits everything": Wrong(
                (1, 1, 1, 0, 0, 0), {ADMIT_NOTHING_LATE: "if False", CHECK_TWICE: "if False", IF_LATE: "if False"}
            ),
            "looks only at prefill": Wrong(
                (1, 1, 1, 0, 0, 0), {ADMIT_NOTHING_LATE: "if False", CHECK_TWICE: "if False"}
            ),
            "looks at the present load, once": Wrong((1, 1, 1, 1, 0, 0), {**PRESENT, CHECK_TWICE: "if False"}),
            "looks at decode after the prefill": Wrong((1, 1, 1, 1, 2, 0), {ADMIT_NOTHING_LATE: "if False"}),
            "rejects every second request": Wrong(
                (1, 1, 0, 0, 0, 0),
                {IF_LATE: "if request.id % 2", ADMIT_NOTHING_LATE: "if False", CHECK_TWICE: "if False"},
            ),
            "rejects every second request, and what is late": Wrong(
                (1, 1, 0, 0, 0, 0), {IF_LATE: "if request.id % 2 or proposed.expected_ttft_s > slo.ttft_s"}
            ),
            "serves only short prompts": Wrong(
                (1, 1, 0, 1, 0, 0),
                {IF_LATE: "if request.input_tokens > 6000 or proposed.expected_ttft_s > slo.ttft_s"},
            ),
            "counts, and rejects each tenth": Wrong(
                (1, 0, 0, 1, 2, 0),
                {
                    IF_LATE: "SEEN[0] += 1\n        if SEEN[0] % 10 == 0 or proposed.expected_ttft_s > slo.ttft_s",
                    "@dataclass(frozen=True)\nclass MyAdmission": "SEEN = [0]\n\n@dataclass(frozen=True)\nclass MyAdmission",
                },
            ),
            "rejects everything": Wrong((1, 1, 0, 0, 0, 0), {"> slo.ttft_s": "> -1.0"}),
            "changes the placement": Wrong(
                (0, 0, 0, 0, 0, 0),
                {
                    "        return proposed\n": "        from dataclasses import replace\n        return replace(proposed, reason='mine')\n"
                },
            ),
        },
    }
)
