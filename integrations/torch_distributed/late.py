"""Tensors that are copied where the core does not see it: before an operation, or after it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from multiring.torch_distributed import DEVICES
from multiring.torch_distributed.tensors import span_of

__all__ = ["LateResults", "parts_of"]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the memory of a tensor as flat tensors: one, or a sparse tensor's indices and values."""
    if tensor.device.type not in DEVICES:
        return []  # refused where it is used
    if tensor.layout is torch.strided:
        return [span_of(tensor)] if tensor.data_ptr() else []
    if tensor.layout is torch.sparse_coo:
        return [span_of(tensor._indices()), span_of(tensor._values())]
    return []


class _Late(NamedTuple):
    """An operation whose results are copied when it is waited for."""

    ranges: list[tuple[int, int]]
    wait: Callable[[], object]
    has_ended: Callable[[], bool]


class LateResults:
    """The operations whose results are copied into tensors when they are waited for.

    An operation that comes after one of them and uses its tensors has to wait for it first.
    """

    def __init__(self) -> None:
        self._pending: list[_Late] = []

    def add(
        self, tensors: Iterable[torch.Tensor], wait: Callable[[], object], has_ended: Callable[[], bool]
    ) -> None:
        """Add an operation that writes to these tensors in `wait`."""
        self._pending.append(_Late(_ranges(tensors), wait, has_ended))

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait for the operations that write to the memory of these tensors.

        Raises:
            What the wait for one of them raises.
        """
        if not self._pending:
            return
        self._pending = [late for late in self._pending if not late.has_ended()]
        used = _ranges(tensors)
        for late in self._pending:
            if any(b < end and begin < e for b, e in late.ranges for begin, end in used):
                late.wait()

    def settle_all(self) -> None:
        """Wait for all operations.

        Raises:
            What the wait for one of them raises.
        """
        pending, self._pending = self._pending, []
        for late in pending:
            late.wait()

    def clear(self) -> None:
        """Forget all of them."""
        self._pending.clear()


def _ranges(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the addresses from which, and before which, the elements of tensors lie; of sparse tensors also
    those of the tensors themselves, which get other entries, and may have none."""
    tensors = list(tensors)
    parts = [part for tensor in tensors for part in parts_of(tensor)]
    ranges = [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts if part.numel()]
    sparse = [tensor for tensor in tensors if tensor.layout is torch.sparse_coo]
    # Torch passes complex numbers as a view, a new tensor each time.
    owners = [tensor if tensor._base is None else tensor._base for tensor in sparse]
    return ranges + [(owner._cdata, owner._cdata + 1) for owner in owners]
