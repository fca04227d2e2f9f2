"""The state check of Torch optimizers: parameters and hyperparameters are compared over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from multiring.horovod.state_check import SetCheck
from multiring.horovod.torch.handles import number_of
from multiring.horovod.torch.options import OptimizerOptions
from multiring.torch.buffers import as_array, has_values, parts_of
from multiring.torch.hyperparameters import hyperparameters

__all__ = ["DriftCheck"]


class DriftCheck:
    """Compares the parameters whose gradients are reduced, and the hyperparameters of their optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> None:
        self._optimizer, self._named = optimizer, options.named
        self._check = SetCheck(options.process_set, "hvd.broadcast_parameters")
        self._step: int | None = None

    def begin(self, handle: int) -> None:
        """Take note of the step in which this reduction takes part, of the first parameter."""
        number = number_of(handle)
        self._step = None if number is None else number + 1

    def run(self) -> None:
        """Compare if it is time. Collective: all ranks have reduced the gradients of this step.

        Raises:
            MismatchError: The ranks differ.
        """
        if self._step is not None:
            name = self._named[0][0]
            self._check.run(name, self._step, self._parameters, lambda: hyperparameters(self._optimizer))

    def note(self) -> None:
        """The optimizer has stepped with gradients that were reduced."""
        if self._step is not None:
            self._check.note(self._step, self._parameters)
            self._step = None

    def _parameters(self) -> Iterator[tuple[str, object]]:
        for name, parameter in self._named:
            if not parameter.requires_grad:
                continue
            for part_name, part in parts_of(name, parameter):
                if has_values(part):
                    yield f"parameter {part_name}", as_array(part)
