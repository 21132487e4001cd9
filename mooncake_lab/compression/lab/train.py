"""Train `lab-recall` from scratch: `python -m mooncake_lab.compression.lab.train --output data/models/lab-recall`.

Interrupted, it goes on from its last checkpoint; every step draws its own contexts, so nothing is seen twice.
Matrices are optimised by Muon: momentum whose every matrix is made orthogonal before it is applied (K. Jordan and
others, 2024). On a small network it finds induction in fewer steps than AdamW. This one works in float32 and
stacks matrices of one shape, since a CPU without bfloat16 runs `torch.optim.Muon` slowly.
"""

import argparse
import csv
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, overload

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own spelling
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake_lab.compression.controls import FullCache
from mooncake_lab.compression.lab.curriculum import STAGES, Batch, Stage, draw_batch, rng_of
from mooncake_lab.compression.lab.examine import exam, marks
from mooncake_lab.compression.lab.network import LabNetwork, lab_config, save_model
from mooncake_lab.compression.lab.tasks import EXAMINED, Context
from mooncake_lab.compression.lab.text import filler
from mooncake_lab.compression.session import Session
from mooncake_lab.engine import load_model

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
