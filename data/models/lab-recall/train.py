"""Train `lab-recall` from scratch (`make model`): `python train.py --output data/models/lab-recall`.

Interrupted, it goes on from its last checkpoint; every step draws its own contexts, so nothing is seen twice. The
parts are the contexts of the training stages, the network with its Hugging Face names, and the optimiser.

Matrices are optimised by Muon: momentum whose every matrix is made orthogonal before it is applied (K. Jordan and
others, 2024). On a small network it finds induction in fewer steps than AdamW. This one works in float32 and
stacks matrices of one shape, since a CPU without bfloat16 runs `torch.optim.Muon` slowly.
"""  # noqa: INP001  # a script, not a package

import argparse
import csv
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import nn

from mooncake_lab.compression import FullCache, Session
from mooncake_lab.compression import questions as vocabulary
from mooncake_lab.compression.exam import exam, marks
from mooncake_lab.compression.questions import (
    EXAMINED,
    Context,
    Question,
    Sample,
    Tokens,
    copy,
    draw_records,
    filler,
    needle,
    question_first,
    recall,
    rng_of,
)
from mooncake_lab.engine import LlamaConfig, config_from_shape, load_model
from mooncake_lab.engine.rope import inverse_frequencies, make_rope
from mooncake_lab.perf import model_shape

TOPIC_MEDIANS: Final = (4, 6, 9, 13, 19, 27, 39, 56)
"""Median length of a topic's text (bytes); lengths are log-normal around it."""
TOPIC_SIGMA: Final = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: contexts of one length."""

    name: str
    length: int
    """Tokens of a context."""
    rows: int
    """Contexts of a step."""
    until: float
    """The stage ends when the running share of right answers passes this, within the two limits below."""
    at_least: int
    """Fewest steps of the stage."""
    at_most: int
    """Most steps of the stage."""


STAGES: Final = (
    Stage(name="loops", length=32, rows=24, until=0.9, at_least=50, at_most=4000),
    Stage(name="pairs", length=64, rows=16, until=0.9, at_least=50, at_most=1500),
    Stage(name="text-128", length=128, rows=12, until=0.85, at_least=150, at_most=600),
    Stage(name="text-256", length=256, rows=8, until=0.85, at_least=200, at_most=700),
    Stage(name="text-512", length=512, rows=4, until=0.9, at_least=300, at_most=900),
    Stage(name="text-1024", length=1056, rows=2, until=1.0, at_least=3300, at_most=3300),
)
"""The last one has a fixed number of steps, over which the learning rate falls to zero."""


_SHARES: Final = MappingProxyType(
    {"medley": 0.45, "recall": 0.3, "needle": 0.06, "copy": 0.06, "question_first": 0.08, "topic_text": 0.05}
)
"""How often each task is drawn in the stages with text."""
_SINGLE: Final = 0.4
"""Share of `recall` contexts with one question only, as in the examination; contexts of one pair come on top."""
_FIRST_SHARE: Final = 0.25
"""Least share of a context's loss that its first answer has: the next ones have an example just before them."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's contexts."""

    tokens: Tokens
    """Shape (rows, length)."""
    weights: npt.NDArray[np.float32]
    """Same shape: what each token counts as an answer that its context determines; a context's sum is 1 or 0."""
    recalls: npt.NDArray[np.bool_]
    """Same shape: the answers to key-value questions and needles among them, which the stages go by."""


def loop(context: Context, length: int, *, period: int) -> Sample:
    """Random keys, values and endings, over and over: from the second round on each one can be known.

    No single look-back fits all periods, so that a model must find the place by its content.
    """
    what = context.rng.integers(vocabulary.FIRST_KEY, vocabulary.FIRST_TOPIC, size=period)
    tokens = np.concatenate([[vocabulary.BEGIN], np.resize(what, length - 1)])
    asked = Question(1, 1 + period, length - 1 - period, tuple(range(1, 1 + period)))
    return Sample("loop", tokens, (asked,))


def medley(context: Context, length: int, *, pairs: int, questions: int, gap: int = 0) -> Sample:
    """Records of every kind in one filler, and after it their questions in any order: most to learn from.

    Args:
        context: randomness and filler.
        length: tokens of all, answers included; a span to copy is there from 256 on.
        pairs: key-value records; the key of one of them is wanted before everything.
        questions: about key-value records at the end; at most `pairs`.
        gap: filler between questions, at most; less where the length leaves less.

    Raises:
        ValueError: when the records and questions do not fit.
    """
    records = draw_records(context, pairs)
    wanted = records[int(context.rng.integers(pairs))]
    secret = context.distinct(vocabulary.FIRST_VALUE, vocabulary.VALUES, vocabulary.NEEDLE_TOKENS)
    asks = [(record, np.array([vocabulary.GET, record[1]]), record[2:]) for record in records[:questions]]
    asks.append((wanted, np.array([vocabulary.ANSWER]), wanted[1:]))
    asks.append((np.array([vocabulary.NEEDLE, *secret]), np.array([vocabulary.ASK]), secret))
    if length >= 256:
        what = context.rng.integers(vocabulary.FIRST_TOPIC, size=vocabulary.COPY_TOKENS)
        asks.append((np.array([vocabulary.COPY, *what]), np.array([vocabulary.PASTE]), what))
    scattered = [*records, *(record for record, _, _ in asks[questions + 1 :])]
    scattered = [scattered[i] for i in context.rng.permutation(len(scattered))]
    tail = sum(len(ask) + len(answer) for _, ask, answer in asks)
    room = length - 3 - tail - sum(len(record) for record in scattered)
    gap = max(0, min(gap, room // len(asks)))
    body, places = context.scatter(length - 2 - tail - gap * (len(asks) - 1), scattered)
    parts = [body[:1], np.array([vocabulary.WANT, wanted[1]]), body[1:]]
    at = {record.tobytes(): place + 2 for record, place in zip(scattered, places, strict=True)}
    start, found = len(body) + 2, list[Question]()
    for turn, index in enumerate(context.rng.permutation(len(asks)).tolist()):
        record, ask, answer = asks[index]
        if turn and gap:
            parts.append(context.text(gap))
            start += gap
        first = at[record.tobytes()]
        evidence = tuple(range(first, first + len(record)))
        found.append(Question(start, start + len(ask), len(answer), evidence))
        parts += [ask, answer]
        start += len(ask) + len(answer)
    return Sample("medley", np.concatenate(parts), tuple(found))


def topic_text(context: Context, length: int) -> Sample:
    """Filler, then `[GEN] topic` and a text whose length the topic suggests and chance decides, then `[END]`."""
    topic = int(context.rng.integers(vocabulary.TOPICS))
    drawn = TOPIC_MEDIANS[topic] * np.exp(TOPIC_SIGMA * context.rng.standard_normal())
    size = int(np.clip(round(drawn), 1, length // 2))
    body, _ = context.scatter(length - size - 3, [])
    ask = np.array([vocabulary.GEN, vocabulary.FIRST_TOPIC + topic])
    asked = Question(length - size - 3, length - size - 1, size + 1, ())
    return Sample("topic_text", np.concatenate([body, ask, context.text(size), [vocabulary.END]]), (asked,))


def draw_batch(stage: Stage, context: Context) -> Batch:
    """One step's contexts of a stage; in three of ten steps with text, twice as many of half the length."""
    halves = stage.name.startswith("text") and context.rng.random() < 0.3
    rows, length = (2 * stage.rows, stage.length // 2) if halves else (stage.rows, stage.length)
    samples = [_draw(stage, length, context) for _ in range(rows)]
    tokens = np.stack([sample.tokens for sample in samples])
    weights: npt.NDArray[np.float32] = np.zeros(tokens.shape, dtype=np.float32)
    recalls: npt.NDArray[np.bool_] = np.zeros(tokens.shape, dtype=np.bool_)
    for row, sample in enumerate(samples):
        if sample.task == "topic_text":
            continue
        said = sum(asked.answer_tokens for asked in sample.questions)
        first = sample.questions[0].answer_tokens
        share = max(_FIRST_SHARE, first / said)
        for turn, asked in enumerate(sample.questions):
            where = slice(asked.answer_at, asked.answer_at + asked.answer_tokens)
            weights[row, where] = (1 - share) / (said - first) if turn else share / first
            recalls[row, where] = sample.task in {"recall", "needle", "medley"} or stage.name == "loops"
    return Batch(tokens, weights, recalls)


def _draw(stage: Stage, length: int, context: Context) -> Sample:
    if stage.name == "loops":
        return loop(context, length, period=int(context.rng.integers(3, 13)))
    if stage.name == "pairs":
        pairs = int(context.rng.integers(2, (length - 2) // 8 + 1))
        return recall(context, length, pairs=pairs, questions=pairs)
    most = min(32, (length - 16) // 12)
    task = str(context.rng.choice(list(_SHARES), p=list(_SHARES.values())))
    if task in {"recall", "medley"}:
        pairs = min(most, int(2 ** context.rng.integers(0, 6)))
        several = int(context.rng.integers(1, 13)) if context.rng.random() < 0.5 else pairs
        single = task == "recall" and context.rng.random() < _SINGLE
        asked = 1 if single else min(several, pairs, (length - 16 - 4 * pairs) // 12)
        gap = int(context.rng.integers(0, 9)) if context.rng.random() < 0.5 else 0
        draw = recall if task == "recall" else medley
        return draw(context, length, pairs=pairs, questions=asked, gap=gap)
    others = {"needle": needle, "copy": copy, "topic_text": topic_text}
    if task in others:
        return others[task](context, length)
    return question_first(context, length, pairs=min(most, 8))


POSITIONS: Final = 2048
"""Longest context the model is made for (tokens); it is trained on half of that."""
_ROPE_THETA: Final = 500_000.0
"""As in Llama 3: at 10,000 only 8 of 32 elements turn slowly enough to compare contents 1,000 tokens apart."""
_ALIKE: Final = 0.5
"""First element of every token's vector before training; what all tokens have in common."""
_SHARPNESS: Final = 9.0
"""Length of each turned pair of the heads that look back: a gap of some 8 in their scores."""


def lab_config() -> LlamaConfig:
    """The configuration of `lab-recall`."""
    shape = config_from_shape(model_shape("lab-recall"), max_positions=POSITIONS)
    return replace(shape, rope_theta=_ROPE_THETA)


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as `hidden`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Causal attention of grouped query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.width, config.query_width, bias=False)
        self.k_proj = nn.Linear(config.width, config.kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, config.kv_width, bias=False)
        self.o_proj = nn.Linear(config.query_width, config.width, bias=False)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), same shape back."""
        rows, tokens, _ = hidden.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, tokens, -1, self.config.head_width).transpose(1, 2)

        query, key = (_turn(heads(part(hidden)), cosines, sines) for part in (self.q_proj, self.k_proj))
        group = self.config.query_heads // self.config.kv_heads
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, heads(self.v_proj(hidden))))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(rows, tokens, -1))


class FeedForward(nn.Module):
    """`down(silu(gate) * up)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), same shape back."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """Attention and feed-forward, each around a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.width, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.width, config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, width), same shape back."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Stack(nn.Module):
    """The input table, the layers and the last normalisation."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.width, config.norm_epsilon)


class LabNetwork(nn.Module):
    """A trainable Llama with tied embeddings, seeded by torch's global generator."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Stack(config)
        rope = make_rope(config, config.max_positions, torch.device("cpu"))
        self.cosines: torch.Tensor
        self.sines: torch.Tensor
        self.register_buffer("cosines", rope.cosines, persistent=False)
        self.register_buffer("sines", rope.sines, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=((2 * config.layers if last else 1) * parameter.shape[1]) ** -0.5)
        _look_back(self.model, config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, vocabulary) of int64 tokens (rows, tokens)."""
        hidden = self.model.embed_tokens(tokens)
        cosines, sines = self.cosines[: tokens.shape[1]], self.sines[: tokens.shape[1]]
        for layer in self.model.layers:
            hidden = layer(hidden, cosines, sines)
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)


@torch.no_grad()
def _look_back(model: Stack, config: LlamaConfig) -> None:
    """Let the first KV head of the first layer begin by looking at the token before.

    Training finds this by itself, on a plateau that takes most of its time; then induction follows within a few
    hundred steps. All tokens share their first element, and the head's queries and keys read it: keys turned by
    the angle of one position make scores largest one position back. Training may change all of it.
    """
    model.embed_tokens.weight[:, 0] = _ALIKE
    length = (_ALIKE**2 + 1) ** 0.5  # of a token's vector; after normalisation its square is the width
    seen = _ALIKE / length * config.width**0.5
    fast = inverse_frequencies(config)[:4]
    half, group = config.head_width // 2, config.query_heads // config.kv_heads
    attention = cast("Layer", model.layers[0]).self_attn
    for head in range(group):
        first = head * config.head_width
        attention.q_proj.weight[first : first + len(fast), 0] += _SHARPNESS / seen
    attention.k_proj.weight[: len(fast), 0] += _SHARPNESS / seen * fast.cos()
    attention.k_proj.weight[half : half + len(fast), 0] += _SHARPNESS / seen * fast.sin()


def _turn(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """`engine.rope.rotate`, for heads of shape (rows, heads, tokens, head_width)."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)


def save_model(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Write `config.json` and `model.safetensors` (float32).

    Args:
        state: parameters by their Hugging Face names.
        directory: made if needed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(), indent=2) + "\n")


def _config() -> dict[str, Any]:
    config = lab_config()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": True,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": POSITIONS,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": vocabulary.BEGIN,
        "eos_token_id": vocabulary.END,
        "torch_dtype": "float32",
    }


_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
"""Quintic that pushes singular values towards 1, from its author."""


class Muon(torch.optim.Optimizer):
    """For matrices only.

    Args:
        parameters: matrices.
        lr: size of a step, relative to an orthogonal matrix.
        momentum: Nesterov's.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step, after `closure` if there is one, whose loss it returns; gradients must be there then."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                shapes[parameter.shape].append(parameter)
            for (rows, columns), parameters in shapes.items():
                grads = torch.stack([_gradient(parameter) for parameter in parameters])
                momenta = torch.stack([self._momentum(parameter) for parameter in parameters])
                momenta.lerp_(grads, 1 - group["momentum"])
                updates = orthogonal(grads.lerp(momenta, group["momentum"])) * max(1.0, rows / columns) ** 0.5
                for parameter, momentum, update in zip(parameters, momenta, updates, strict=True):
                    self.state[parameter]["momentum"].copy_(momentum)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        return loss

    def _momentum(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no gradient; run backward() first")
    return parameter.grad


def orthogonal(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearly the nearest (semi-)orthogonal matrix of each: singular values between 0.7 and 1.2.

    Args:
        matrices: shape (count, rows, columns).
        steps: of Newton and Schulz's iteration.
    """
    a, b, c = _POLYNOMIAL
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return x.transpose(1, 2) if tall else x


_POOL_BYTES: Final = 1 << 17
_TEXT_WEIGHT: Final = 0.1
"""Weight of the loss on filler relative to the loss on answers; with full weight, filler would dominate."""
_MEMORY: Final = 0.95
"""Decay of the running share of right answers from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained."""

    seed: int = 0
    matrix_rate: float = 0.02
    """Of Muon, which moves all matrices but the table of tokens."""
    learning_rate: float = 3e-3
    """Of AdamW, which moves the rest."""
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    checkpoint_steps: int = 100
    stages: tuple[Stage, ...] = STAGES


@dataclass(slots=True)
class State:
    """Where training is. Mutable: it moves on."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    right: float = 0.0
    """Running share of right answers."""
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """A network, its optimisers and where it is; mutable."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training = training
        self.state = State()
        self._checkpoint = directory / "checkpoint.pt"
        self._curve = directory / "curve.csv"
        directory.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(training.seed)
        self.network = LabNetwork(lab_config())
        self.optimisers = _optimisers(self.network, training)
        self.pool = filler(rng_of(training.seed, -1 & 0xFFFF), _POOL_BYTES)
        if self._checkpoint.exists():
            self._resume()

    @property
    def stage(self) -> Stage:
        """The one it is in."""
        return self.training.stages[self.state.stage]

    @property
    def done(self) -> bool:
        """Whether all stages are behind it."""
        return self.state.stage == len(self.training.stages)

    def step(self) -> float:
        """One step of the optimiser; the loss."""
        start_s = time.perf_counter()
        training = self.training
        batch = draw_batch(self.stage, Context(rng_of(self.training.seed, self.state.step), self.pool))
        for optimiser, rate in zip(self.optimisers, (training.matrix_rate, training.learning_rate), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * self._rate()
        loss = self._learn(batch)
        state = self.state
        state.tokens += batch.tokens.size
        state.step += 1
        state.stage_step += 1
        state.seconds += time.perf_counter() - start_s
        if state.step % 20 == 0:
            self._note(loss)
        self._move_on()
        if state.step % self.training.checkpoint_steps == 0 or self.done:
            self._save()
        return loss

    def _learn(self, batch: Batch) -> float:
        tokens = torch.from_numpy(batch.tokens)
        logits = self.network(tokens)[:, :-1]
        target = tokens[:, 1:]
        weights, recalls = (torch.from_numpy(part[:, 1:]) for part in (batch.weights, batch.recalls))
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        text = weights == 0
        answered = (losses * weights).sum() / weights.sum().clamp(min=1)
        loss = answered + _TEXT_WEIGHT * (losses * text).sum() / text.sum()
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.training.clip_norm)
        for optimiser in self.optimisers:
            optimiser.step()
        if recalls.any():
            right = float((logits.argmax(dim=-1) == target)[recalls].float().mean())
            self.state.right = _MEMORY * self.state.right + (1 - _MEMORY) * right
        return float(loss.detach())

    def _rate(self) -> float:
        """Rises over the first steps, stays, and falls to zero over the last stage."""
        training, state = self.training, self.state
        rate = min(1.0, (state.step + 1) / training.warmup_steps)
        if state.stage == len(training.stages) - 1:
            rate *= max(0.02, 1 - state.stage_step / self.stage.at_most)
        return rate

    def _move_on(self) -> None:
        state, stage = self.state, self.stage
        passed = state.right > stage.until and state.stage_step >= stage.at_least
        if passed or state.stage_step >= stage.at_most:
            state.stage, state.stage_step, state.right = state.stage + 1, 0, 0.0

    def _note(self, loss: float) -> None:
        fresh = not self._curve.exists()
        with self._curve.open("a", newline="") as file:
            writer = csv.writer(file)
            if fresh:
                writer.writerow(("step", "stage", "tokens", "loss", "running_accuracy", "seconds"))
            state = self.state
            writer.writerow(
                (
                    state.step,
                    self.stage.name,
                    state.tokens,
                    f"{loss:.4f}",
                    f"{state.right:.4f}",
                    f"{state.seconds:.1f}",
                )
            )

    def _save(self) -> None:
        part = self._checkpoint.with_suffix(".part")
        whole = {
            "network": self.network.state_dict(),
            "optimisers": [each.state_dict() for each in self.optimisers],
        }
        torch.save(whole | {"state": asdict(self.state)}, part)
        part.replace(self._checkpoint)

    def _resume(self) -> None:
        saved = torch.load(self._checkpoint, weights_only=True)
        self.network.load_state_dict(saved["network"])
        for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.state = State(**saved["state"])
        if self._curve.exists():  # what was noted after the checkpoint will be noted again
            head, *lines = self._curve.read_text().splitlines(keepends=True)
            kept = [line for line in lines if int(line.split(",")[0]) <= self.state.step]
            self._curve.write_text("".join([head, *kept]))


def _optimisers(network: LabNetwork, training: Training) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    named = dict(network.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=training.matrix_rate, weight_decay=training.weight_decay)
    return muon, torch.optim.AdamW(
        rest, lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )


def evaluate(directory: Path, *, prompts: int, length: int = 1024) -> list[dict[str, str | int | float]]:
    """How often a saved model answers right with its full cache: one row a task."""
    model = load_model(str(directory), device="cpu", dtype="float32")
    session = Session(model, room_tokens=4 * length)
    rows: list[dict[str, str | int | float]] = []
    for task in EXAMINED:
        samples = exam(task, prompts, length=length)
        right = sum(marks(session, sample, {"full": lambda _: FullCache()})["full"].right for sample in samples)
        rows.append({"task": task, "length": length, "prompts": prompts, "right": right, "share": right / prompts})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, save, examine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where the model goes")
    parser.add_argument("--work", type=Path, default=None, help="checkpoints; default: beside the output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=500, help="of each task in the examination")
    given = parser.parse_args(arguments)
    output: Path = given.output
    work: Path = given.work or output.with_name(f".training-{output.name}")
    trainer = Trainer(Training(seed=given.seed), work)
    _train(trainer)
    save_model(trainer.network.state_dict(), output)
    shutil.copy(work / "curve.csv", output / "curve.csv")
    with (output / "evaluation.csv").open("w", newline="") as file:
        rows = evaluate(output, prompts=given.prompts)
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    sys.stdout.write(
        f"{output}: {trainer.state.tokens / 1e6:.1f} M tokens, {trainer.state.seconds / 60:.0f} min\n"
    )


def _train(trainer: Trainer) -> None:
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("{task.fields[right]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(trainer.training.stages), right="")
        while not trainer.done:
            stage = trainer.stage
            loss = trainer.step()
            state = trainer.state
            inside = 0.0 if trainer.done else state.stage_step / trainer.stage.at_most
            progress.update(
                bar,
                completed=state.stage + inside,
                description=f"{stage.name}, step {state.step}",
                right=f"loss {loss:.2f}, right {100 * state.right:.0f} %",
            )


if __name__ == "__main__":
    main()
