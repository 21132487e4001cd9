"""Muon: momentum whose every matrix is made orthogonal before it is applied (K. Jordan and others, 2024).

On a small network it finds induction in fewer steps than AdamW. This one works in float32 and stacks matrices
of one shape, since a CPU without bfloat16 runs `torch.optim.Muon` slowly.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import overload

import torch

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
