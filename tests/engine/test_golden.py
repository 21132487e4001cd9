"""Plans of a small engine that a restructuring must not change, under every policy that prefills.

`python tests/engine/test_golden.py` writes `golden.json` anew, after a change of plans that is meant.
"""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from mooncake_lab.batching import BATCHING_POLICIES, named_policy
from mooncake_lab.engine import EngineSettings, GenerationRequest, load_model
from mooncake_lab.engine.loop import Engine

FILE = Path(__file__).with_name("golden.json")
POLICIES = sorted(set(BATCHING_POLICIES) - {"decode_only"})


def tiny():
    """A random model of two layers."""
    return load_model("random:lab-tiny", device="cpu", positions=256)


def played(model, policy):
    """Requests that come by and by to an engine with little memory, share prompts, and are cancelled at times."""
    settings = EngineSettings(block_size_tokens=4, cache_blocks=24, max_batch_tokens=64, max_requests=4)
    engine, ended = Engine(model, named_policy(policy), settings), []
    for turn in range(24):
        prompt = [*range(3, 3 + turn * 7 % 25), *((turn * 31 + k * k) % 256 for k in range(1 + turn * 5 % 17))]
        new_tokens = 1 if policy == "prefill_only" else 1 + turn * 11 % 19
        request = engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=new_tokens, end_tokens=()))
        if turn % 9 == 8:
            engine.cancel(request - 1)
        for _ in range(turn % 5):
            ended += engine.step()
    while engine.busy:
        ended += engine.step()
    engine.instance.check()
    return engine, ended


def digest(model, policy):
    """SHA-256 of all iterations, their reasons blanked, and of what came of the requests, but for the tokens."""
    engine, ended = played(model, policy)
    sha = hashlib.sha256()
    for timed in engine.log:
        step = {
            name: value for name, value in msgspec.to_builtins(timed).items() if name not in {"start_s", "end_s"}
        }
        step["plan"]["reason"] = ""
        sha.update(msgspec.json.encode(step))
    for output in ended:
        facts = (output.request_id, len(output.tokens), output.finish_reason, output.reused_tokens)
        sha.update(repr((*facts, output.preemptions)).encode())
    return sha.hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_what_they_were(policy):
    """What the policy saw and planned in each iteration, and how each request ended, is as on record."""
    assert digest(tiny(), policy) == json.loads(FILE.read_text())[policy]


if __name__ == "__main__":
    FILE.write_text(json.dumps({policy: digest(tiny(), policy) for policy in POLICIES}, indent=1) + "\n")
