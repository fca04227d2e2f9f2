"""Slots of the shared gradient machinery as tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.arrays import bytes_of
from multiring.arrays import checksum as bytes_checksum
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec

__all__ = [
    "as_array",
    "as_tensor",
    "byte_view",
    "check_writable",
    "checksum",
    "dense_strides",
    "has_same_bytes",
    "has_values",
    "is_reducible",
    "overlaps_itself",
    "parts_of",
    "specification",
]

_REAL = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_COMPLEX = {torch.complex64: "float32", torch.complex128: "float64"}
_TORCH = {name: dtype for dtype, name in _REAL.items()}


def specification(name: str, parameter: torch.Tensor, sparse: bool) -> ParameterSpec:
    """What the ranks have to agree on for a parameter.

    Complex numbers are reduced as pairs of reals.

    Raises:
        UsageError: The parameter is lazy, on neither the CPU nor a CUDA device, or of a dtype that cannot be
            reduced.
    """
    if torch.nn.parameter.is_lazy(parameter):
        raise UsageError(
            f"parameter '{name}' is lazy and has no shape yet; run a batch through the model first"
        )
    if hasattr(parameter, "device_mesh"):
        raise UsageError(
            f"parameter '{name}' is a DTensor, split over ranks as by fully_shard(), which reduces gradients "
            "itself; leave that out, or multiring's hooks"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"parameter '{name}' is on device {parameter.device}; gradients are reduced on the CPU and CUDA "
            "devices only: move the model there before registering it"
        )
    if sparse and parameter.device.type != "cpu":
        raise UsageError(
            f"parameter '{name}' is on device {parameter.device}, and its gradients are sparse; those are "
            "reduced on the CPU only: make them dense (sparse=False), or move the model to the CPU"
        )
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if dtype in _COMPLEX:
        return ParameterSpec(name, (*shape, 2), _COMPLEX[dtype], _layout(parameter), sparse)
    if dtype not in _REAL:
        raise UsageError(f"parameter '{name}' has dtype {dtype}, whose gradients cannot be reduced")
    return ParameterSpec(name, shape, _REAL[dtype], _layout(parameter), sparse)


def is_reducible(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be averaged."""
    return dtype in _REAL or dtype in _COMPLEX


def as_tensor(data: NDArray[np.uint8], dtype: str) -> torch.Tensor:
    """Bytes as a flat tensor, for the reduction; shares the memory."""
    return torch.from_numpy(data).view(_TORCH[dtype])


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor, as bytes where NumPy has no such dtype."""
    tensor = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    data, dtype = byte_view(tensor), _numpy_dtype(tensor.dtype)
    return data if dtype is None else data.view(dtype).reshape(tuple(tensor.shape))


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return NumPy's dtype of the same elements; None: there is none."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a tensor is made of, by names: of one of Torch's own the tensor itself, of a
    derived class, such as that of quantised weights, those that it names (`__tensor_flatten__`).

    A DTensor has a part on each rank, and is yielded as it is.
    """
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from parts_of(f"{name}.{attribute}", getattr(tensor, attribute))


def byte_view(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous CPU tensor of any dtype as bytes, shape (nbytes,).

    Raises:
        UsageError: It does not hold the elements: its storage was given back, or the tensor has none.
    """
    return bytes_of(tensor.detach().reshape(-1).view(torch.uint8))


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there are elements in memory, one beside the other or with gaps."""
    return tensor.layout is torch.strided and not tensor.is_meta and not torch.nn.parameter.is_lazy(tensor)


def has_same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape and dtype have the same bits: NaN equals NaN, 0.0 is not -0.0."""
    one, two = (
        torch.from_numpy(byte_view(t.detach().cpu().resolve_conj().resolve_neg().contiguous()))
        for t in (tensor, other)
    )
    return torch.equal(one, two)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do: it cannot be written to."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > extent


def check_writable(rank: int, what: str, tensor: torch.Tensor) -> None:
    """Raise UsageError if the values of another rank cannot be written to the tensor."""
    if overlaps_itself(tensor):
        raise UsageError(
            f"rank {rank}: {what} has other values than on the rank whose values all take over, and they "
            f"cannot be written to it: its elements share memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), as those of expand() do; make it by expand(...).clone(), or give it the "
            "same values on every rank",
            rank=rank,
            tensor=what,
        )


def checksum(tensor: torch.Tensor) -> int:
    """Of the elements in row-major order, dense or sparse."""
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().to_dense()
    return bytes_checksum(byte_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))


def _layout(parameter: torch.Tensor) -> str:
    strides = dense_strides(parameter)
    complex_ = "complex " if parameter.dtype in _COMPLEX else ""
    return complex_ + ("" if parameter.is_contiguous() else f"strides {strides}")


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if they leave no holes (autograd makes gradients so), else row-major ones."""
    shape = tuple(tensor.shape)
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), shape, strict=True)):
        if length != 1 and stride != expected:
            return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        expected *= length
    return tuple(tensor.stride())
