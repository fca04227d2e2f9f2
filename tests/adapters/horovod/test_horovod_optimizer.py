"""hvd.DistributedOptimizer, compared with one process that has the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks, same_everywhere

STEPS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    squared: Tensor = (model(x) ** 2).mean()
    return squared


def distributed(model: nn.Module, lr: float) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "predivide": {"gradient_predivide_factor": 2.0},
    "two groups": {"groups": 2},
    "sum": {"op": hvd.Sum},
    "two passes in groups": {"backward_passes_per_step": 2, "groups": 3},
}


def assert_same_model(comm: Communicator, model: nn.Module, reference: nn.Module) -> None:
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-14)
    assert same_everywhere(comm, [p.tolist() for p in model.parameters()])


@on_ranks(1, 3)
@pytest.mark.parametrize("what", OPTIONS)
@with_hvd
def test_training(comm: Communicator, what: str) -> None:
    """Like one process with the batches of all ranks, of a subclass of the same name."""
    options = OPTIONS[what]
    passes = options.get("backward_passes_per_step", 1)
    for make in OPTIMIZERS.values():
        model, reference = make_model(), make_model()
        if comm.rank:
            nn.init.zeros_(model[0].weight)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        inner = make(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert isinstance(optimizer, type(inner))
        assert type(optimizer).__name__ == type(inner).__name__
        alone = make(reference.parameters())
        hvd.broadcast_optimizer_state(alone, root_rank=0)  # which takes a step of its own
        for step in range(STEPS):
            optimizer.zero_grad()
            alone.zero_grad()
            for k in range(passes):
                loss(model, batch(comm.rank, passes * step + k)).backward()
                every = [loss(reference, batch(r, passes * step + k)) for r in range(comm.size)]
                (sum(every) / (1 if what == "sum" else comm.size)).backward()  # type: ignore[union-attr]
            optimizer.step()
            alone.step()
        assert_same_model(comm, model, reference)


@with_hvd
def test_gradients_leave_during_backward(comm: Communicator) -> None:
    """That of the last layer is reduced before the first layer's has been computed."""
    model = make_model()
    optimizer = distributed(model, 0.1)
    seen = []
    model[0].register_full_backward_hook(lambda *_: seen.append(len(optimizer._reductions)))
    model[0](batch(comm.rank, 0)).requires_grad_(True)
    loss(model, batch(comm.rank, 0)).backward()
    assert seen == [4]
    optimizer.step()


@on_ranks(3)
@with_hvd
def test_synchronize_and_clip(comm: Communicator) -> None:
    """Gradients that are clipped between synchronize() and step(); and the warning without the context."""
    model, reference = make_model(), make_model()
    optimizer = distributed(model, 0.5)
    alone = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(comm.rank, step)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.zero_grad()
        (sum(loss(reference, batch(r, step)) for r in range(comm.size)) / comm.size).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        alone.step()
    assert_same_model(comm, model, reference)
    loss(model, batch(comm.rank, 0)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    loss(model, batch(comm.rank, 0)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@on_ranks(3)
@with_hvd
def test_gradients_that_are_missing(comm: Communicator) -> None:
    """Each rank uses another layer; what it does not use counts as zeros. Some are needed by nobody."""
    heads = nn.ModuleList(nn.Linear(2, 2).double() for _ in range(comm.size + 1))
    heads[-1].requires_grad_(False)
    optimizer = distributed(heads, 1.0)
    hvd.broadcast_parameters(heads.state_dict(), 0)
    before = [head.weight.detach().clone() for head in heads]
    heads[comm.rank](torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    for head, old in zip(list(heads)[:-1], before, strict=False):
        torch.testing.assert_close(head.weight.detach(), old - 1 / comm.size)
    assert torch.equal(heads[-1].weight, before[-1])
    assert same_everywhere(comm, [p.tolist() for p in heads.parameters()])


@on_ranks(3)
@pytest.mark.parametrize("as_dense", [False, True])
@with_hvd
def test_sparse_gradients(comm: Communicator, as_dense: bool) -> None:
    torch.manual_seed(3)
    layer = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    reference = copy.deepcopy(layer)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.3), layer.named_parameters(), sparse_as_dense=as_dense
    )
    alone = torch.optim.SGD(reference.parameters(), lr=0.3)
    for step in range(3):
        rows = [torch.tensor([rank, step, 2, 2]) for rank in range(comm.size)]
        optimizer.zero_grad()
        (layer(rows[comm.rank]) ** 2).sum().backward()
        optimizer.step()
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_sparse != as_dense
        alone.zero_grad()
        (sum((reference(each) ** 2).sum() for each in rows) / comm.size).backward()
        alone.step()
    assert_same_model(comm, layer, reference)


@with_hvd
def test_half_precision(comm: Communicator) -> None:
    """Gradients are rounded to float16 once on each rank, and once added."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), hvd.Compression.fp16
    )
    nn.init.zeros_(model.weight)
    model(torch.full((1, 4), 1 + 2**-12)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-1.0] * 4]
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


@with_hvd
def test_what_is_refused(comm: Communicator) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    weight = model[0].weight
    for text, options in {
        "must be unique. Found duplicates: x": {"named_parameters": [("x", p) for _, p in named]},
        "were not named": {"named_parameters": named[1:]},
        "sequence of tuples": {"named_parameters": [p for _, p in named]},
        "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
        "not supported with op != Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "non-negative integer or a list": {"groups": -1},
        "consist of torch.Tensor": {"groups": [["x"]]},
        "only appear once": {"groups": [[weight], [weight]]},
    }.items():
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(inner, **options)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
        optimizer = hvd.DistributedOptimizer(inner, named, num_groups=2)
    loss(model, batch(0, 0)).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        loss(model, batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        loss(model, batch(0, 0)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    for bad in (3, torch.ones(2)):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(bad, 0)  # type: ignore[arg-type]


@on_ranks(3)
@with_hvd
def test_a_process_set(comm: Communicator) -> None:
    """Its ranks train together, and the rank outside of it alone."""
    pair = hvd.add_process_set([0, 2])
    model, reference = make_model(), make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=pair)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    group = [0, 2] if pair.included() else [1]
    for step in range(2):
        optimizer.zero_grad()
        loss(model, batch(comm.rank, step)).backward()
        optimizer.step()
        alone.zero_grad()
        (sum(loss(reference, batch(r, step)) for r in group) / len(group)).backward()  # type: ignore[union-attr]
        alone.step()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@on_ranks(3)
@with_hvd
def test_uneven_data(comm: Communicator) -> None:
    """Ranks that have joined take part in the steps of the others with zeros."""
    model = make_model()
    optimizer = distributed(model, 0.1)
    reference = make_model()
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(comm.size + 1):
        active = [rank for rank in range(comm.size) if step <= rank + 1]
        alone.zero_grad()
        (sum(loss(reference, batch(r, step)) for r in active) / comm.size).backward()  # type: ignore[union-attr]
        alone.step()
        if comm.rank in active:
            optimizer.zero_grad()
            loss(model, batch(comm.rank, step)).backward()
            optimizer.step()
    last = hvd.join()
    assert last == comm.size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    assert_same_model(comm, model, reference)


@on_ranks(3)
@with_hvd
def test_optimizer_state(comm: Communicator) -> None:
    """Made on ranks that have none, without a change of parameters, and options as well."""
    for make in OPTIMIZERS.values():
        model = make_model()
        optimizer = make(model.parameters())
        if comm.rank == 0:
            optimizer.param_groups[0]["lr"] = 0.7
            for step in range(2):
                optimizer.zero_grad()
                loss(model, batch(0, step)).backward()
                optimizer.step()
        hvd.broadcast_parameters(list(model.named_parameters()), 0)
        before = [p.tolist() for p in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert [p.tolist() for p in model.parameters()] == before
        assert optimizer.param_groups[0]["lr"] == 0.7
        optimizer.zero_grad()
        loss(model, batch(0, 9)).backward()
        optimizer.step()
        assert same_everywhere(comm, [p.tolist() for p in model.parameters()])


@with_hvd
def test_schedulers(comm: Communicator) -> None:
    """Of the wrapped optimizer and of the wrapping one; the parameter groups are the same."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    first = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    second = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss(model, batch(comm.rank, 0)).backward()
    optimizer.step()
    second.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.5
    assert first.get_last_lr() == [1.0]
    assert same_everywhere(comm, [p.tolist() for p in model.parameters()])
