"""Horovod's Torch functions with tensors on a device: what they give on the CPU, whatever streams make the
tensors; training that is what one process would do, and with the bits of multiring's own gradient hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import multiring.horovod.torch as hvd
import multiring.torch
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.gpu.late_tensors import (
    Place,
    assert_same,
    expect_normalised_together,
    loss_of,
    make_batch,
    make_net,
    on_devices,
)
from tests.on_ranks import same_everywhere

Tensors = list[torch.Tensor]
Case = Callable[[Communicator, Place], Tensors]


def _allreduce(comm: Communicator, on: Place) -> Tensors:
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.float64):
        x = on.given((3, 5), comm.rank, dtype)
        found += [hvd.allreduce(x), hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Max), x]
        in_place = on.given((70_000,), comm.rank, dtype)
        before = in_place._version
        assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
        assert in_place._version > before
        found.append(in_place)
    x = on.given((17,), comm.rank)
    found.append(hvd.allreduce(x, compression=hvd.Compression.fp16))
    found.append(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0))
    return found


def _asynchronous(comm: Communicator, on: Place) -> Tensors:
    """In another order on each rank."""
    numbers = range(6) if comm.rank == 0 else reversed(range(6))
    handles = {}
    for number in numbers:
        x = on.given((1 + 3000 * number,), comm.rank)
        handles[number] = hvd.allreduce_async(x, name=f"x{number}", op=hvd.Sum)
        del x
    while not hvd.poll(handles[3]):
        pass
    return [hvd.synchronize(handles[number]) for number in range(6)]


def _groups(comm: Communicator, on: Place) -> Tensors:
    def xs() -> Tensors:
        return [on.given((4,), comm.rank), on.given((2, 3), comm.rank)]

    in_place = xs()
    hvd.grouped_allreduce_(in_place)
    return [
        *hvd.grouped_allreduce(xs(), op=hvd.Sum),
        *in_place,
        *hvd.grouped_allgather(xs()),
        *hvd.grouped_reducescatter([on.given((5, 2), comm.rank), on.given((3,), comm.rank)], op=hvd.Sum),
    ]


def _moves(comm: Communicator, on: Place) -> Tensors:
    found = []
    for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.bool):
        found.append(hvd.allgather(on.given((comm.rank, 3), comm.rank, dtype)))
        found.append(hvd.broadcast(on.given((2, 3), comm.rank, dtype), comm.size - 1))
        found.append(on.given((2, 3), comm.rank, dtype))
        hvd.broadcast_(found[-1], 0)
        found.append(hvd.alltoall(on.given((2 * comm.size, 3), comm.rank, dtype)))
    return found


def _splits(comm: Communicator, on: Place) -> Tensors:
    """The rows from each rank are where the splits are."""
    splits = torch.tensor([comm.rank + to + 1 for to in range(comm.size)], dtype=torch.int32)
    x = on.given((int(splits.sum()), 2), comm.rank)
    received, counts = hvd.alltoall(x, splits=splits.to(on.device))
    again, on_host = hvd.alltoall(x, splits=splits.tolist())
    assert on_host.device.type == "cpu"
    assert on_host.tolist() == counts.tolist()
    return [received, counts, again]


def _reducescatter(comm: Communicator, on: Place) -> Tensors:
    return [hvd.reducescatter(on.given((rows, 2), comm.rank), op=hvd.Sum) for rows in (1, 4, 6)]


def _gradients(comm: Communicator, on: Place) -> Tensors:
    x = on.given((4, 2), comm.rank, torch.float64).requires_grad_()
    outputs = [hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.reducescatter(x)]
    (sum((output**2).sum() for output in outputs) * (comm.rank + 1)).backward()
    assert x.grad is not None
    return [*(output.detach() for output in outputs), x.grad]


def _sparse(comm: Communicator, on: Place) -> Tensors:
    dense = torch.zeros(6, 2)
    dense[comm.rank : comm.rank + 2] = 1.0
    found = hvd.sparse_allreduce_async(on.late(dense).to_sparse(1), "sparse", hvd.Average)()
    assert found.is_sparse
    return [found.to_dense()]


CASES: dict[str, Case] = {
    "allreduce": _allreduce,
    "asynchronous": _asynchronous,
    "groups": _groups,
    "moves": _moves,
    "splits": _splits,
    "reducescatter": _reducescatter,
    "gradients": _gradients,
    "sparse": _sparse,
}


@with_hvd()
@on_devices(1, 2, 3)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_tensors_on_the_host(comm: Communicator, name: str, device: str) -> None:
    host, on = Place("cpu"), Place(device)
    expected = CASES[name](comm, host)
    with on.own_stream():
        found = CASES[name](comm, on)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, on, f"{name} {number}")


@with_hvd()
@on_devices(2)
def test_a_device_here_and_the_host_there(comm: Communicator, device: str) -> None:
    on = Place(device if comm.rank == 0 else "cpu")
    for name in ("allreduce", "groups", "moves", "splits", "reducescatter", "gradients"):
        expected = CASES[name](comm, Place("cpu"))
        for number, (one, other) in enumerate(zip(CASES[name](comm, on), expected, strict=True)):
            assert_same(one, other, on, f"{name} {number}")


@with_hvd()
@on_devices(1, 2)
def test_adasum(comm: Communicator, device: str) -> None:
    on = Place(device)
    expected = hvd.allreduce(Place("cpu").given((40,), comm.rank), op=hvd.Adasum)
    with on.own_stream():
        assert_same(hvd.allreduce(on.given((40,), comm.rank), op=hvd.Adasum), expected, on)


@with_hvd()
@on_devices(2)
def test_results_on_another_stream_than_the_input(comm: Communicator, device: str) -> None:
    """Waited for, read and let go of there, while the stream of the input makes other tensors."""
    on, count = Place(device), 70_000
    with on.own_stream():
        for turn in range(10):
            x = on.given((count,), comm.rank + turn)
            handle = hvd.allreduce_async(x, op=hvd.Sum)
            with on.own_stream():
                result = hvd.synchronize(handle)
                on.busy()
                doubled = result * 2
                del result
            for _ in range(4):
                torch.full((count,), -1.0, device=device)
            host = [Place("cpu").given((count,), rank + turn) for rank in range(comm.size)]
            on.settle()
            assert_same(doubled, 2 * sum(host), on, turn)  # type: ignore[arg-type]


@with_hvd()
@on_devices(2)
def test_after_a_mismatch(comm: Communicator, device: str) -> None:
    """What is left is submitted again, after the work of the stream that it was submitted on."""
    on = Place(device)
    with on.own_stream():
        bad = torch.ones(2, device=device, dtype=torch.float32 if comm.rank else torch.float64)
        failing = hvd.allreduce_async(bad, name="bad")
        for _ in range(20):  # longer than the ranks take to meet
            on.busy()
        x = on.given((5000,), comm.rank)
        # One rank alone has submitted it when the ranks meet.
        early = hvd.allreduce_async(x, name="good", op=hvd.Sum) if comm.rank == 0 else None
        with on.own_stream(), pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
            hvd.synchronize(failing)
        handle = hvd.allreduce_async(x, name="good", op=hvd.Sum) if early is None else early
        host = [Place("cpu").given((5000,), rank) for rank in range(comm.size)]
        assert_same(hvd.synchronize(handle), sum(host), on)  # type: ignore[arg-type]


@with_hvd()
@on_devices(3)
def test_joining(comm: Communicator, device: str) -> None:
    """The zeros of ranks that have joined are on the host."""
    on = Place(device)
    for turn in range(1 + comm.rank):
        mean = hvd.allreduce(on.late(torch.full((4,), 3.0)), name=f"turn {turn}")
        assert mean.tolist() == [float(comm.size - turn)] * 4
    assert hvd.join(-1 if device == "cpu" else 0) == 2


# What trains.


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "two groups": {"groups": 2},
    "two passes": {"backward_passes_per_step": 2},
}


@with_hvd()
@on_devices(1, 3)
@pytest.mark.parametrize("what", OPTIONS)
def test_training_is_that_of_one_process(comm: Communicator, what: str, device: str) -> None:
    on, passes = Place(device), OPTIONS[what].get("backward_passes_per_step", 1)
    model, alone = make_net(device), make_net("cpu")
    if comm.rank:
        nn.init.zeros_(model[0].weight)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), **OPTIONS[what])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    reference = torch.optim.Adam(alone.parameters(), lr=0.01)
    on.settle()
    with on.own_stream():
        for step in range(4):
            optimizer.zero_grad()
            reference.zero_grad()
            for k in range(passes):
                loss = loss_of(model, make_batch(comm.rank, passes * step + k, device))
                on.busy()
                loss.backward()
                every = [make_batch(rank, passes * step + k, "cpu") for rank in range(comm.size)]
                loss_of(alone, torch.cat(every)).backward()
            optimizer.step()
            reference.step()
        found = [parameter.detach().cpu() for parameter in model.parameters()]
    for mine, expected in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.detach(), rtol=1e-8, atol=1e-11)
    assert same_everywhere(comm, [each.tolist() for each in found])


@with_hvd()
@on_devices(1, 2)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"compression": hvd.Compression.fp16}], ids=["plain", "groups", "half"]
)
def test_gradients_have_the_bits_of_hooks(comm: Communicator, options: dict[str, Any], device: str) -> None:
    """Those of half precision: of an allreduce of gradients that are rounded before."""
    on = Place(device)
    model, hooked = make_net(device, torch.float32), make_net(device, torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
    )
    is_half = "compression" in options and comm.size > 1
    hooks = None if is_half else multiring.torch.register_gradient_hooks(hooked, comm=comm)
    on.settle()
    with on.own_stream():
        for step in range(3):
            x = make_batch(comm.rank, step, device, torch.float32)
            for each in (model, hooked):
                each.zero_grad()
                loss = loss_of(each, x)
                on.busy()
                loss.backward()
            optimizer.synchronize()
            if hooks is not None:
                hooks.synchronize()
            for mine, other in zip(model.parameters(), hooked.parameters(), strict=True):
                assert mine.grad is not None
                assert other.grad is not None
                expected = other.grad
                if is_half:
                    expected = comm.allreduce(expected.half(), "average").float()
                assert torch.equal(mine.grad, expected), f"step {step}"
    if hooks is not None:
        hooks.remove()


@with_hvd()
@on_devices(2)
def test_state_of_an_optimizer(comm: Communicator, device: str) -> None:
    """That of the root, where it was on each rank: tensors among its options, too."""
    on, net = Place(device), make_net(device)
    rate = torch.tensor(0.01 * (comm.rank + 1), device=device)
    adam = torch.optim.Adam(net.parameters(), lr=rate, capturable=on.is_cuda)
    loss_of(net, make_batch(comm.rank, 0, device)).backward()
    adam.step()
    hvd.broadcast_optimizer_state(adam, root_rank=0)
    assert_same(adam.param_groups[0]["lr"], torch.tensor(0.01), on)
    for state in adam.state.values():
        for value in state.values():
            assert value.device.type == device
            assert same_everywhere(comm, value.tolist())


@with_hvd()
@on_devices(2)
def test_batch_normalisation(comm: Communicator, device: str) -> None:
    """As over the whole batch in one process."""
    expect_normalised_together(comm, hvd.SyncBatchNorm(6).double().to(device), device)
