"""Memory that gradients share with other tensors, gradients that the program changes while they are reduced,
and names that do not depend on what a rank has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.horovod.torch import functions
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import all_raise, same_everywhere

CHANGED = "gradient of 'w.*was changed or replaced after backward.*call optimizer.synchronize"


class PassesOn(torch.autograd.Function):
    """The gradient of both inputs is the memory of a constant."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, constant: Tensor) -> Tensor:
        ctx.constant = constant
        return (first + second).sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.constant.view(2, 3), ctx.constant.view(2, 3), None


def parameters(*shapes: tuple[int, ...]) -> list[Any]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def distributed(own: list[Any], **options: Any) -> Any:
    named = [(f"w{k}", parameter) for k, parameter in enumerate(own)]
    return hvd.DistributedOptimizer(torch.optim.SGD(own, lr=1.0), named, **options)


MEMORY: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "one group": {"groups": 1},
    "half precision": {"compression": hvd.Compression.fp16},
}


@pytest.mark.parametrize("what", MEMORY)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last"])
@with_hvd()
def test_the_program_owns_the_tensor_that_it_has_put_there(
    comm: Communicator, layout: str, what: str
) -> None:
    """Its own zero_ and its own gradients count in the next step, and it finds the results there."""
    values = torch.zeros(2, 3, 2, 2)
    if layout == "transposed":
        values = values.transpose(0, 1)
    elif layout == "channels last":
        values = values.to(memory_format=torch.channels_last)
    own = [nn.Parameter(values)]
    optimizer = distributed(own, **MEMORY[what])
    mine = own[0].grad = torch.zeros_like(own[0])
    reduced = 3.0 if what == "sum" else 1.5
    for step in range(1, 3):
        mine.zero_()
        (own[0].sum() * (comm.rank + 1)).backward()
        optimizer.step()
        assert own[0].grad is mine
        assert mine.unique().tolist() == [reduced]
        assert own[0].unique().tolist() == [-step * reduced]
    mine.fill_(comm.rank + 1.0)
    optimizer.step()
    assert mine.unique().tolist() == [reduced]


def _one_tensor(own: list[Any], values: Tensor) -> None:
    own[0].grad = own[1].grad = values


def _by_autograd(own: list[Any], values: Tensor) -> None:
    own[0].grad, own[1].grad = torch.autograd.grad(((own[0] + own[1]) * values).sum(), own)


def _one_numpy_array(own: list[Any], values: Tensor) -> None:
    array = values.numpy()
    own[0].grad, own[1].grad = torch.from_numpy(array), torch.from_numpy(array)


SHARED = {"one tensor": _one_tensor, "autograd": _by_autograd, "numpy": _one_numpy_array}


@pytest.mark.parametrize("what", MEMORY)
@pytest.mark.parametrize("shares", SHARED)
@with_hvd()
def test_gradients_of_the_program_in_one_memory(comm: Communicator, shares: str, what: str) -> None:
    own = parameters((3,), (3,))
    optimizer = distributed(own, **MEMORY[what])
    factor = 3.0 if what == "sum" else 1.5
    for step in range(1, 3):
        SHARED[shares](own, torch.tensor([1.0, 2.0, 4.0]) * (comm.rank + 1))
        optimizer.step()
        for parameter in own:
            assert parameter.tolist() == [-step * factor, -step * factor * 2, -step * factor * 4]


@with_hvd()
def test_a_missing_gradient_beside_two_in_one_memory(comm: Communicator) -> None:
    """The two are reduced as copies, and nothing is wrong with them."""
    own = parameters((3, 1), (1, 3), (2,))
    optimizer = distributed(own, op=hvd.Sum)
    weights = torch.arange(1.0, 4.0) * (comm.rank + 1)
    ((own[0].view(-1) + own[1].view(-1)) * weights).sum().backward()
    assert own[0].grad.untyped_storage().data_ptr() == own[1].grad.untyped_storage().data_ptr()
    optimizer.step()
    assert [parameter.view(-1).tolist() for parameter in own] == [[-3.0, -6.0, -9.0]] * 2 + [[0.0] * 2]


@with_hvd()
def test_a_gradient_in_the_memory_of_one_under_way(comm: Communicator) -> None:
    own = parameters((3,), (3,))
    optimizer = distributed(own, op=hvd.Sum)
    (own[0] * 2.0).sum().backward()
    own[1].grad = own[0].grad
    with pytest.raises(ValueError, match="parameters w0, w1 have memory in common.*clone"):
        optimizer.step()


@with_hvd()
def test_a_sparse_gradient_of_the_program(comm: Communicator) -> None:
    own = parameters((3, 2))
    optimizer = distributed(own)
    mine = torch.sparse_coo_tensor([[comm.rank]], [[2.0, 4.0]], (3, 2))
    own[0].grad = mine
    optimizer.step()
    assert own[0].grad is mine
    assert mine.to_dense().tolist() == [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("what", MEMORY)
@with_hvd()
def test_two_parameters_with_one_gradient(comm: Communicator, what: str) -> None:
    """Autograd gives both the memory that comes from the product."""
    own = parameters((2, 3), (3, 2))
    optimizer = distributed(own, **MEMORY[what])
    weights = torch.arange(6.0) * (comm.rank + 1)
    for step in range(1, 3):
        optimizer.zero_grad()
        ((own[0].view(-1) + own[1].view(-1)) * weights).sum().backward()
        optimizer.step()
        expected = -step * torch.arange(6.0) * (3.0 if what == "sum" else 1.5)
        for parameter in own:
            torch.testing.assert_close(parameter.detach().view(-1), expected)


@pytest.mark.parametrize("what", MEMORY)
@with_hvd()
def test_a_constant_of_the_graph_keeps_its_values(comm: Communicator, what: str) -> None:
    first, second = parameters((2, 3), (2, 3))
    optimizer = distributed([first, second], **MEMORY[what])
    constant = torch.full((6,), comm.rank + 1.0)
    PassesOn.apply(first, second, constant).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert constant.tolist() == [comm.rank + 1.0] * 6
    assert first.tolist() == second.tolist() == [[-3.0 if what == "sum" else -1.5] * 3] * 2


@with_hvd()
def test_an_expanded_gradient(comm: Communicator) -> None:
    (own,) = parameters((2, 3))
    row = torch.full((3,), comm.rank + 1.0)
    optimizer = distributed([own])
    own.grad = row.expand(2, 3)
    optimizer.step()
    assert own.tolist() == [[-1.5] * 3] * 2
    assert row.tolist() == [comm.rank + 1.0] * 3


@with_hvd()
def test_gradients_in_memory_of_the_program(comm: Communicator) -> None:
    """The reduced gradients are found there."""
    own = parameters((2,), (3,))
    flat = torch.zeros(5)
    own[0].grad, own[1].grad = flat[:2], flat[2:]
    optimizer = distributed(own)
    for step in range(1, 3):
        flat.zero_()
        (own[0].sum() + own[1].sum() * 2).mul(comm.rank + 1.0).backward()
        optimizer.step()
        assert flat.tolist() == [1.5, 1.5, 3.0, 3.0, 3.0]
        assert own[0].grad.data_ptr() == flat.data_ptr()
        assert own[1].tolist() == [-3.0 * step] * 3


@with_hvd()
@all_raise(RuntimeError, CHANGED)
def test_changes_in_memory_of_the_program(comm: Communicator) -> None:
    own = parameters((2,), (3,))
    flat = torch.zeros(5)
    own[0].grad, own[1].grad = flat[:2], flat[2:]
    optimizer = distributed(own)
    (own[0].sum() + own[1].sum() * 2).mul(comm.rank + 1.0).backward()
    flat.mul_(0.5)
    optimizer.step()


def clip(own: Any) -> None:
    nn.utils.clip_grad_norm_([own], 0.1)


def scale(own: Any) -> None:
    own.grad.mul_(2)


def replace(own: Any) -> None:
    own.grad = own.grad * 2


def write_through_a_view(own: Any) -> None:
    own.grad.view(-1)[0] = 7.0


def drop(own: Any) -> None:
    own.grad = None


CHANGES: dict[str, Callable[[Any], None]] = {
    "clip": clip,
    "scale": scale,
    "replace": replace,
    "drop": drop,
    "view": write_through_a_view,
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half precision": {"compression": hvd.Compression.fp16},
    "two passes": {"backward_passes_per_step": 2},
    "group": {"groups": 1},
}


def train(rank: int, change: Callable[[Any], None], **options: Any) -> None:
    own = parameters((4,), (3,))
    optimizer = distributed(own, **options)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            ((own[0].sum() + own[1].sum()) * (rank + 1.0)).backward()
        change(own[1])
        optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
@with_hvd()
@all_raise(RuntimeError, CHANGED)
def test_changes_before_the_step(comm: Communicator, change: str) -> None:
    train(comm.rank, CHANGES[change])


@pytest.mark.parametrize("way", WAYS)
@with_hvd()
@all_raise(RuntimeError, CHANGED, "rank 1")
def test_a_change_on_one_rank(comm: Communicator, way: str) -> None:
    train(comm.rank, scale if comm.rank == 1 else lambda _: None, **WAYS[way])


@pytest.mark.parametrize("unscales", [False, True])
@with_hvd()
@all_raise(RuntimeError, CHANGED)
def test_a_gradient_scaler_before_synchronize(comm: Communicator, unscales: bool) -> None:
    own = parameters((4,))
    optimizer, scaler = distributed(own), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((own[0].sum() * (comm.rank + 1.0)).view(())).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


@with_hvd()
@all_raise(RuntimeError, CHANGED)
def test_rows_that_are_changed(comm: Communicator) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    named = [("w", table.weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), named)
    table(torch.tensor([comm.rank])).sum().backward()
    table.weight.grad.mul_(2)
    optimizer.step()


@with_hvd()
def test_state_that_is_loaded_while_gradients_are_reduced(comm: Communicator) -> None:
    """The next reduction waits for the one that led to no step, whose values are left out."""
    (own,) = parameters((3,))
    optimizer = distributed([own])
    if comm.rank == 1:
        comm.recv(0)
    (own.sum() * 100).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    if comm.rank == 0:
        sender = threading.Timer(0.2, lambda: comm.send(np.zeros(1), 1))
        sender.start()
    for step in range(1, 3):
        optimizer.zero_grad()
        (own.sum() * (comm.rank + 1.0)).backward()
        optimizer.step()
        assert own.tolist() == [-1.5 * step] * 3
    if comm.rank == 0:
        sender.join()


@with_hvd()
def test_programs_that_change_nothing_too_early(comm: Communicator) -> None:
    """Gradients are read at any time, changed between backward passes, and after synchronize()."""
    own = parameters((4,), (3,))
    optimizer, scaler = distributed(own), torch.amp.GradScaler("cpu", init_scale=4.0)
    pair = hvd.add_process_set([0])
    alone = distributed(parameters((2,)), process_set=pair)
    passes = distributed(parameters((2,)), backward_passes_per_step=2)
    for step in range(1, 4):
        for each in (optimizer, alone, passes):
            each.zero_grad()
        scaler.scale((own[0].sum() * (comm.rank + 1.0)).view(())).backward()
        assert float(own[0].grad.norm()) > 0
        assert own[0].grad.detach().clone().sum() > 0
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(own, 1.25)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert own[0].tolist() == [-1.25 * step] * 4
        (lone,) = alone.param_groups[0]["params"]
        lone.sum().backward()
        lone.grad.mul_(2)  # a rank alone has no reduction, and a rank outside of the set neither
        alone.step()
        (twice,) = passes.param_groups[0]["params"]
        twice.sum().backward()
        twice.grad.mul_(3)
        twice.sum().backward()
        passes.step()
        assert twice.tolist() == [-4.0 * step] * 2
    assert same_everywhere(comm, own[0].tolist())


@with_hvd()
def test_parameters_that_one_rank_has_frozen_in_a_group(comm: Communicator) -> None:
    own = parameters((2,), (2,), (2,))
    own[1 + comm.rank].requires_grad_(False)
    optimizer = distributed(own, groups=[own])
    sum(each.sum() for each in own).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched grouped allreduce.*w0, w2.*w0, w1"):
        optimizer.step()


@with_hvd()
def test_a_list_to_broadcast_with_none_on_one_rank(comm: Communicator) -> None:
    first, second = torch.full((2,), 1.0 + comm.rank), torch.full((2,), 10.0 + comm.rank)
    hvd.broadcast_parameters([None, first, second], 1)
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [11.0, 11.0])
    unlike = [torch.zeros(2) if comm.rank else None, torch.ones(3)]
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "broadcast_async_", lambda tensor, root, name, which: asked.append(name))
        patch.setattr(functions, "synchronize", lambda handle: None)
        hvd.broadcast_parameters(unlike, 0)
    assert asked[-1].endswith(".1")
