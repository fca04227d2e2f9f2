"""What ranks have in common beside gradients: buffers are made the same, and all of it is compared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from multiring.errors import UsageError
from multiring.gradients.model_check import check_same
from multiring.gradients.options import ReducerOptions
from multiring.gradients.source import RoundResult
from multiring.state.buffer_sync import check_mode
from multiring.state.check import Description, StateCheck, compare_state
from multiring.torch.buffers import as_array, has_values, parts_of
from multiring.torch.copies import is_hooked
from multiring.torch.hyperparameters import hyperparameters
from multiring.torch.model_buffers import ModelBuffers
from multiring.torch.model_gradients import ModelGradients
from multiring.torch.state_broadcast import plain_name
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["ModelState"]

Tensor = torch.Tensor
Entries = Iterator[tuple[str, object]]


class ModelState:
    """What happens when gradients have been reduced: every rank is at the same step then.

    A program with several models takes each step with all before it takes the next with one.
    """

    def __init__(
        self,
        comm: Communicator,
        gradients: ModelGradients,
        options: ReducerOptions,
        mode: BufferMode,
        module: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Compare buffers and options over ranks. Collective.

        Args:
            comm: Ranks that train together.
            gradients: Those of the parameters.
            options: How often to compare.
            mode: What happens to buffers.
            module: The model.
            optimizer: Its optimizer, if that is known.
        """
        check_mode(comm.rank, mode)
        check_same(comm, [("buffers", mode)], "options of the gradient hooks")
        # Weak, as all references to the model from here; see `ModelGradients`.
        self._module = None if module is None else weakref.ref(module)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._rank, self._gradients = comm.rank, gradients
        self._buffers = (
            None if module is None or mode == "local" else ModelBuffers(module, gradients.hold, comm, mode)
        )
        self._check = StateCheck(_own(gradients), options.check_every, "training state of the model")
        self._active = self._is_due = False
        self._finish: Callable[[], None] | None = None
        self._unhooked: tuple[str, ...] = ()
        self._noted: list[tuple[str, Description]] | None = None

    def begin(self, result: RoundResult) -> None:
        """A round has ended with this result: send buffers. Collective."""
        if not result.active.any():
            return
        own, self._active = _own(self._gradients), bool(result.active[self._rank])
        if self._buffers is not None:
            self._buffers.begin(own, result.active)
        self._check.go_on(own)
        self._is_due = self._check.due()

    def note_step(self, is_common: bool) -> None:
        """The optimizer has stepped.

        Where the next round compares, it compares the parameters as they are now: a program may perturb
        them on each rank on its own during backward (SAM, adversarial weights).

        Args:
            is_common: All ranks have made this step, with reduced gradients.
        """
        self._noted = self._check.describe_for_next(self._parameters()) if is_common else None

    def remove(self) -> None:
        """No more reductions will come. May be called twice."""
        if self._buffers is not None:
            self._buffers.close()

    def begin_handover(self) -> None:
        """Ranks are about to take over parameters and buffers."""
        self._noted = None
        if self._buffers is not None:
            self._buffers.write()

    def take_over(self) -> None:
        """Wait for buffers, and send checksums where that is due."""
        if self._buffers is not None:
            self._buffers.end()
        if self._is_due:
            self._is_due = False
            self._finish = self._check.begin(self._entries(), active=self._active)
        self._noted = None

    def compare(self) -> None:
        """Wait for the checksums.

        Raises:
            MismatchError: The ranks differ.
            UsageError: There are parameters whose gradients are not reduced.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            return
        finish()
        if self._unhooked:
            raise UsageError(
                f"rank {self._rank}: gradients of parameter '{self._unhooked[0]}' are not reduced: it was "
                "not part of the model when gradient hooks were registered; remove() them and register them "
                "again after a change of the model",
                rank=self._rank,
                tensor=self._unhooked[0],
            )

    def compare_now(self) -> None:
        """Compare in no step. Collective.

        Raises:
            MismatchError: The ranks differ.
        """
        noted, self._noted = self._noted, None  # parameters as they are now
        try:
            compare_state(_own(self._gradients), self._entries(), "this call of check_state()")
        finally:
            self._noted = noted

    def _entries(self) -> Entries:
        self._unhooked = tuple(self._find_unhooked())
        yield "parameters without gradient hooks", self._unhooked
        yield from self._parameters() if self._noted is None else self._noted
        if self._optimizer is not None and (optimizer := self._optimizer()) is not None:
            yield from hyperparameters(optimizer)
        module = None if self._module is None else self._module()
        buffers = self._buffers
        for name, buffer in [] if module is None or buffers is None else module.named_buffers():
            for part_name, part in parts_of(plain_name(name), buffer):
                if buffers is not None and has_values(part):
                    yield f"buffer {part_name}", as_array(buffers.value(part))

    def _parameters(self) -> Entries:
        """Those with hooks, and what is frozen in the model."""
        hooked = self._gradients.named()
        for name, parameter in hooked.items():
            yield from _values_of(name, parameter)
        known = {id(parameter) for parameter in hooked.values()}
        module = None if self._module is None else self._module()
        for name, parameter in [] if module is None else module.named_parameters():
            if id(parameter) not in known and not parameter.requires_grad:
                yield from _values_of(plain_name(name), parameter)

    def _find_unhooked(self) -> Iterator[str]:
        """Names of the parameters that are trained and have no hooks."""
        module = None if self._module is None else self._module()
        if self._optimizer is not None:
            optimizer = self._optimizer()
            groups = [] if optimizer is None else optimizer.param_groups
            names = {} if module is None else {id(p): plain_name(n) for n, p in module.named_parameters()}
            for number, group in enumerate(groups):
                for k, parameter in enumerate(group["params"]):
                    if parameter.requires_grad and not is_hooked(parameter):
                        yield names.get(id(parameter), f"group{number}.parameter{k}")
        elif module is not None:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and not is_hooked(parameter):
                    yield plain_name(name)


def _own(gradients: ModelGradients) -> Communicator:
    comm = gradients.reducer.comm
    assert comm is not None  # there are several ranks
    return comm


def _values_of(name: str, parameter: Tensor) -> Entries:
    """Yield the values of a parameter, or of the tensors that it is made of."""
    for part_name, part in parts_of(name, parameter):
        if has_values(part):
            yield f"parameter {part_name}", as_array(part)
