"""Adasum of what the steps of all ranks have changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from multiring.horovod.reduce_ops import Adasum
from multiring.horovod.torch.drift import DriftCheck
from multiring.horovod.torch.handles import synchronize
from multiring.horovod.torch.options import NOT_PICKLED, OptimizerOptions, load_shared
from multiring.horovod.torch.reduces import allreduce_async_

__all__ = ["AdasumStep"]


class AdasumStep(torch.optim.Optimizer):
    """Each rank steps alone; what the step has changed is combined over the ranks by Adasum, one parameter
    at a time, and applied to the parameters of before the step. Goes before the wrapped class in the order of
    bases."""

    _options: OptimizerOptions

    def _distribute(self, optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> None:
        self.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "zero_grad")})
        self._options = options
        self._parameter_names = {parameter: name for name, parameter in options.named}
        self.backward_passes_per_step = options.passes
        self._passes: Counter[torch.Tensor] = Counter()
        self._drift = DriftCheck(self, options)
        required: list[Any] = [p for _, p in options.named if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._has_gradient) for p in required]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expects so many backward calls for each step from now on."""
        self.backward_passes_per_step = passes
        self._passes.clear()

    def synchronize(self) -> None:
        """Does nothing: what is reduced comes of the step."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step is the reduction."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_PICKLED)

    def local_step(self) -> None:
        """The step of the wrapped class, of this rank alone."""
        super().step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step, and combine the changes of all ranks.

        Raises:
            MismatchError: Parameters or hyperparameters differ over ranks. On all ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        named = [(name, p) for name, p in self._options.named if p.requires_grad]
        for _, parameter in named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        before = [parameter.detach().clone() for _, parameter in named]
        super().step()
        self._passes.clear()
        started = []
        for (name, parameter), start in zip(named, before, strict=True):
            change, context = self._options.compression.compress((parameter - start).contiguous())
            handle = allreduce_async_(change, None, name, Adasum, process_set=self._options.process_set)
            started.append((handle, change, context))
        if started:
            self._drift.begin(started[0][0])
        for (_, parameter), start, (handle, change, context) in zip(named, before, started, strict=True):
            synchronize(handle)
            parameter.copy_(start + self._options.compression.decompress(change, context))
        if started:
            self._drift.run()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped class. Backward passes that have not led to a step are forgotten."""
        self._passes.clear()
        load_shared(self, super().load_state_dict, state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class; raises AssertionError between backward and step."""
        if self._passes:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step(). This is "
                "prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        if self._passes[parameter] >= self.backward_passes_per_step:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._passes[parameter] += 1
