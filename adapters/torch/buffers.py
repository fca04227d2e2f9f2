"""Slots of the shared gradient machinery as tensors."""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

import torch
from multiring.bucketing import ParameterSpec
from multiring.errors import UsageError

__all__ = ["as_tensor", "byte_view", "checksum", "dense_strides", "is_reducible", "specification"]

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
        UsageError: The parameter is lazy, not on the CPU, or of a dtype that cannot be reduced.
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
    if parameter.device.type != "cpu":
        raise UsageError(
            f"parameter '{name}' is on device {parameter.device}; gradients are reduced on the CPU only: "
            "move the model there before registering it"
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


def byte_view(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Memory of a contiguous CPU tensor of any dtype as bytes. Shape (nbytes,)."""
    data: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return data


def checksum(tensor: torch.Tensor) -> int:
    """Of the elements in row-major order, dense or sparse."""
    if tensor.layout is not torch.strided:
        tensor = tensor.detach().to_dense()
    return zlib.crc32(byte_view(tensor.resolve_conj().resolve_neg().contiguous()).data)


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
