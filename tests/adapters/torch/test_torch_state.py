"""State of Torch models and optimizers over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import bits, draw, make_model
from tests.on_ranks import on_ranks, refuses, same_everywhere

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
KINDS = [*INTEGERS, *FLOATS, torch.complex64, torch.float8_e4m3fn]


@on_ranks(3)
def test_tensors_of_all_kinds_are_broadcast(comm: Communicator) -> None:
    """Every dtype; no elements, no dimensions, gaps, other strides, more than one packet."""

    def make(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(rank)
        tensors = {}
        for kind in KINDS:
            for number, shape in enumerate(((), (0, 3), (3, 5))):
                tensors[f"{kind}-{number}"] = (torch.rand(shape) * 100).to(kind)
        tensors["transposed"] = torch.rand(4, 3).t()
        tensors["gaps"] = torch.rand(4, 6)[:, ::2]
        tensors["large"] = torch.rand(7_000_000)
        tensors["parameter"] = nn.Parameter(torch.rand(3))
        return tensors

    root = 1
    mine, wanted = make(comm.rank), make(root)
    versions = {name: tensor._version for name, tensor in mine.items()}
    multiring.torch.broadcast_parameters(mine, root, comm)
    for name, tensor in mine.items():
        assert tensor.stride() == wanted[name].stride()
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8),
            wanted[name].contiguous().view(-1).view(torch.uint8),
        )
        if tensor.numel():
            assert tensor._version > versions[name]  # autograd is told


def test_models_are_broadcast(comm: Communicator) -> None:
    """Parameters and buffers; a compiled model has the names of a plain one."""
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    model(torch.randn(2 + comm.rank, 2, 5, 5))
    runner: Any = torch.compile(model, backend="eager") if comm.rank == 0 else model
    multiring.torch.broadcast_parameters(runner, 1, comm)
    assert same_everywhere(comm, bits(model.state_dict().values()))
    multiring.torch.broadcast_parameters(model.named_parameters(), 0, comm)
    multiring.torch.broadcast_parameters(model.state_dict(), 0, comm)


def test_refused(comm: Communicator) -> None:
    refuses(UsageError, "root is 7", multiring.torch.broadcast_parameters, make_model(), 7, comm)
    with pytest.raises(MismatchError, match=r"'0\.weight'.*torch.float64 \(8, 6\).*but.*\(8, 4\)"):
        multiring.torch.broadcast_parameters(make_model(inputs=6 if comm.rank == 0 else 4), 0, comm)
    optimizer = torch.optim.SGD(list(make_model().parameters())[comm.rank :], 0.1)
    refuses(MismatchError, r"\[\[6\], \[5\]\]", multiring.torch.broadcast_optimizer_state, optimizer, 0, comm)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "tensor lr": partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(3)
def test_optimizer_state_is_broadcast(comm: Communicator, kind: str) -> None:
    """The last rank has trained and changed its rate, the others have no state at all; then all train on."""
    root = comm.size - 1
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(draw(0)) ** 2).mean()
        torch.autograd.backward(loss)
        return loss

    if comm.rank == root:
        optimizer.step(closure)
        optimizer.step(closure)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
        optimizer.param_groups[0]["note"] = {"epoch": (3, None)}
    before = repr(optimizer.state_dict()) if comm.rank == root else None
    multiring.torch.broadcast_optimizer_state(optimizer, root, comm)
    states = comm.allgather_object(repr(optimizer.state_dict()))
    assert states[root] == comm.broadcast_object(before, root)
    assert all(state == states[0] for state in states)
    multiring.torch.broadcast_parameters(model, root, comm)
    optimizer.step(closure)
    assert same_everywhere(comm, bits(model.parameters()))


@on_ranks(1, 2)
def test_optimizer_state_keeps_its_dtype(comm: Communicator) -> None:
    """State of another dtype than its parameter keeps it, as load_state_dict would not."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if comm.rank == 0:
        optimizer.state[model.weight]["master"] = torch.full((2, 3), 1 / 3)
    multiring.torch.broadcast_optimizer_state(optimizer, 0, comm)
    assert optimizer.state[model.weight]["master"].dtype == torch.float32
    assert torch.equal(optimizer.state[model.weight]["master"], torch.full((2, 3), 1 / 3))


def test_objects_and_metrics(comm: Communicator) -> None:
    assert multiring.torch.broadcast_object({"epoch": comm.rank}, 1, comm) == {"epoch": 1}
    assert multiring.torch.broadcast_object(comm.rank) == 0
    # A loss as a step has it, of which Torch would warn.
    metrics = {"loss": torch.tensor(float(comm.rank), requires_grad=True), "accuracy": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averages = multiring.torch.average_metrics(metrics, comm.rank + 1)
    assert averages == {"loss": 2 / 3, "accuracy": 1.0}


class Quantised(torch.Tensor):
    """Weights of 8 bits with a scale for each row, as libraries for quantised models have them."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        kept = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        kept.codes, kept.scale = codes, scale
        return kept  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if function is torch.ops.aten.mm.default:
            return args[0] @ (args[1].codes.float() * args[1].scale)
        raise NotImplementedError(f"{function} of a Quantised")


class Frozen(nn.Module):
    """A quantised weight and a trained bias."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        codes = torch.randint(-9, 9, (4, 2), generator=torch.Generator().manual_seed(rank), dtype=torch.int8)
        self.weight = nn.Parameter(Quantised(codes, torch.full((2,), 1.0 + rank)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", Quantised(codes.clone(), torch.full((2,), 5.0 + rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) + self.bias


def test_weights_of_a_derived_class_are_those_that_they_are_made_of(comm: Communicator) -> None:
    model, wanted = Frozen(comm.rank), Frozen(0)
    multiring.torch.broadcast_parameters(model, 0, comm)
    for mine, first in ((model.weight, wanted.weight), (model.table, wanted.table)):
        assert torch.equal(mine.codes, first.codes)
        assert torch.equal(mine.scale, first.scale)
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD([model.bias], lr=0.1), model, comm, check_every=1
    )
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.full((3, 4), 1.0)).sum() * (step + comm.rank)).backward()
        optimizer.step()
    if comm.rank == 1:
        model.weight.scale.add_(1.0)
    refuses(MismatchError, "parameter weight.scale", optimizer.check_state)


class Opaque(torch.Tensor):
    """A tensor of a class that says nothing of its memory."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.reshape, torch.Tensor.view):
            raise NotImplementedError("no views of an Opaque")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_whose_memory_is_not_known_is_named(comm: Communicator) -> None:
    tensors = {"plain": torch.ones(2), "odd": torch.ones(2).as_subclass(Opaque)}
    text = "'odd' is a Opaque, whose memory is not known here .*give the other tensors"
    refuses(UsageError, text, multiring.torch.broadcast_parameters, tensors, 0, comm)


def test_tensors_of_the_program_can_still_be_resized(comm: Communicator) -> None:
    """NumPy's own view of a tensor forbids that for ever."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    multiring.torch.broadcast_parameters(model, 0, comm)
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, comm, check_every=1
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    optimizer.check_state()
    for tensor in [*model.parameters(), *model.buffers()]:
        size = tensor.untyped_storage().size()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)


def test_another_default_device(comm: Communicator) -> None:
    """Memory of the library's own is on the host."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Embedding(3, 2, sparse=True))
    torch.set_default_device("meta")
    try:
        multiring.torch.broadcast_parameters(model, 0, comm)
        optimizer = multiring.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, comm, check_every=1
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss = model[:2](torch.ones(4, 3, device="cpu")).sum()
            if comm.rank == 0:
                loss = loss + model[2](torch.tensor([1], device="cpu")).sum()
            loss.backward()
            optimizer.step()
    finally:
        torch.set_default_device(None)
    assert same_everywhere(comm, bits(model.parameters()))


def test_a_lazy_parameter_is_named(comm: Communicator) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    refuses(UsageError, "'0.weight' is lazy", multiring.torch.broadcast_parameters, model, 0, comm)
