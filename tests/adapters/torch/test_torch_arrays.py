"""Tensors as arrays of collectives: described by DLPack's exchange API where Torch has that, and by its
methods elsewhere (subclasses, older Torch)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from multiring import Communicator, UsageError
from tests.adapters.torch.support import EXCHANGE_API, both_ways, exchange_api
from tests.on_ranks import on_ranks


class _Derived(torch.Tensor):
    """Which has another way to describe its memory, perhaps."""


def _tensors() -> dict[str, Any]:
    """Tensors whose elements are not what one would find by address and number of elements."""
    values = torch.arange(1.0, 7.0)
    twos = torch.full((2, 3), 2.0)
    return {
        "plain": values,
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "offset": values[2:],
        "transposed": values.reshape(2, 3).T,
        "strided": values[::2],
        "expanded": torch.ones(1).expand(4),
        "one strided element": values[3::4],
        "no dimension": values[3],
        "no element": values[:0],
        "no row": torch.ones(0, 3),
        "negative, strided": torch.view_as_complex(twos.reshape(3, 2)).conj().imag,
        "negative, of one element": torch.tensor([1 + 2j]).conj().imag,
        "negative, contiguous": torch._neg_view(values),
        "negative, of several elements": torch.complex(values, values).conj().imag,
        "derived": torch.arange(4.0).as_subclass(_Derived),
        "parameter": torch.nn.Parameter(values.clone(), requires_grad=False),
        "detached": torch.nn.Parameter(values.clone()).detach(),
        "inference": _made_in_inference_mode(),
        "half": values.half(),
        "bfloat16": values.bfloat16(),
        "bool": values > 3,
        "unsigned": values.to(torch.uint16),
        "complex": torch.complex(values, -values),
        "conjugated": torch.complex(values, -values).conj(),
        "conjugated, transposed": torch.complex(twos, twos.neg()).to(torch.complex128).T.conj(),
        "conjugated and negative": torch._neg_view(torch.complex(values, values + 1).conj()),
    }


def _own(x: Any) -> Any:
    """A copy in memory of its own, which holds the same: the elements, their negatives or conjugates."""
    held = x.resolve_conj().resolve_neg().clone()
    held = held.conj().resolve_conj() if x.is_conj() else held
    held = -held if x.is_neg() else held
    own = held.conj() if x.is_conj() else held
    return torch._neg_view(own) if x.is_neg() else own


def _made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return torch.arange(3.0)


@on_ranks(2)
@both_ways
def test_all_forms(comm: Communicator, is_offered: bool) -> None:
    """What is read, what is made and what is written into are the elements that Torch shows."""
    torch.manual_seed(1)
    with exchange_api(is_offered):
        for name, x in _tensors().items():
            op = "max" if x.dtype == torch.bool else "sum"
            wide = torch.complex128 if x.is_complex() else torch.float64
            before, twice = x.tolist(), (x.to(wide) * (1 + (op == "sum"))).tolist()
            reduced = [
                comm.allreduce(x, op),
                comm.allreduce(x, op, out=torch.empty(x.shape, dtype=x.dtype)),
                comm.allreduce_async(x, op).wait(),
            ]
            copied = [
                comm.broadcast(x),
                comm.allgather(x.reshape(-1))[: x.numel()].reshape(x.shape),
            ]
            assert x.tolist() == before, name
            if name != "expanded":  # whose elements share memory
                own = _own(x)
                assert comm.allreduce(own, op, out=own) is own
                reduced.append(own)
            for result in reduced + copied:
                assert isinstance(result, torch.Tensor)
                assert result.dtype == x.dtype
                assert result.tolist() == (twice if any(result is one for one in reduced) else before), name


@on_ranks(2)
@both_ways
def test_what_no_memory_describes_is_refused(comm: Communicator, is_offered: bool) -> None:
    graph = torch.ones(2, requires_grad=True) * 2
    refused = {
        "requires a gradient": [torch.ones(2, requires_grad=True), graph],
        "complex32": [torch.ones(2, dtype=torch.complex32)],
        "cannot take|layout": [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()],
        "meta": [torch.ones(2, device="meta")],
    }
    with exchange_api(is_offered):
        for pattern, tensors in refused.items():
            for x in tensors:
                for call in (comm.allreduce, comm.allreduce_async, comm.broadcast):
                    with pytest.raises(UsageError, match=pattern):
                        call(x)
        with pytest.raises(UsageError, match="requires a gradient"):
            comm.allreduce(torch.ones(2), out=graph)
    assert not comm.is_broken


@on_ranks(2)
def test_a_derived_class_is_asked_itself(comm: Communicator) -> None:
    """What it means by its elements may be other memory than that of the tensor that it derives from."""

    class Wrapped(torch.Tensor):
        def __dlpack__(self, **kwargs: Any) -> Any:
            return torch.full((2,), 5.0).__dlpack__(**kwargs)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    x = torch.zeros(2).as_subclass(Wrapped)
    out = np.zeros(2, np.float32)
    assert comm.allreduce(x, out=out).tolist() == [10.0, 10.0]
    assert comm.allreduce_async(x, out=out).wait().tolist() == [10.0, 10.0]


@on_ranks(2)
def test_memory_stays_while_an_operation_is_pending(comm: Communicator) -> None:
    """Also where the program gives the tensor other memory meanwhile."""
    x = torch.full((1 << 18,), float(comm.rank + 1))
    view = x.view(-1)
    work = comm.allreduce_async(x, out=x)
    x.data = torch.zeros(3)
    del x
    work.wait()
    assert (view == 3.0).all()


@on_ranks(2)
def test_unknown_versions_are_left_alone(comm: Communicator) -> None:
    for other in (7, object(), None):
        with mock.patch.object(torch.Tensor, EXCHANGE_API, other, create=True):
            assert comm.allreduce(torch.ones(2)).tolist() == [2.0, 2.0]
            assert comm.allreduce_async(torch.ones(2)).wait().tolist() == [2.0, 2.0]
