"""Gradients that were submitted to a reduction: where they are reduced, and whether the program changes them
before the result is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from multiring.horovod.process_sets import ProcessSet
from multiring.torch.counts import is_reducible_in_place, version
from multiring.torch.placement import is_replaceable

__all__ = ["Incoming", "Submitted", "check_unchanged", "sharing"]

Tensor = torch.Tensor

# Between GradScaler.step and a check: wrappers of a step by Torch, schedulers and programs.
_MAX_FRAMES = 12


class Incoming:
    """The memory that backward passes accumulate into gradients.

    It tells gradients that autograd has made from memory that the program has put into `parameter.grad`.
    """

    def __init__(self) -> None:
        self._last: dict[Tensor, int] = {}
        self._made: dict[Tensor, int] = {}

    def hook(self, parameter: Tensor) -> Callable[[Tensor], None]:
        """Return a hook for `parameter.register_hook`."""

        def note(gradient: Tensor) -> None:
            self._last[parameter] = gradient.data_ptr() if gradient.layout is torch.strided else 0

        return note

    def note_accumulated(self, parameter: Tensor) -> None:
        """Take note that autograd has accumulated what came in last."""
        gradient, last = parameter.grad, self._last.pop(parameter, 0)
        if gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() == last:
            self._made[parameter] = last

    def address(self, parameter: Tensor) -> int | None:
        """Return the address of the gradient that autograd has made; None: it has made none."""
        return self._made.get(parameter)

    def clear(self) -> None:
        """Forget all gradients: their reductions have ended."""
        self._last.clear()
        self._made.clear()


class Submitted(NamedTuple):
    """A gradient that was submitted.

    Attributes:
        parameter: The parameter.
        gradient: The gradient that it had then.
        version: Count of writes to that gradient by then; None: it counts writes to other tensors as well.
        values: A copy of its values, where its version is None.
        is_replaced: Whether another tensor, if another one is reduced, takes the place of a gradient that
            autograd has made; otherwise it is copied into the gradient.
    """

    parameter: Tensor
    gradient: Tensor
    version: int | None
    values: Tensor | None
    is_replaced: bool

    @classmethod
    def of(
        cls, parameter: Tensor, incoming: int | None, is_dense: bool, is_shared: bool = False
    ) -> tuple[Submitted, Tensor]:
        """Return what is to be remembered of a parameter's gradient, and the tensor to be reduced.

        That tensor is the gradient itself only if no other tensor has the gradient's memory.

        Args:
            parameter: The parameter, which has a gradient.
            incoming: The address of the gradient, if autograd has made it.
            is_dense: Whether a sparse gradient is reduced as a dense tensor.
            is_shared: Whether another parameter's gradient is known to have some of its memory.
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            values = gradient.to_dense() if is_dense else gradient
            return cls(parameter, gradient, version(gradient), None, False), values
        is_replaced = is_replaceable(gradient, incoming)
        if is_reducible_in_place(gradient) and not is_shared:
            return cls(parameter, gradient, version(gradient), None, is_replaced), gradient.contiguous()
        values = _copy_of(gradient)
        return cls(parameter, gradient, None, values.clone(), is_replaced), values

    def is_reduced_in_place(self) -> bool:
        """Whether the reduction may write to the gradient: no copy of it was made."""
        return self.values is None and self.gradient.layout is torch.strided

    def is_changed(self) -> bool:
        """Whether the parameter has another gradient by now, or the program has written to it."""
        if self.parameter.grad is not self.gradient:
            return True
        if self.values is None:
            return version(self.gradient) != self.version
        # As bytes: a gradient that is not a number is equal to itself.
        return not torch.equal(_bytes_of(_copy_of(self.gradient)), _bytes_of(self.values))

    def publish(self, result: Tensor) -> None:
        """Show the reduced gradient to the program: a sparse one, if it has given a sparse one."""
        if result is self.gradient:
            return
        if self.gradient.is_sparse and not result.is_sparse:
            result = result.to_sparse(self.gradient.sparse_dim())
        if self.is_replaced:
            self.parameter.grad = result
        else:
            with torch.no_grad():
                self.gradient.copy_(result)


def sharing(parameters: Sequence[Tensor]) -> set[Tensor]:
    """Return the parameters whose gradients have memory in common: one tensor, or memory of another library,
    which a count of the users of a tensor's memory does not tell."""
    ranges = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            steps = zip(gradient.shape, gradient.stride(), strict=True)
            extent = 1 + sum((length - 1) * step for length, step in steps)
            begin = gradient.data_ptr()
            ranges.append((begin, begin + extent * gradient.element_size(), parameter))
    ranges.sort(key=lambda each: each[:2])
    found: set[Tensor] = set()
    last: tuple[int, Tensor] | None = None  # the range that ends last, of those before
    for begin, end, parameter in ranges:
        if last is not None and begin < last[0]:
            found |= {parameter, last[1]}
        if last is None or end > last[0]:
            last = end, parameter
    return found


def _copy_of(gradient: Tensor) -> Tensor:
    copy = torch.empty_like(gradient, memory_format=torch.contiguous_format, requires_grad=False)
    return copy.copy_(gradient.detach())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _is_scaler_stepping() -> bool:
    """Whether GradScaler.step is under way, which divides gradients without a count of these writes."""
    frame = sys._getframe(1)
    code = getattr(getattr(torch.amp.GradScaler, "_maybe_opt_step", None), "__code__", None)
    for _ in range(_MAX_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False


def check_unchanged(
    submitted: Sequence[Submitted], names: dict[Tensor, str], process_set: ProcessSet
) -> None:
    """Raise RuntimeError, here and on all other ranks of the set, if the program has changed gradients while
    they were reduced."""
    changed = next((each for each in submitted if each.is_changed()), None)
    if changed is None and submitted and _is_scaler_stepping():
        changed = submitted[0]
    if changed is None:
        return
    operations = process_set.operations()
    text = (
        f"the gradient of '{names.get(changed.parameter, '')}' was changed or replaced after backward(), "
        "while it was reduced: call optimizer.synchronize() before clipping, GradScaler.unscale_() or other "
        "changes, and then step() within optimizer.skip_synchronize()"
    )
    operations.abort(text)
    raise RuntimeError(f"rank {operations.rank}: {text}")
