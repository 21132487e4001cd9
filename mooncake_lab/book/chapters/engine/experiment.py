"""Chapter 03: the engine, its batching policies, and shared prefixes, beside Sarathi-Serve's Fig. 7."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import pandas as pd
import torch

from mooncake_lab.batching import BatchingPolicy, Iteration, gantt, named_policy
from mooncake_lab.bench.engine import Bench, decode_case, mixed_case
from mooncake_lab.bench.measuring import measured_by, one_thread, random_prompt
from mooncake_lab.bench.peers import HuggingFaceGenerate, hugging_face
from mooncake_lab.book.experiments import at_scale, where
from mooncake_lab.book.paper import ComparisonTable, claimed, comparison_table
from mooncake_lab.engine import (
    Engine,
    EngineSettings,
    GenerationRequest,
    LlamaWeights,
    Output,
    choose_backend,
    config_from_shape,
    load_model,
    make_model,
    random_weights,
)
from mooncake_lab.perf import model_shape

POLICIES: Final = (
    "request_level", "orca", "vllm", "tensorrt_llm", "vllm_chunked", "splitfuse", "sarathi", "sarathi_serve",
)  # fmt: skip  # two kinds: those that compute prompts whole, in the order of their years, and those that cut them
WHOLE_PROMPTS: Final = frozenset(POLICIES[:4])
"""The policies that run without cutting prompts."""
NAMES: Final = "ABCD"  # of the four requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SameAsHuggingFace:
    """Greedy tokens of the engine beside those of transformers' `generate`, same seeded weights, float32."""

    model: str = "lab-tiny"
    policy: str = "sarathi_serve"
    block_tokens: int = 16
    prompt_tokens: tuple[int, ...] = (5, 33, 70)
    new_tokens: int = 12
    chunk_tokens: int = 24
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a prompt: tokens and their_tokens as text, and whether they are the same."""
        weights = _weights(self.model, self.seed)
        prompts = [
            random_prompt(tokens, weights.config.vocabulary, seed=self.seed, number=number)
            for number, tokens in enumerate(self.prompt_tokens)
        ]
        settings = EngineSettings(block_size_tokens=self.block_tokens, cache_blocks=-(-1024 // self.block_tokens))
        model = make_model(weights, choose_backend(torch.device("cpu"), torch.float32))
        engine = Engine(model, _policy(self.policy, self.chunk_tokens), settings)
        peer = HuggingFaceGenerate(hugging_face(weights))
        with one_thread():
            ours = engine.generate(
                GenerationRequest(prompt=prompt, max_new_tokens=self.new_tokens, end_tokens=())
                for prompt in prompts
            )
            alone = [peer.generate([prompt.tolist()], [self.new_tokens])[0] for prompt in prompts]
        for prompt, output, theirs in zip(prompts, ours, alone, strict=True):
            yield {
                "prompt": len(prompt),
                "tokens": _text(output.tokens),
                "their_tokens": _text(theirs),
                "same": list(output.tokens) == theirs,
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class FourRequests:
    """A and B decode when C and D arrive with long prompts, on the real engine (Sarathi-Serve, OSDI'24, Fig. 7).

    Run it with `cache=False` where the times matter; letters and tokens are always the same.
    """

    policy: str = "sarathi_serve"
    model: str = "lab-8m"
    prompt_tokens: tuple[int, ...] = (32, 32, 384, 192)
    new_tokens: tuple[int, ...] = (12, 9, 4, 4)
    late_after: int = 2
    """Iterations before C and D arrive."""
    chunk_tokens: int = 128
    rounds: int = 3
    """The run of median length is shown."""
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a request and iteration: its letter in `batching.gantt`, start_ms, end_ms, answer."""
        with one_thread() as clock:
            model = load_model(f"random:{self.model}", device="cpu", seed=self.seed, positions=1024)
            settings = EngineSettings(cache_blocks=256, max_batch_tokens=1024, prefix_caching=False)
            engine = Engine(model, _policy(self.policy, self.chunk_tokens), settings, clock=clock)
            runs: list[tuple[list[Iteration], list[Output]]] = []
            for _ in range(self.rounds + 1):  # the first run compiles, and touches memory for the first time
                engine.log.clear()
                outputs = self._serve(engine)
                runs.append((list(engine.log), outputs))
            ranked = sorted(runs[1:], key=lambda run: run[0][-1].end_s - run[0][0].start_s)
            yield from self._of_log(*ranked[len(ranked) // 2], measured_by())

    def _serve(self, engine: Engine) -> list[Output]:
        """Submit A and B, some steps later C and D, and run; four outputs in that order."""
        vocabulary = engine.runner.model.config.vocabulary
        requests = [
            GenerationRequest(
                prompt=random_prompt(prompt, vocabulary, seed=self.seed, number=number),
                max_new_tokens=tokens,
                end_tokens=(),
            )
            for number, (prompt, tokens) in enumerate(zip(self.prompt_tokens, self.new_tokens, strict=True))
        ]
        for request in requests[:2]:
            engine.submit(request)
        done = [output for _ in range(self.late_after) for output in engine.step()]
        for request in requests[2:]:
            engine.submit(request)
        return sorted(done + engine.run(), key=lambda output: output.request_id)

    def _of_log(self, log: list[Iteration], outputs: list[Output], machine: str) -> Iterable[Mapping[str, Any]]:
        zero_s = log[0].start_s
        charts = gantt(log).values()
        for name, letters_of_one, output in zip(NAMES, charts, outputs, strict=True):
            for index, (letter, timed) in enumerate(zip(letters_of_one, log, strict=True)):
                yield {
                    "request": name,
                    "iteration": index,
                    "letter": letter,
                    "start_ms": 1000 * (timed.start_s - zero_s),
                    "end_ms": 1000 * (timed.end_s - zero_s),
                    "batch_tokens": timed.plan.new_tokens,
                    "answer": _text(output.tokens),
                    "machine": machine,
                }


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixQuestions:
    """Questions that begin with the same tokens, with prefix reuse on or off."""

    reuse: bool = True
    arrive: Literal["one by one", "at once"] = "one by one"
    model: str = "lab-tiny"
    shared_tokens: int = 200
    own_tokens: int = 24
    questions: int = 6
    new_tokens: int = 8
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a question: computed_tokens and reused_tokens of its prompt, and its answer."""
        model = load_model(f"random:{self.model}", device="cpu", seed=self.seed)
        engine = Engine(
            model, named_policy("sarathi_serve"), EngineSettings(cache_blocks=256, prefix_caching=self.reuse)
        )
        vocabulary = model.config.vocabulary
        shared = random_prompt(self.shared_tokens, vocabulary, seed=self.seed).tolist()
        requests = [
            GenerationRequest(
                prompt=shared + random_prompt(self.own_tokens, vocabulary, seed=self.seed, number=number).tolist(),
                max_new_tokens=self.new_tokens,
                end_tokens=(),
            )
            for number in range(1, self.questions + 1)
        ]
        batches = [requests] if self.arrive == "at once" else [[request] for request in requests]
        with one_thread():
            outputs = [output for batch in batches for output in engine.generate(batch)]
        for output in outputs:
            yield {
                "question": output.request_id + 1,
                "computed_tokens": output.prompt_tokens - output.reused_tokens,
                "reused_tokens": output.reused_tokens,
                "answer": _text(output.tokens),
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The engine beside transformers' `generate` on this machine, paired and interleaved, on one thread.

    Run it with `cache=False`: a time measured yesterday says nothing about now.
    """

    model: str = "lab-8m"
    context_tokens: int = 128
    batches: tuple[int, ...] = (1, 8)
    steps: int = 16
    burst: int = 8
    """Requests of the mixed burst."""
    rounds: int = 3
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a case: tokens_per_s of both, and the ratio with its extremes over the rounds."""
        with one_thread() as clock:
            bench = Bench(self.model, clock=clock, cache_tokens=16_384)
            cases = [decode_case(batch, self.context_tokens, self.steps) for batch in self.batches]
            for case in (*cases, mixed_case(self.burst, seed=self.seed, scale=0.25)):
                (found,) = bench.compare(case, ["hf"], self.rounds, seed=self.seed)
                yield {
                    "case": found.case,
                    "tokens_per_s": found.tokens_per_s,
                    "their_tokens_per_s": found.tokens / found.peer_seconds,
                    "ratio": found.ratio,
                    "least": found.ratio_low,
                    "most": found.ratio_high,
                    "machine": measured_by(),
                }


def four_requests(scale: str, *, seed: int = 0) -> FourRequests:
    """What the chart shows at a scale: a tiny model and one run at smoke."""
    return at_scale(FourRequests(seed=seed), scale, smoke={"model": "lab-tiny", "rounds": 1})


def race(scale: str, *, seed: int = 0) -> Race:
    """What is measured at a scale."""
    return at_scale(
        Race(seed=seed),
        scale,
        smoke={"model": "lab-tiny", "context_tokens": 32, "batches": (1, 4), "burst": 4, "rounds": 2},
        full={"model": "lab-30m", "context_tokens": 256, "batches": (1, 4, 8, 16), "burst": 32, "rounds": 9},
    )


def letters(charts: pd.DataFrame) -> pd.DataFrame:
    """One line a policy, one string a request, one letter an iteration: rows of `FourRequests`, folded."""
    ordered = charts.sort_values(["policy", "request", "iteration"])
    folded = ordered.pivot_table(index="policy", columns="request", values="letter", aggfunc="".join)
    return folded.loc[[policy for policy in POLICIES if policy in folded.index]]


def waits(charts: pd.DataFrame) -> pd.DataFrame:
    """How long requests wait under each policy: in milliseconds, and in tokens and iterations (without a clock).

    Returns:
        By policy: gap_ms and gap_tokens, the most between two tokens of A; first_c_ms and first_c_iterations, from
        the arrival of C and D to C's first token; first_d_iterations, the same for D; end_ms, when the last
        request is done; stalls, letters `.` of A and B.
    """
    lines: list[dict[str, Any]] = []
    for policy, table in charts.groupby("policy", sort=False):
        told = table.loc[table["letter"].isin(["P", "d"])]
        of_a, of_c, of_d = (where(pd.DataFrame(told), request=name) for name in "ACD")
        once = table.drop_duplicates("iteration").set_index("iteration")
        computed, late = once["batch_tokens"].cumsum(), int(once["late_after"].iloc[0])
        line = {
            "policy": policy,
            "gap_ms": of_a["end_ms"].diff().max(),
            "gap_tokens": computed.loc[of_a["iteration"]].diff().max(),
            "first_c_ms": of_c["end_ms"].min() - once["start_ms"][late],
            "first_c_iterations": of_c["iteration"].min() - late + 1,
            "first_d_iterations": of_d["iteration"].min() - late + 1,
            "end_ms": table["end_ms"].max(),
            "stalls": table["letter"].tolist().count("."),
        }
        lines.append(line)
    return pd.DataFrame(lines).set_index("policy").astype({"gap_tokens": int})


def layer_shapes(name: str) -> pd.DataFrame:
    """The tensors of one layer of a named shape, as this engine fuses them (SARATHI Table 1 and Fig. 2)."""
    layer = _weights(name, 0).layers[0]
    operators = {"preproj": "qkv", "postproj": "output", "ffn_ln1": "gate_up", "ffn_ln2": "down"}
    rows = [(paper, ours, *getattr(layer, ours).shape) for paper, ours in operators.items()]
    return pd.DataFrame(rows, columns=["operator", "tensor", "outputs", "inputs"])


def _weights(name: str, seed: int) -> LlamaWeights:
    config = config_from_shape(model_shape(name))
    return random_weights(config, seed=seed, device=torch.device("cpu"), dtype=torch.float32)


def _policy(name: str, chunk_tokens: int) -> BatchingPolicy:
    return named_policy(name, chunk_tokens=None if name in WHOLE_PROMPTS else chunk_tokens)


def _text(tokens: Iterable[int]) -> str:
    return " ".join(map(str, tokens))


def beside_papers(waited: pd.DataFrame) -> ComparisonTable:
    """The claim of stall-free batching on the iteration log of the real engine."""
    stalls: dict[str, int] = waited["stalls"].to_dict()
    return comparison_table([claimed("S19", stalls["sarathi_serve"])])


def statements(waited: pd.DataFrame, *, equal: bool) -> pd.DataFrame:
    """What the figure says in words, and whether the log agrees."""
    gap, stalls = waited["gap_tokens"], waited["stalls"]
    checks = {
        "answers equal Hugging Face (ours)": equal,
        "vLLM stalls decodes for prompts": bool(stalls["vllm"] > 0),
        "Orca delays decodes without a stall": bool(stalls["orca"] == 0 and gap["orca"] > gap["sarathi_serve"]),
        "request level makes C wait for most iterations": waited["first_c_iterations"].idxmax() == "request_level",
    }
    return pd.DataFrame({"verdict": pd.Series(checks).map({True: "holds", False: "does not hold"})})
