"""Gradients of every form that autograd leaves, looked at by the native core and by Torch's own methods."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multiring import Communicator, UsageError
from multiring.torch.counts import plain_gradients
from tests.adapters.torch.support import EXCHANGE_API, both_ways, exchange_api, register
from tests.on_ranks import on_ranks


class Named(torch.Tensor):
    """A class of the program's."""


def _transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


# What a backward pass gives for a parameter, made of new values of its shape.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": _transposed,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "part of other memory": lambda x: torch.stack([x, x])[1],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "negated memory": lambda x: torch._neg_view(-x),
    "conjugate's part": lambda x: torch.complex(x, -x).conj().imag,
    "conjugated memory": lambda x: x.conj().resolve_conj().conj(),
    "sparse": lambda x: x.to_sparse(),
    "of another class": lambda x: x.as_subclass(Named),
}


CASES = [
    (form, dtype)
    for form in FORMS
    for dtype in (torch.float32, torch.bfloat16, torch.complex64)
    if form != "conjugate's part" or dtype is torch.float32
]


class _Give(torch.autograd.Function):
    """Nothing forward; backward what it was given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients


def _values(number: int, step: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The same whole number everywhere, so that averages over two ranks are exact."""
    real = 8 * number + 2 * step + 1
    return torch.full(shape, complex(real, 2 * real) if dtype.is_complex else float(real), dtype=dtype)


@on_ranks(2)
@both_ways
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_every_form(comm: Communicator, form: str, dtype: torch.dtype, is_offered: bool) -> None:
    """Beside plain ones in the same bucket and in others, over several steps."""
    shapes = [(3, 4), (5, 5), (1, 4), (0, 3), (2, 2)]
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)
    weights = list(model.parameters())
    with exchange_api(is_offered):
        hooks = register(model, comm)
        for step in range(3):
            gradients = []
            for number, weight in enumerate(weights):
                own = _values(number + comm.rank, step, weight.shape, dtype)
                is_usual = number % 2 == 1 or weight.numel() == 0
                gradients.append(own if is_usual else FORMS[form](own))
                weight.grad = None
            loss = _Give.apply(gradients, *weights)  # type: ignore[no-untyped-call]
            loss.backward(torch.ones_like(loss))
            for number, weight in enumerate(weights):
                mean = sum(_values(number + rank, step, weight.shape, dtype) for rank in range(2)) / 2
                assert weight.grad is not None
                assert weight.grad.to_dense().tolist() == mean.tolist(), (number, step)
        hooks.remove()


@on_ranks(2)
@both_ways
def test_gradients_that_are_kept(comm: Communicator, is_offered: bool) -> None:
    """Reduced gradients are told from new ones, however they were looked at."""
    weight = nn.Parameter(torch.zeros(4))
    model = nn.ParameterList([weight])
    with exchange_api(is_offered):
        hooks = register(model, comm)
        _Give.apply([torch.full((4,), 2.0 * comm.rank)], weight).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.0] * 4
        assert not hooks.has_unreduced
        hooks.synchronize()  # nothing is new
        assert weight.grad.tolist() == [1.0] * 4
        weight.grad.add_(2.0 * comm.rank)  # what Torch counts as a write
        hooks.synchronize()
        assert weight.grad.tolist() == [2.0] * 4
        weight.grad = torch.full((4,), 4.0 * comm.rank)
        hooks.synchronize()
        assert weight.grad.tolist() == [2.0] * 4
        hooks.remove()


@on_ranks(2)
@both_ways
def test_a_gradient_that_is_differentiated(comm: Communicator, is_offered: bool) -> None:
    weight = nn.Parameter(torch.ones(4))
    with exchange_api(is_offered):
        hooks = register(nn.ParameterList([weight]), comm)
        (weight**2).sum().backward()
        weight.grad = None
        with pytest.raises(UsageError, match="create_graph=True"):
            (weight**2).sum().backward(create_graph=True)
        weight.grad = None
        (weight**2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0] * 4
        hooks.remove()


class _Api(ctypes.Structure):
    """Of DLPack: what describes a tensor, and which version that is of."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("unused", ctypes.c_void_p * 4),
        ("describe", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)),
        ("stream", ctypes.c_void_p),
    )


def test_what_cannot_be_described_is_not_asked_again() -> None:
    """Of a sparse tensor Torch makes an exception with a stack trace, which takes milliseconds."""
    asked: list[object] = []

    def describe(tensor: object, _: int) -> int:
        asked.append(tensor)
        return -1

    api = _Api((1, 3), (None,) * 4, _Api._fields_[2][1](describe), None)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    odd = type("Odd", (), {EXCHANGE_API: new_capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)})()
    plain = plain_gradients(1)
    told: list[object] = []
    hook = plain.incoming_hook(0, told.append)
    for times in (1, 2):
        plain.expect(0, torch.zeros(3), [1])
        for _ in range(3):
            hook(odd)
        assert asked == [odd] * times
    assert told == [odd] * 6
    plain.expect(0, None, [])
    hook(torch.zeros(3))
    assert len(told) == 7
