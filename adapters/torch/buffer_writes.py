"""Values that buffers take over before they are used again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from multiring.torch.buffers import has_same_bytes
from multiring.torch.copies import NO_HOOK
from multiring.torch.counts import has_own_memory, is_held_by_graph, version
from multiring.torch.placement import Parameters
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["BufferWrites", "PendingWrite"]

Tensor = torch.Tensor


class PendingWrite(NamedTuple):
    """A buffer and what it is to take over."""

    owner: weakref.ref[torch.nn.Module]
    tensor: Tensor
    is_statistic: bool  # which the owner's forward pass writes to in training, unseen by autograd
    version: int
    value: Tensor
    before: Tensor | None = None  # a copy of a buffer whose count of writes is that of other tensors, too

    def is_written(self) -> bool:
        """Return whether the program has written to the buffer since."""
        if version(self.tensor) == self.version:
            return False
        return self.before is None or not has_same_bytes(self.tensor, self.before)


class BufferWrites:
    """Writes to buffers: at once where no graph refers to them, else as late as possible, which is before the
    next forward pass of the model or a part of it, after a step of an optimizer with parameters of the model,
    and in `state_dict()`.

    Another backward pass may come over the graph of an earlier forward pass, and autograd has not copied the
    buffers that it needs. `DistributedDataParallel` writes before a forward pass, for the same reason.
    """

    def __init__(self, parameters: Callable[[], Parameters]) -> None:
        self._parameters = parameters
        self._parts: set[int] = set()  # identities of modules
        self._pending: list[PendingWrite] = []
        self._savers: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, parts: Iterable[torch.nn.Module]) -> None:
        """From now on these are the modules of the model."""
        self.close()
        hook = _BeforeSaving(weakref.ref(self))
        for part in parts:
            self._parts.add(id(part))
            if part._buffers:
                # One that removes itself would change what `state_dict()` is iterating over.
                self._savers.append(part.register_state_dict_pre_hook(hook))

    def close(self) -> None:
        """Watch none. May be called twice."""
        self._parts = set()
        savers, self._savers = self._savers, []
        for handle in savers:
            handle.remove()

    def put(self, writes: list[PendingWrite]) -> None:
        """Write these, and forget those that are pending."""
        held = [is_held_by_graph(entry.tensor) for entry in writes]
        _write([entry for entry, wait in zip(writes, held, strict=True) if not wait])
        self._pending = [
            entry if has_own_memory(entry.tensor) else entry._replace(before=entry.tensor.detach().clone())
            for entry, wait in zip(writes, held, strict=True)
            if wait
        ]
        if self._pending:
            _wait(self)
        else:
            _forget(self)

    def value(self, tensor: Tensor) -> Tensor:
        """What a buffer is, or will be before it is used."""
        return next((entry.value for entry in self._pending if entry.tensor is tensor), tensor)

    def write(self) -> None:
        """Write what is pending, but to buffers that the program has written to since."""
        pending = self._pending
        self.put([])
        _write([entry for entry in pending if not entry.is_written()])

    def before_forward(self, module: torch.nn.Module) -> None:
        """Any module is about to be called."""
        if id(getattr(module, "_orig_mod", module)) in self._parts:  # that of torch.compile
            self.write()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer has stepped."""
        own = {id(parameter) for parameter in self._parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self.write()


def _write(entries: list[PendingWrite]) -> None:
    pairs = [(target, entry.value) for entry in entries if (target := _target(entry)) is not None]
    if pairs:
        # This mode also writes to tensors that were made in it.
        with torch.inference_mode():
            torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])


def _target(entry: PendingWrite) -> Tensor | None:
    """What to write to, if anything.

    In training a graph refers to running statistics and does not use them: its next forward pass writes to
    them unseen by autograd, and so may this. What else changes autograd is to see, as an error if a graph
    needs it after all.
    """
    owner, tensor = entry.owner(), entry.tensor
    if entry.is_statistic and not tensor.is_inference():
        if owner is not None and owner.training:
            return tensor.data
        return None if has_same_bytes(tensor, entry.value) else tensor
    return tensor


class _BeforeSaving:
    """Hook of a module with buffers. A copy of the model has none."""

    def __init__(self, writes: weakref.ref[BufferWrites]) -> None:
        self._writes = writes

    def __call__(self, *_: object) -> None:
        if (writes := self._writes()) is not None:
            writes.write()

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_HOOK


# Those with something pending. The hook of optimizers stays once it is there; that of modules, which costs a
# call for each module and which torch.compile sees, is there only while something is pending.
_waiting: weakref.WeakSet[BufferWrites] = weakref.WeakSet()
_after_step: torch.utils.hooks.RemovableHandle | None = None
_before_forward: torch.utils.hooks.RemovableHandle | None = None


def _wait(writes: BufferWrites) -> None:
    global _after_step, _before_forward
    _waiting.add(writes)
    if _after_step is None:
        _after_step = register_optimizer_step_post_hook(_tell_of_step)
    if _before_forward is None:
        _before_forward = register_module_forward_pre_hook(_tell_of_forward)


def _forget(writes: BufferWrites) -> None:
    global _before_forward
    _waiting.discard(writes)
    if _before_forward is not None and not _waiting:
        _before_forward.remove()
        _before_forward = None


def _tell_of_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for writes in list(_waiting):
        writes.after_step(optimizer)


def _tell_of_forward(module: torch.nn.Module, *_: object) -> None:
    for writes in list(_waiting):
        writes.before_forward(module)
