"""Tensors as arrays of collectives: by DLPack's C functions (`torch.Tensor` itself), by its Python ones
(subclasses, and older Torch), or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks


class _Subclass(torch.Tensor):
    """Which has another way to export it, perhaps."""


_MADE: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.arange(12.0).reshape(3, 4),
    "strided": lambda: torch.arange(24.0).reshape(4, 6)[:, ::2],
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "no element": lambda: torch.ones(0, 3),
    "no dimension": lambda: torch.tensor(2.0),
    "with an offset": lambda: torch.arange(10.0)[3:],
    "bfloat16": lambda: torch.arange(7, dtype=torch.bfloat16),
    "uint16": lambda: torch.arange(7).to(torch.uint16),
    "negated": lambda: torch._neg_view(torch.arange(4.0)),
    "imaginary part of a conjugate": lambda: torch.complex(torch.ones(1), torch.ones(1)).conj().imag,
    "imaginary parts of a conjugate": lambda: torch.complex(torch.ones(4), torch.ones(4)).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
    "subclass": lambda: torch.arange(4.0).as_subclass(_Subclass),
}


@on_ranks(2)
@pytest.mark.parametrize("name", _MADE)
def test_sums(comm: Communicator, name: str) -> None:
    """What is read, what is made and what is written into are the elements that Torch shows."""
    torch.manual_seed(1)
    x = _MADE[name]()
    before, wanted = x.clone().tolist(), (x.clone().to(torch.float64) * 2).tolist()
    total = comm.allreduce(x)
    assert total.shape == x.shape
    assert total.dtype == x.dtype
    assert isinstance(total, torch.Tensor)
    assert total.tolist() == wanted
    assert x.tolist() == before
    if name != "expanded":  # whose elements share memory
        assert comm.allreduce(x, out=x) is x
        assert x.tolist() == wanted
        assert comm.broadcast(x, 1).tolist() == wanted
        assert comm.allgather(x.reshape(-1)).tolist() == 2 * x.reshape(-1).tolist()


@on_ranks(2)
@pytest.mark.parametrize(
    "x",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["sparse", "meta", "complex", "conjugate", "requires_grad", "parameter"],
)
def test_what_is_refused(comm: Communicator, x: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="Tensor|Parameter"):
        comm.allreduce(x)
    with pytest.raises(UsageError, match="Tensor|Parameter"):
        comm.allreduce(torch.ones(3), out=x)
    assert comm.allreduce(torch.ones(3)).tolist() == [2.0] * 3


@on_ranks(2)
def test_memory_stays_as_long_as_an_operation(comm: Communicator) -> None:
    works = [comm.allreduce_async(torch.full((10_000,), float(number))) for number in range(50)]
    for number, work in enumerate(works):
        assert (work.wait() == 2.0 * number).all()
