"""What computes a net, the CPU or a GPU that Torch sees, and where its elements lie meanwhile."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from multiring.errors import UsageError

__all__ = [
    "CPU",
    "Memory",
    "chosen_device",
    "device_of_net",
    "find_device",
    "is_set",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "wait_for_device",
]

CPU = torch.device("cpu")

_is_gpu: bool | None = None  # None: nothing has been said
_ordinal: int | None = None


def set_mode_cpu() -> None:
    """Have nets and solvers that are built from now on compute on the CPU."""
    global _is_gpu
    _is_gpu = False


def set_mode_gpu() -> None:
    """Have nets and solvers that are built from now on compute on a GPU, whatever their prototxt says.

    Raises:
        UsageError: Torch sees none.
    """
    global _is_gpu
    find_device(_ordinal)
    _is_gpu = True


def set_device(ordinal: int) -> None:
    """Choose the GPU by its number, of those that this process sees; by default Torch's current one.

    Raises:
        UsageError: Torch sees no such GPU.
    """
    global _ordinal
    find_device(ordinal)
    _ordinal = ordinal


def is_set() -> bool:
    """Whether `set_device` has been called."""
    return _ordinal is not None


def chosen_device() -> torch.device | None:
    """What `set_mode_gpu` or `set_mode_cpu` have said; None: nothing."""
    if _is_gpu is None:
        return None
    return find_device(_ordinal) if _is_gpu else CPU


def device_of_net(named: str | None) -> torch.device:
    """What Torch calls so; None: what the functions above have said, or the CPU.

    Raises:
        UsageError: Torch knows or sees no such device.
    """
    if named is None:
        return chosen_device() or CPU
    try:
        device = torch.device(named)
    except RuntimeError as error:
        raise UsageError(f"device={named!r}: {error}") from None
    return find_device(device.index) if device.type == "cuda" else device


def find_device(ordinal: int | None = None) -> torch.device:
    """A GPU by its number; None: the one that `set_device` has chosen, else Torch's current one.

    Raises:
        UsageError: Torch sees no such GPU.
    """
    count = torch.cuda.device_count()
    if not count:
        raise UsageError("Torch sees no GPU; compute on the CPU (solver_mode: CPU, set_mode_cpu)")
    ordinal = _ordinal if ordinal is None else ordinal
    if ordinal is None:
        ordinal = torch.cuda.current_device()
    if not 0 <= ordinal < count:
        raise UsageError(f"there is no GPU {ordinal}: this process sees {count}, which are numbered from 0")
    return torch.device("cuda", ordinal)


def wait_for_device(device: torch.device) -> None:
    """Returns when a GPU has done what any stream of it has; on the CPU at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Memory:
    """Elements where they are computed, and on the host if they are looked at there: Caffe's SyncedMemory.

    The one that was taken last may have been written to. So the other is brought up to date when it is
    taken next, and what was taken of it before is not to be used any more, nor is one thread to look at it
    while another computes.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._host: torch.Tensor | None = None  # if it is another memory
        self._is_on_host = False  # there, and nowhere else, is what holds

    @property
    def tensor(self) -> torch.Tensor:
        """The elements where they are computed."""
        if self._is_on_host:
            assert self._host is not None
            wait_for_device(self._tensor.device)
            self._tensor.copy_(self._host)
            self._is_on_host = False
        return self._tensor

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements on the host; the same memory each time. Waits for a GPU."""
        if self._tensor.device == CPU:
            return self._tensor.numpy()
        if self._host is None:
            self._host = torch.empty_like(self._tensor, device=CPU)
        if not self._is_on_host:
            wait_for_device(self._tensor.device)
            self._host.copy_(self._tensor)
            self._is_on_host = True
        return self._host.numpy()
