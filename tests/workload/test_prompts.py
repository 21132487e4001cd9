"""Real tokens for the requests of a trace."""

import json

import numpy as np

from mooncake_lab.workload import read_trace
from mooncake_lab.workload.transforms import prompt_of, scaled_down


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path)


def test_ids_may_be_hashes_of_64_bits(tmp_path):
    """Every id that a trace may have gives tokens: equal ids equal ones, different ids different ones."""
    ids = [0, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1]
    lines = [
        {"timestamp": 0, "input_length": 128, "output_length": 4, "hash_ids": [7, one], "trace_block_size": 64}
        for one in ids
    ]
    prompts = [prompt_of(traced.request, 1000) for traced in written(tmp_path / "t.jsonl", lines).requests()]
    assert {prompt[:64].tobytes() for prompt in prompts} == {prompts[0][:64].tobytes()}
    assert len({prompt[64:].tobytes() for prompt in prompts}) == len(ids)


def test_what_clients_allow_shrinks_with_the_answers(tmp_path):
    """A limit stays a limit of the divided answer, and belongs to the same request when others are left out."""
    lines = [
        {
            "timestamp": 0,
            "input_length": tokens,
            "output_length": 33,
            "hash_ids": [0] * -(-tokens // 512),
            "max_tokens": m,
        }
        for tokens, m in ((4096, 40), (64, 33), (512, None), (64, 500))
    ]
    small = scaled_down(written(tmp_path / "t.jsonl", lines), 32, most_tokens=60)
    assert np.array_equal(small.max_tokens, [2, 0, 16])
    assert [traced.output_tokens for traced in small.requests()] == [2, 2, 2]
