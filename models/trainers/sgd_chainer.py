"""The recipe's stochastic gradient descent for Chainer, by the formula of `torch.optim.SGD`.

Chainer's own MomentumSGD and NesterovAG keep the learning rate inside of the velocity, so that they do
another thing once the rate changes, and their weight decay is for all parameters alike.
"""

from __future__ import annotations

from typing import Any

import multiring.chainer  # isort: skip  # noqa: F401  # before chainer, which it makes importable

import chainer
import numpy as np
import numpy.typing as npt

from multiring.models.nets.resnet_chainer import ChainerResNet, trained_parameters
from multiring.models.trainers.recipe import Recipe

__all__ = ["VELOCITY", "Sgd", "decay_weights"]

VELOCITY = "velocity"
"""Name of the update rules' state."""


class Sgd(chainer.optimizer.GradientMethod):
    """With `d = g + weight_decay * w` and `v = momentum * v + d`: `w -= lr * (d + momentum * v)` with
    the look ahead of Nesterov, `w -= lr * v` without it.

    Args:
        recipe: Momentum, look ahead and weight decay; `lr` starts at its peak.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self.hyperparam.lr = recipe.peak_lr

    lr = chainer.optimizer.HyperparameterProxy("lr")

    def create_update_rule(self) -> _SgdRule:
        """The rule of one parameter, without weight decay."""
        return _SgdRule(self.hyperparam, self._recipe)


def decay_weights(model: ChainerResNet, weight_decay: float) -> None:
    """Set the weight decay of those parameters of a network that decay; after its optimizer's `setup`."""
    parameters = trained_parameters(model)
    for parameter in model.spec.parameters():
        if parameter.decays:
            parameters[parameter.name].update_rule.hyperparam.weight_decay = weight_decay


class _SgdRule(chainer.optimizer.UpdateRule):
    """Updates one parameter; its state is the velocity, which exists from the first update on."""

    def __init__(self, parent: chainer.optimizer.Hyperparameter, recipe: Recipe) -> None:
        super().__init__(parent)
        self.hyperparam.weight_decay = 0.0
        self._momentum, self._nesterov = recipe.momentum, recipe.nesterov

    def init_state(self, param: chainer.Parameter) -> None:
        """The velocity starts at zero."""
        self.state[VELOCITY] = np.zeros_like(param.array)

    def set_velocity(self, velocity: npt.NDArray[Any] | None) -> None:
        """Continue with this velocity; with None as before the first update."""
        self._state = None if velocity is None else {VELOCITY: velocity}

    def update_core_cpu(self, param: chainer.Parameter) -> None:
        """Update in place; the gradient is left as it is."""
        gradient: Any = param.grad
        if gradient is None:
            return
        weights, velocity = param.array, self.state[VELOCITY]
        if decay := self.hyperparam.weight_decay:
            gradient = gradient + decay * weights
        velocity *= self._momentum
        velocity += gradient
        step = velocity
        if self._nesterov:
            step = gradient + self._momentum * velocity
        weights -= self.hyperparam.lr * step
