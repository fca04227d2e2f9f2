"""The buffers of a model (running statistics, counters), made the same on all ranks after a reduction."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.errors import MismatchError
from multiring.gradients.bucketing import first_and_more
from multiring.gradients.model_check import check_same
from multiring.torch.buffers import check_writable, has_same_bytes, is_reducible
from multiring.torch.copies import NO_HOOK
from multiring.torch.placement import version
from multiring.torch.state import plain_name
from multiring.torch.sync_batchnorm import SyncBatchNorm
from multiring.types import BufferMode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_module_registration_hook

if TYPE_CHECKING:
    from multiring import Communicator, Work

__all__ = ["ModelBuffers"]

Tensor = torch.Tensor
_Form = tuple[str, torch.Size, torch.dtype]


class ModelBuffers:
    """Packs the buffers into one message, and one per dtype that is averaged. Creation compares them over the
    ranks; collective.

    Modules are referred to weakly, as all of the model from its hooks.
    """

    def __init__(self, module: torch.nn.Module, comm: Communicator, mode: BufferMode) -> None:
        self._mode, self._rank = mode, comm.rank
        self._module, self._comm = weakref.ref(module), comm
        self._find_modules()
        self._postponed: list[_Postponed] = []
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._works: list[Work] = []
        self._changed = ""
        self._take_layout([(name, tensor.shape, tensor.dtype) for name, tensor, _ in self._find()])
        forms = [(name, f"{dtype} {tuple(shape)}") for name, shape, dtype in self._forms]
        check_same(comm, forms, "buffers of the model", advice=_ADVICE)

    def begin(self, comm: Communicator, active: NDArray[np.bool_]) -> None:
        """Send this rank's buffers, and do not wait. Collective.

        Args:
            comm: Ranks that train together, and no traffic between them in another order.
            active: Per rank, whether it has data and its buffers count.
        """
        self._take_postponed()  # they come again
        if self._seen != _registrations:
            self._find_modules()
        found = self._find()
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor, _ in found]
        self._changed = ""
        if forms != self._forms:
            self._note_changes(forms)
            self._take_layout(forms)
        if not forms:
            return
        root = int(np.argmax(active))
        averages = [(key, memory) for key, memory in self._memory.items() if key is not None]
        if self._rank == root or (averages and active[self._rank]):
            with torch.no_grad():
                torch._foreach_copy_(self._views, [tensor for _, tensor, _ in found])
        elif averages:
            for _, memory in averages:
                memory.zero_()
        self._is_source = self._rank == root and not averages
        name = f"buffers: {first_and_more([form[0] for form in forms])}"
        for dtype, memory in averages:
            part = memory.view(dtype)
            part = torch.view_as_real(part).reshape(-1) if part.is_complex() else part
            factor = 1 / float(active.sum())
            self._works.append(comm.allreduce_async(part, out=part, name=name, postscale=factor))
        if (packed := self._memory.get(None)) is not None:
            self._works.append(comm.broadcast_async(packed, root, out=packed, name=name))

    def end(self) -> None:
        """Wait, and take over what all ranks are to have.

        Raises:
            MismatchError: The ranks have buffers of different shapes.
        """
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except MismatchError as error:
            here = self._changed or "no buffer has changed"
            raise MismatchError(
                f"{error}; the ranks have buffers of different shapes: on rank {self._rank} {here}. "
                f"{_ADVICE.capitalize()}",
                rank=self._rank,
                operation="buffers of the model",
            ) from error
        if not works or self._is_source:
            return
        # Torch itself writes running statistics unseen by autograd, which has them for the gradients of an
        # earlier forward pass but does not use them. What else changes is seen, and an error if it is used:
        # it waits where another backward pass through the same graph may come. What is the same is left
        # alone: autograd may have saved a constant.
        targets, values = [], []
        is_kept = _keeps_graph()
        for (name, tensor, is_statistic), value in zip(self._find(), self._views, strict=True):
            if is_statistic and not tensor.is_inference():
                targets.append(tensor.data)
            elif not has_same_bytes(tensor, value):
                check_writable(self._rank, f"buffer '{name}'", tensor)
                if is_kept:
                    self._postponed.append(_Postponed(tensor, version(tensor), value.clone()))
                    continue
                targets.append(tensor)
            else:
                continue
            values.append(value)
        _write(targets, values)
        module = self._module()
        if self._postponed and module is not None:
            # Only now: torch.compile may not see what it is.
            self._handle = module.register_forward_pre_hook(_BeforeForward(weakref.ref(self)))

    def write_postponed(self) -> None:
        """Write what a graph that was kept might have needed, but for what the program has written since."""
        due = [entry for entry in self._take_postponed() if version(entry.tensor) == entry.version]
        _write([entry.tensor for entry in due], [entry.value for entry in due])

    def _take_postponed(self) -> list[_Postponed]:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        postponed, self._postponed = self._postponed, []
        return postponed

    def value(self, tensor: Tensor) -> Tensor:
        """What a buffer is, or will be before the next forward pass."""
        return next((entry.value for entry in self._postponed if entry.tensor is tensor), tensor)

    def _find_modules(self) -> None:
        """The modules whose buffers are made the same, which may be more than before."""
        self._seen = _registrations
        module = self._module()
        self._modules = [
            (plain_name(name), weakref.ref(part))
            for name, part in (() if module is None else module.named_modules())
            # Of these every rank computes the same bits.
            if not (isinstance(part, SyncBatchNorm) and part.normalises_over(self._comm))
        ]

    def _find(self) -> list[tuple[str, Tensor, bool]]:
        """Name, tensor, and whether it is a running statistic; each tensor once."""
        found, seen = [], set()
        for name, ref in self._modules:
            part = ref()
            for key, tensor in {} if part is None else part._buffers.items():
                if tensor is None or id(tensor) in seen or not _has_values(tensor):
                    continue
                seen.add(id(tensor))
                found.append((f"{name}.{key}" if name else key, tensor, isinstance(part, _NormBase)))
        return found

    def _note_changes(self, forms: list[_Form]) -> None:
        before = {name: shape for name, shape, _ in self._forms}
        self._changed = ", ".join(
            f"'{name}' is {tuple(shape)}" + (f", was {tuple(before[name])}" if name in before else ", is new")
            for name, shape, _ in forms
            if before.get(name) != shape
        )

    def _take_layout(self, forms: list[_Form]) -> None:
        """Allocate memory for the messages: by dtype what is averaged, by None what is broadcast."""
        self._forms = forms
        sizes: dict[torch.dtype | None, int] = {}
        places = []
        for _, shape, dtype in forms:
            key = dtype if self._mode == "average" and is_reducible(dtype) else None
            start, nbytes = sizes.get(key, 0), shape.numel() * dtype.itemsize
            sizes[key] = start + -(-nbytes // 16) * 16  # so that each lies where its dtype may lie
            places.append((key, start, start + nbytes))
        self._memory = {key: torch.zeros(size, dtype=torch.uint8) for key, size in sizes.items()}
        self._views = [
            self._memory[key][start:end].view(dtype).view(shape)
            for (key, start, end), (_, shape, dtype) in zip(places, forms, strict=True)
        ]


class _Postponed(NamedTuple):
    """A buffer that takes over its value before the next forward pass."""

    tensor: Tensor
    version: int
    value: Tensor


class _BeforeForward:
    """Hook of a model with postponed buffers. A copy of the model has none."""

    def __init__(self, buffers: weakref.ref[ModelBuffers]) -> None:
        self._buffers = buffers

    def __call__(self, *_: object) -> None:
        if (buffers := self._buffers()) is not None:
            buffers.write_postponed()

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_HOOK


def _write(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        # This mode also writes to tensors that were made in it.
        with torch.inference_mode():
            torch._foreach_copy_(targets, values)


def _keeps_graph() -> bool:
    """Whether a backward pass is under way whose graph remains, for another one."""
    if torch._C._current_graph_task_id() == -1:
        return False
    # Private; without it buffers are written at once.
    keeps: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and keeps()


# Grows whenever any module gets another one.
_registrations = 0


def _note_registration(*_: object) -> None:
    global _registrations
    _registrations += 1


register_module_module_registration_hook(_note_registration)

_ADVICE = 'give buffers the same shapes on every rank, or pass buffers="local"'


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor)
