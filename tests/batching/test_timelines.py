"""Four requests through every policy: A and B decode, C and D arrive (Sarathi-Serve, OSDI'24, Fig. 7)."""

import pytest

from mooncake_lab.batching import (
    CHUNKED_POLICIES,
    Limits,
    PrefillOnly,
    Progress,
    TensorRTLLM,
    gantt,
    named_policy,
    trace_plans,
)

LIMITS = Limits(max_batch_tokens=64, max_requests=4, block_size_tokens=4, capacity_blocks=64, free_blocks=64)
CHUNK_TOKENS = 12
PROMPT_TOKENS = {"A": 8, "B": 8, "C": 24, "D": 16}
OUTPUT_TOKENS = {"A": 6, "B": 8, "C": 3, "D": 3}
ARRIVE_LATE = {2: 3, 3: 3}

TIMELINES = {
    "request_level": ("Pddddd     ", "Pddddddd   ", "   wwwwwPdd", "   wwwwwPdd"),
    "orca": ("Pddddd  ", "Pddddddd", "   Pdd  ", "   Pdd  "),
    "vllm": ("Pdd.ddd  ", "Pdd.ddddd", "   Pdd   ", "   Pdd   "),
    "vllm_chunked": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
    "splitfuse": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
    "tensorrt_llm": ("Pddddd    ", "pPddddddd ", "   ppPdd  ", "   wwwpPdd"),
    "sarathi": ("Pddddd    ", "wPddddddd ", "   ppPdd  ", "   wwwpPdd"),
    "sarathi_serve": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
}


def requests(**changes):
    return [
        Progress(request_id=i, arrival=i, prompt_tokens=tokens, max_new_tokens=10, **changes)
        for i, tokens in enumerate(PROMPT_TOKENS.values())
    ]


def run(policy, outputs=None):
    futures = dict(enumerate(outputs or OUTPUT_TOKENS.values()))
    return trace_plans(policy, requests(), LIMITS, futures, enters_at=ARRIVE_LATE)


class TestTimelines:
    @pytest.mark.parametrize("name", TIMELINES)
    def test_each_policy_has_its_own(self, name):
        """What each does with C and D, and to A and B, while prompts are computed."""
        policy = named_policy(name, chunk_tokens=CHUNK_TOKENS if name in CHUNKED_POLICIES else None)
        assert tuple(gantt(run(policy)).values()) == TIMELINES[name]

    def test_only_prefill_first_stalls(self):
        """The dots, decodes that wait for a prompt, are vLLM's alone."""
        assert [name for name, lines in TIMELINES.items() if any("." in line for line in lines)] == ["vllm"]

    def test_all_generate_the_same(self):
        """Whatever the order, each request gets its tokens: every letter but `p` gives one."""
        for lines in TIMELINES.values():
            assert [sum(letter in "Pd" for letter in line) for line in lines] == list(OUTPUT_TOKENS.values())

    def test_tensorrt_llm_whole_prompts_follow_orca(self):
        """Without chunks and with room for all, in-flight batching runs what Orca runs."""
        assert tuple(gantt(run(TensorRTLLM())).values()) == TIMELINES["orca"]

    def test_prefill_only_has_no_decode(self):
        """A prefill instance ends each request with its first token."""
        log = run(PrefillOnly(chunk_tokens=CHUNK_TOKENS), outputs=(1, 1, 1, 1))
        assert tuple(gantt(log).values()) == ("P      ", "pP     ", "   pP  ", "   wwpP")

    def test_decode_only_joins_at_once(self):
        """A decode instance takes each request that arrives with its KVCache into the next iteration."""
        arrived = [
            Progress(
                request_id=i,
                arrival=i,
                prompt_tokens=tokens,
                cached_tokens=tokens,
                generated_tokens=1,
                max_new_tokens=10,
            )
            for i, tokens in enumerate(PROMPT_TOKENS.values())
        ]
        outputs = dict(enumerate(OUTPUT_TOKENS.values()))
        log = trace_plans(named_policy("decode_only"), arrived, LIMITS, outputs, enters_at=ARRIVE_LATE)
        assert tuple(gantt(log).values()) == ("ddddd  ", "ddddddd", "   dd  ", "   dd  ")


class TestTokenBudget:
    """The bound on TBT, in tokens: the longest iteration that a decode has to sit through."""

    def longest_with_a_decode(self, name, **knobs):
        log = run(named_policy(name, **knobs))
        return max(step.plan.new_tokens for step in log if any(request.decoding for request in step.running))

    @pytest.mark.parametrize("name", ["sarathi_serve", "vllm_chunked", "splitfuse", "sarathi"])
    def test_chunks_bound_it(self, name):
        """No decode sits through more tokens than the budget."""
        assert self.longest_with_a_decode(name, chunk_tokens=CHUNK_TOKENS) <= CHUNK_TOKENS

    @pytest.mark.parametrize("name", ["vllm", "orca"])
    def test_whole_prompts_do_not(self, name):
        """Where prompts are whole, a running decode sits through C and D together."""
        assert self.longest_with_a_decode(name) >= PROMPT_TOKENS["C"] + PROMPT_TOKENS["D"]
