"""Tensors that say they are on Torch's "meta" device and have their elements on the CPU: a net computes there
as on a GPU, and what would mix the two is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "meta"
_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default)


class Pretended(torch.Tensor):
    """A tensor on the device."""

    elements: torch.Tensor

    @staticmethod
    def __new__(cls, elements: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            *(cls, elements.shape),
            strides=elements.stride(),
            storage_offset=elements.storage_offset(),
            dtype=elements.dtype,
            device=DEVICE,
        )
        made.elements = elements
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        return _run(function, args, options or {})


class _Factories(TorchDispatchMode):
    """Has what is made on the device be a `Pretended`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        return _run(function, args, options or {})


def _run(function: Any, args: Any, options: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, options))[0] if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, Pretended)]
    # As on a GPU: a number may come from the host, elements only by a copy.
    mixed = there and any(x.dim() for x in tensors if not isinstance(x, Pretended))
    assert not mixed or function in _COPIES, f"{function} of tensors on the host and on a device"
    is_there = bool(there) if function is not _aten.copy_.default else isinstance(args[0], Pretended)
    if options.get("device") is not None:
        is_there = torch.device(options["device"]).type == DEVICE
        options = options | {"device": torch.device("cpu")}
    args, options = tree_map(lambda x: x.elements if isinstance(x, Pretended) else x, (args, options))
    result = function(*args, **options)
    return tree_map(lambda x: Pretended(x) if is_there and isinstance(x, torch.Tensor) else x, result)


@contextmanager
def pretended_device() -> Iterator[str]:
    """Context in which the device is there; its name."""
    with _Factories():
        yield DEVICE
