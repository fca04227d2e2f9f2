"""The buffers of a model (running statistics, counters), made the same on all ranks after a reduction."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.errors import MismatchError
from multiring.gradients.bucketing import first_and_more
from multiring.gradients.model_check import check_same
from multiring.torch.buffer_writes import BufferWrites, PendingWrite
from multiring.torch.buffers import check_writable, has_same_bytes, has_values, is_reducible, parts_of
from multiring.torch.counts import version
from multiring.torch.placement import Parameters
from multiring.torch.state_broadcast import plain_name
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

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Callable[[], Parameters],
        comm: Communicator,
        mode: BufferMode,
    ) -> None:
        self._mode, self._rank = mode, comm.rank
        self._module, self._comm = weakref.ref(module), comm
        self._writes = BufferWrites(parameters)
        self._find_modules()
        self._works: list[Work] = []
        self._changed = ""
        self._take_layout(self._find())
        forms = [(name, f"{dtype} {tuple(shape)}") for name, shape, dtype in self._forms]
        check_same(comm, forms, "buffers of the model", advice=_ADVICE)

    def begin(self, comm: Communicator, active: NDArray[np.bool_]) -> None:
        """Send this rank's buffers, and do not wait. Collective.

        Args:
            comm: Ranks that train together, and no traffic between them in another order.
            active: Per rank, whether it has data and its buffers count.
        """
        self._writes.put([])  # they come again
        if self._seen != _registrations:
            self._find_modules()
        found = self._find()
        forms = [buffer.form for buffer in found]
        self._changed = ""
        if forms != self._forms:
            self._note_changes(forms)
            self._take_layout(found)
        if not forms:
            return
        root = int(np.argmax(active))
        averages = [(key, memory) for key, memory in self._memory.items() if key is not None]
        if self._rank == root or (averages and active[self._rank]):
            with torch.no_grad():
                torch._foreach_copy_(self._views, [buffer.tensor for buffer in found])
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
        """Wait for what all ranks are to have; buffers take it over before they are used again.

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
        writes = []
        for (name, tensor, owner, is_statistic), value in zip(self._find(), self._views, strict=True):
            if not (is_statistic and owner.training):  # which differ on all ranks
                # What is the same is left alone: autograd may have saved a constant.
                if has_same_bytes(tensor, value):
                    continue
                check_writable(self._rank, f"buffer '{name}'", tensor)
            writes.append(PendingWrite(weakref.ref(owner), tensor, is_statistic, version(tensor), value))
        self._writes.put(writes)

    def write(self) -> None:
        """Write what the buffers are still to take over."""
        self._writes.write()

    def value(self, tensor: Tensor) -> Tensor:
        """What a buffer is, or will be before it is used."""
        return self._writes.value(tensor)

    def close(self) -> None:
        """Write what is pending; no more reductions will come. May be called twice."""
        self._writes.write()
        self._writes.close()

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
        self._writes.watch(() if module is None else module.modules())

    def _find(self) -> list[_Buffer]:
        """Each tensor once."""
        found, seen = [], set()
        for name, ref in self._modules:
            part = ref()
            named = [] if part is None else [pair for pair in part._buffers.items() if pair[1] is not None]
            for key, tensor in (each for pair in named for each in parts_of(*pair)):
                if part is None or id(tensor) in seen or not has_values(tensor):
                    continue
                seen.add(id(tensor))
                is_statistic = isinstance(part, _NormBase) and key in _STATISTICS
                found.append(_Buffer(f"{name}.{key}" if name else key, tensor, part, is_statistic))
        return found

    def _note_changes(self, forms: list[_Form]) -> None:
        before = {name: shape for name, shape, _ in self._forms}
        self._changed = ", ".join(
            f"'{name}' is {tuple(shape)}" + (f", was {tuple(before[name])}" if name in before else ", is new")
            for name, shape, _ in forms
            if before.get(name) != shape
        )

    def _take_layout(self, found: list[_Buffer]) -> None:
        """Allocate memory for the messages: by dtype what is averaged, by None what is broadcast, as are
        buffers that share memory with one that cannot be averaged."""
        self._forms = forms = [buffer.form for buffer in found]
        sizes: dict[torch.dtype | None, int] = {}
        ranges = []
        whole = {b.storage for b in found if not (self._mode == "average" and is_reducible(b.tensor.dtype))}
        for buffer in found:
            _, shape, dtype = buffer.form
            key = None if buffer.storage in whole else dtype
            start, nbytes = sizes.get(key, 0), shape.numel() * dtype.itemsize
            sizes[key] = start + -(-nbytes // 16) * 16  # so that each lies where its dtype may lie
            ranges.append((key, start, start + nbytes))
        self._memory = {
            key: torch.zeros(size, dtype=torch.uint8, device="cpu") for key, size in sizes.items()
        }
        self._views = [
            self._memory[key][start:end].view(dtype).view(shape)
            for (key, start, end), (_, shape, dtype) in zip(ranges, forms, strict=True)
        ]


class _Buffer(NamedTuple):
    """A buffer of the model, for the time of a reduction."""

    name: str
    tensor: Tensor
    owner: torch.nn.Module
    is_statistic: bool

    @property
    def form(self) -> _Form:
        return self.name, self.tensor.shape, self.tensor.dtype

    @property
    def storage(self) -> int:
        """The address of the memory that the tensor is in, or is a part of."""
        return self.tensor.untyped_storage().data_ptr()


# What normalisation in training writes to, unseen by autograd.
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

# Grows whenever any module gets another one.
_registrations = 0


def _note_registration(*_: object) -> None:
    global _registrations
    _registrations += 1


register_module_module_registration_hook(_note_registration)

_ADVICE = 'give buffers the same shapes on every rank, or pass buffers="local"'
