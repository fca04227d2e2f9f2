"""Tensors as the arrays that the core takes: plain memory, where possible without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from multiring.arrays import arrived, require_memory
from multiring.errors import UsageError
from multiring.torch_distributed import DEVICES

__all__ = [
    "as_numbers",
    "as_payload",
    "copy_apart",
    "is_copied_at_once",
    "is_copied_here",
    "joined",
    "name_of_bytes",
    "only_cuda_device",
    "require_apart",
    "require_count",
    "resolved",
    "span_of",
]

# Those that the core computes with and moves; others are moved as bytes.
_KNOWN = {
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


def _plain(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the tensor without gradient and subclass; complex numbers as pairs of real ones."""
    tensor = arrived(tensor)
    if tensor.device.type not in DEVICES:
        raise UsageError(
            f"{what} of a tensor on {tensor.device}: the backend 'multiring' takes tensors of "
            f"{' and '.join(DEVICES)}; pass tensor.cpu(), or make the group with another backend"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        kind = "quantised" if tensor.is_quantized else layout
        raise UsageError(f"{what} of a {kind} tensor is not supported by the backend 'multiring'")
    is_derived = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    tensor = tensor.detach()
    if is_derived:
        has_known_dtype = tensor.dtype in _KNOWN or tensor.is_complex()
        require_memory(tensor if has_known_dtype else tensor.view(torch.uint8))
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_numbers(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor to compute with, over the same memory.

    Raises:
        UsageError: It is on a device of another type than `DEVICES`, not strided, or the core has no
            arithmetic for its dtype.
    """
    plain = _plain(tensor, what)
    if plain.dtype not in _KNOWN:
        raise UsageError(f"{what} of {tensor.dtype}: there is no arithmetic for this dtype; convert it first")
    return plain


def as_payload(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor to move, over the same memory; of a dtype that the core does not know, its bytes.

    Raises:
        UsageError: It is on a device of another type than `DEVICES`, or not strided.
    """
    plain = _plain(tensor, what)
    return plain if plain.dtype in _KNOWN else plain.view(torch.uint8)


def only_cuda_device(tensors: Iterable[torch.Tensor], what: str) -> torch.device | None:
    """The device of those tensors that lie on one of CUDA's; None: none does.

    Raises:
        UsageError: They lie on several.
    """
    found = {tensor.device for tensor in tensors if tensor.is_cuda}
    if len(found) > 1:
        devices = " and ".join(sorted(map(str, found)))
        raise UsageError(f"{what}: tensors on {devices}; an operation takes those of one device")
    return found.pop() if found else None


def name_of_bytes(tensor: torch.Tensor) -> str | None:
    """What to call an operation that moves a tensor as bytes, so that ranks compare its dtype all the same;
    None: the core knows the dtype, or it is complex."""
    return None if tensor.dtype in _KNOWN or tensor.is_complex() else f"bytes of {tensor.dtype}"


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy where the core cannot write to its memory: of conjugated numbers,
    and on a CUDA device of a tensor with gaps or of negatives."""
    if tensor.is_conj() or (tensor.is_cuda and tensor.is_neg()):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cuda and tensor.layout is torch.strided and not tensor.is_contiguous():
        return tensor.detach().contiguous()
    return tensor


def is_copied_at_once(tensor: torch.Tensor) -> bool:
    """Return whether an operation may read a copy of the tensor that was made when it was submitted."""
    return tensor.is_cuda or tensor.layout is not torch.strided or tensor.is_conj()


def is_copied_here(tensor: torch.Tensor) -> bool:
    """Return whether an operation uses a copy of the tensor, because the core cannot use its memory."""
    is_odd_on_device = tensor.is_cuda and (tensor.is_neg() or not tensor.is_contiguous())
    return tensor.layout is not torch.strided or tensor.is_conj() or is_odd_on_device


def span_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of a strided tensor, as a flat tensor."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.conj() if plain.is_conj() else plain)
    steps = zip(plain.shape, plain.stride(), strict=True)
    length = 1 + sum((extent - 1) * step for extent, step in steps) if plain.numel() else 0
    flat = plain.as_strided((length,), (1,))
    return flat if flat.dtype in _KNOWN else flat.view(torch.uint8)


def require_apart(tensor: torch.Tensor, what: str) -> None:
    """Raises UsageError if elements of an output share memory, as `expand` makes them."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(extent > 1 and step == 0 for extent, step in extents):
        raise UsageError(
            f"{what}: elements of the output share memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}), so it cannot hold the result; pass tensor.contiguous()"
        )


def require_count(tensors: Sequence[object], size: int, what: str) -> None:
    """Raises UsageError unless there is one tensor for each of `size` ranks."""
    if len(tensors) != size:
        raise UsageError(f"{what} needs a list of {size} tensors, one for each rank; got {len(tensors)}")


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of a dtype that lie in one piece of memory, one after the other, as one flat tensor; else
    None."""
    there = [tensor for tensor in tensors if tensor.numel()]
    if not there:
        return None
    first, total = there[0], 0
    storage = first.untyped_storage().data_ptr()
    for tensor in there:
        follows = tensor.data_ptr() == first.data_ptr() + total * first.element_size()
        is_alike = tensor.dtype == first.dtype and tensor.is_neg() == first.is_neg()
        if not (follows and is_alike and tensor.is_contiguous()):
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        total += tensor.numel()
    return first.as_strided((total,), (1,))


def copy_apart(flat: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copies the elements of a flat tensor into tensors that have as many together, in order."""
    begin = 0
    for output in outputs:
        output.copy_(flat[begin : begin + output.numel()].view(output.shape))
        begin += output.numel()
