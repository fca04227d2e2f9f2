"""How Caffe changes weights: learning-rate policies and the update rules of its solvers.

Written after the published behaviour of Caffe's solvers. Mind that Caffe's
momentum holds the learning rate: `history = momentum * history + rate * gradient`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from multiring.models.caffe.blob import decimal
from multiring.models.caffe.learnable import Learnable
from multiring.models.caffe.prototxt import Location

__all__ = [
    "RULES",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "Momentum",
    "Nesterov",
    "Policy",
    "RMSProp",
    "Rule",
    "clip",
    "decay",
]

POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")
# Fields of the solver that a policy cannot do without.
_NEEDED = {"step": ("gamma", "stepsize"), "exp": ("gamma",), "inv": ("gamma", "power"), "poly": ("power",)}
_NEEDED |= {"multistep": ("gamma", "stepvalue"), "sigmoid": ("gamma", "stepsize")}


class Policy:
    """The learning rate as a function of the iteration.

    Attributes:
        current_step: Steps that "step" and "multistep" have taken, kept in snapshots.
    """

    def __init__(self, param: Any, location: Location) -> None:
        """Check a `SolverParameter`.

        Raises:
            PrototxtError: The policy is unknown, or a number that it needs is missing.
        """
        self._param = param
        self.current_step = 0
        if param.lr_policy not in POLICIES:
            raise location.error(
                f"lr_policy {param.lr_policy!r} is unknown; choose one of {', '.join(POLICIES)}", "lr_policy"
            )
        for name in _NEEDED.get(param.lr_policy, ()):
            value = getattr(param, name)
            if (name == "stepvalue" and not value) or (name != "stepvalue" and not param.HasField(name)):
                raise location.error(f"lr_policy {param.lr_policy!r} needs {name}", "lr_policy")
        if param.lr_policy in ("step", "sigmoid") and param.stepsize < 1:
            raise location.error("stepsize has to be at least 1", "stepsize")
        if "gamma" in _NEEDED.get(param.lr_policy, ()) and param.gamma < 0:
            raise location.error(f"lr_policy {param.lr_policy!r} needs a gamma of at least 0", "gamma")

    def rate(self, iteration: int) -> float:
        """Learning rate of the update number `iteration`, counted from 0."""
        param = self._param
        base, gamma, power = (decimal(getattr(param, name)) for name in ("base_lr", "gamma", "power"))
        match param.lr_policy:
            case "step" | "multistep":
                return base * float(gamma ** self._step(iteration))
            case "exp":
                return base * float(gamma**iteration)
            case "inv":
                return base * float((1 + gamma * iteration) ** -power)
            case "poly":
                return base * float((1 - iteration / param.max_iter) ** power)
            case "sigmoid":
                return base / (1 + math.exp(-gamma * (iteration - param.stepsize)))
        return base

    def advance(self, iteration: int) -> bool:
        """Take the step that the update number `iteration` takes; whether "multistep" took one."""
        before, self.current_step = self.current_step, self._step(iteration)
        return self._param.lr_policy == "multistep" and self.current_step > before

    def _step(self, iteration: int) -> int:
        values, step = self._param.stepvalue, self.current_step
        if self._param.lr_policy == "step":
            return int(iteration // self._param.stepsize)
        # One an iteration, as in Caffe: of values that are equal, or have passed before, each takes its turn.
        is_due = step < len(values) and iteration >= values[step]
        return step + 1 if self._param.lr_policy == "multistep" and is_due else step


def clip(gradients: Sequence[torch.Tensor], limit: float) -> str | None:
    """Scale gradients so that the L2 norm of all together is `limit` at most; what was done, in words."""
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)) if limit >= 0 else 0.0
    if limit < 0 or norm <= limit:
        return None
    for gradient in gradients:
        gradient.mul_(limit / norm)
    return f"scaling down gradients (L2 norm {norm:g} > {limit:g}) by scale factor {limit / norm:g}"


def decay(values: torch.Tensor, gradient: torch.Tensor, factor: float, kind: str) -> None:
    """Add weight decay to a gradient; `kind` is "L1" or "L2"."""
    if factor:
        gradient.add_(values if kind == "L2" else values.sign(), alpha=factor)


class Rule(ABC):
    """An update rule: turns the gradients of learned blobs into steps to subtract.

    Attributes:
        history: What the rule keeps, in the order in which Caffe's snapshots have them.
    """

    arrays = 1  # per learned blob

    def __init__(self, param: Any, learnable: Sequence[Learnable]) -> None:
        self._momentum = decimal(param.momentum)
        self._count = len(learnable)
        self.history = [one.blob.like() for _ in range(self.arrays) for one in learnable]

    @abstractmethod
    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        """Overwrite the gradient of a learned blob with the step.

        Args:
            number: Which of the learned blobs.
            gradient: Its gradient, weight decay included.
            rate: Learning rate times the blob's `lr_mult`.
            iteration: Updates done before.
        """


class Momentum(Rule):
    """Caffe's "SGD": history = momentum * history + rate * gradient; the step is the history."""

    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        history = self.history[number].tensor
        history.mul_(self._momentum).add_(gradient, alpha=rate)
        gradient.copy_(history)


class Nesterov(Rule):
    """Caffe's "Nesterov": the step is (1 + momentum) * new history - momentum * old history."""

    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        history = self.history[number].tensor
        before = history.clone()
        history.mul_(self._momentum).add_(gradient, alpha=rate)
        torch.mul(history, 1 + self._momentum, out=gradient)
        gradient.sub_(before, alpha=self._momentum)


class Adam(Rule):
    """Caffe's "Adam": `momentum` and `momentum2` are beta1 and beta2, `delta` is epsilon."""

    arrays = 2

    def __init__(self, param: Any, learnable: Sequence[Learnable]) -> None:
        super().__init__(param, learnable)
        self._second, self._delta = decimal(param.momentum2), decimal(param.delta)

    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        first, second = self._momentum, self._second
        mean, square = (self.history[k].tensor for k in (number, number + self._count))
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        correction = math.sqrt(1 - second ** (iteration + 1)) / (1 - first ** (iteration + 1))
        torch.div(mean, square.sqrt().add_(self._delta), out=gradient)
        gradient.mul_(rate * correction)


class AdaGrad(Rule):
    """Caffe's "AdaGrad": the history is the sum of squares, `delta` keeps the divisor from 0."""

    def __init__(self, param: Any, learnable: Sequence[Learnable]) -> None:
        super().__init__(param, learnable)
        self._delta = decimal(param.delta)

    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        history = self.history[number].tensor
        self._gather(history, gradient)
        gradient.div_(history.sqrt().add_(self._delta)).mul_(rate)

    def _gather(self, history: torch.Tensor, gradient: torch.Tensor) -> None:
        history.addcmul_(gradient, gradient)


class RMSProp(AdaGrad):
    """Caffe's "RMSProp": the history is a moving average of squares with the factor `rms_decay`."""

    def __init__(self, param: Any, learnable: Sequence[Learnable]) -> None:
        super().__init__(param, learnable)
        self._decay = decimal(param.rms_decay)

    def _gather(self, history: torch.Tensor, gradient: torch.Tensor) -> None:
        history.mul_(self._decay).addcmul_(gradient, gradient, value=1 - self._decay)


class AdaDelta(Rule):
    """Caffe's "AdaDelta": `momentum` is the factor of the moving averages of squares, of gradients and of
    steps."""

    arrays = 2

    def __init__(self, param: Any, learnable: Sequence[Learnable]) -> None:
        super().__init__(param, learnable)
        self._delta = decimal(param.delta)

    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        factor, delta = self._momentum, self._delta
        square, steps = (self.history[k].tensor for k in (number, number + self._count))
        square.mul_(factor).addcmul_(gradient, gradient, value=1 - factor)
        gradient.mul_(steps.add(delta).div_(square.add(delta)).sqrt_())
        steps.mul_(factor).addcmul_(gradient, gradient, value=1 - factor)
        gradient.mul_(rate)


RULES: dict[str, type[Rule]] = {
    "SGD": Momentum,
    "Nesterov": Nesterov,
    "AdaGrad": AdaGrad,
    "RMSProp": RMSProp,
    "AdaDelta": AdaDelta,
    "Adam": Adam,
}
