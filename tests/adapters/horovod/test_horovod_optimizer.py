"""Training by Horovod's names on PyTorch, compared with one process that has the whole batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multiring.horovod.torch as hvd
import multiring.torch
from multiring import Communicator
from tests.adapters.horovod.support import refused, with_hvd
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


def whole_loss(model: nn.Module, ranks: Iterable[int], step: int, divisor: int) -> Tensor:
    """What one process minimises in place of these ranks."""
    return torch.stack([loss(model, batch(rank, step)) for rank in ranks]).sum() / divisor


def sgd(model: nn.Module, lr: float = 0.1, **options: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def distributed(model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(model, lr), model.named_parameters(), **options)


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def values(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


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
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=1e-11, atol=1e-14)
    assert same_everywhere(comm, values(model))


@with_hvd(1, 3)
@pytest.mark.parametrize("what", OPTIONS)
def test_training(comm: Communicator, what: str) -> None:
    """Like one process with the batches of all ranks, of a subclass of the same name."""
    options = OPTIONS[what]
    passes, divisor = options.get("backward_passes_per_step", 1), 1 if what == "sum" else comm.size
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
        for step in range(STEPS):
            optimizer.zero_grad()
            alone.zero_grad()
            for k in range(passes):
                loss(model, batch(comm.rank, passes * step + k)).backward()
                whole_loss(reference, range(comm.size), passes * step + k, divisor).backward()
            optimizer.step()
            alone.step()
        assert_same_model(comm, model, reference)


@with_hvd(3)
def test_synchronize_and_clip(comm: Communicator) -> None:
    """Gradients that are clipped between synchronize() and step(); and the warning without the context. That
    of the last layer is reduced before the first layer's has been computed."""
    model, reference = make_model(), make_model()
    optimizer = distributed(model, 0.5)
    alone = sgd(reference, 0.5)
    under_way: list[int] = []
    model[0].register_full_backward_hook(lambda *_: under_way.append(len(optimizer._reductions)))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(comm.rank, step)).backward()
        assert under_way.pop() == 4
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.zero_grad()
        whole_loss(reference, range(comm.size), step, comm.size).backward()
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


@with_hvd(3)
def test_gradients_that_are_missing(comm: Communicator) -> None:
    """Each rank uses another layer; what it does not use counts as zeros. Some are needed by nobody."""
    heads = nn.ModuleList(nn.Linear(2, 2).double() for _ in range(comm.size + 1))
    heads[-1].requires_grad_(False)
    optimizer = distributed(heads, 1.0)
    hvd.broadcast_parameters(heads.state_dict(), 0)
    before = [head.weight.detach().clone() for head in heads]
    take_step(optimizer, heads[comm.rank](torch.ones(1, 2, dtype=torch.float64)).sum())
    for head, old in zip(list(heads)[:-1], before, strict=False):
        torch.testing.assert_close(head.weight.detach(), old - 1 / comm.size)
    assert torch.equal(heads[-1].weight, before[-1])
    assert same_everywhere(comm, values(heads))


@with_hvd(3)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(comm: Communicator, as_dense: bool) -> None:
    torch.manual_seed(3)
    layer = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    reference = copy.deepcopy(layer)
    optimizer, alone = distributed(layer, 0.3, sparse_as_dense=as_dense), sgd(reference, 0.3)
    for step in range(3):
        rows = [torch.tensor([rank, step, 2, 2]) for rank in range(comm.size)]
        take_step(optimizer, (layer(rows[comm.rank]) ** 2).sum())
        assert layer.weight.grad.is_sparse
        take_step(alone, (reference(torch.cat(rows)) ** 2).sum() / comm.size)
    assert_same_model(comm, layer, reference)
    dense = torch.zeros(6, 2)
    for wanted in ([0, 0, 0, 0, 0, 0], [1, 2, 2, 1, 0, 0]):
        found = hvd.sparse_allreduce_async(dense.to_sparse(1), None, hvd.Sum)()
        assert found.is_sparse
        assert found.to_dense().T.tolist() == [wanted] * 2
        dense[comm.rank : comm.rank + 2] = 1.0


@with_hvd()
def test_steps_after_a_sparse_gradient_that_did_not_match(comm: Communicator) -> None:
    """No part of the reduction that has failed meets one of the next step."""
    weight = nn.Parameter(torch.zeros(4, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    for step in range(4):
        optimizer.zero_grad()
        is_sparse = step > 0 or comm.rank == 0
        nn.functional.embedding(torch.tensor([step]), weight, sparse=is_sparse).sum().backward()
        if step == 0:
            with pytest.raises(hvd.HorovodInternalError, match="Mismatched collective operations"):
                optimizer.step()
            optimizer.zero_grad()
            continue
        optimizer.step()
        assert weight.view(-1).tolist() == [-1.0 if 0 < k <= step else 0.0 for k in range(4)]
    mixed = torch.ones(4, 2).to_sparse(1 + comm.rank)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
        hvd.sparse_allreduce_async(mixed, "mixed", hvd.Sum)()


@with_hvd()
def test_half_precision(comm: Communicator) -> None:
    """Gradients are rounded to float16 once on each rank, and once added."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = distributed(model, 1.0, compression=hvd.Compression.fp16)
    nn.init.zeros_(model.weight)
    take_step(optimizer, model(torch.full((1, 4), 1 + 2**-12)).sum())
    assert model.weight.tolist() == [[-1.0] * 4]
    assert model.weight.grad.dtype == torch.float32
    whole = torch.tensor([70000])
    assert hvd.Compression.fp16.compress(whole)[0] is whole


@with_hvd(3)
def test_what_is_refused(comm: Communicator) -> None:
    model = make_model()
    inner = sgd(model)
    named = list(model.named_parameters())
    weight = model[0].weight
    wrong: dict[str, dict[str, Any]] = {
        "must be unique. Found duplicates: x": {"named_parameters": [("x", p) for _, p in named]},
        "were not named": {"named_parameters": named[1:]},
        "sequence of tuples": {"named_parameters": [p for _, p in named]},
        "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
        "not supported with op != Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "non-negative integer or a list": {"groups": -1},
        "consist of torch.Tensor": {"groups": [["x"]]},
        "only appear once": {"groups": [[weight], [weight]]},
    }
    for text, options in wrong.items():
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(inner, **options)
    with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
        optimizer = hvd.DistributedOptimizer(inner, named, num_groups=2)

    def backward() -> None:
        loss(model, batch(0, 0)).backward()

    backward()
    refused(AssertionError, {"zero_grad": optimizer.zero_grad})
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    backward()
    backward()
    optimizer.step()
    lbfgs = torch.optim.LBFGS(model.parameters())
    refused(ValueError, {"LBFGS": lambda: hvd.broadcast_optimizer_state(lbfgs, 0)})
    bad: Any
    for bad in (3, torch.ones(2)):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(bad, 0)
    ones, pair = torch.ones(2), hvd.add_process_set([0, 1])
    refused(NotImplementedError, {"non-power of 2": lambda: hvd.allreduce(ones, op=hvd.Adasum)})
    if pair.included():
        with pytest.raises(NotImplementedError, match="non-global process sets"):
            hvd.allreduce(ones, op=hvd.Adasum, process_set=pair)
    backward()
    backward()
    refused(AssertionError, {"more than backward_passes_per_step times": backward})


@with_hvd(3)
def test_a_process_set(comm: Communicator) -> None:
    """Its ranks train together, and the rank outside of it alone; with schedulers of the wrapped optimizer
    and of the wrapping one, whose parameter groups are the same."""
    pair = hvd.add_process_set([0, 2])
    model, reference = make_model(), make_model()
    inner, alone = sgd(model), sgd(reference)
    schedulers = [torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)]
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=pair)
    schedulers += [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    schedulers += [torch.optim.lr_scheduler.StepLR(alone, 1, 0.25)]
    group = [0, 2] if pair.included() else [1]
    for step in range(2):
        take_step(optimizer, loss(model, batch(comm.rank, step)))
        take_step(alone, whole_loss(reference, group, step, len(group)))
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()], rtol=1e-12, atol=1e-14)


@with_hvd(3)
def test_optimizer_state(comm: Communicator) -> None:
    """Made on ranks that have none, without a change of parameters, and options as well."""
    for make in OPTIMIZERS.values():
        model = make_model()
        optimizer = make(model.parameters())
        if comm.rank == 0:
            optimizer.param_groups[0]["lr"] = 0.7
            for step in range(2):
                take_step(optimizer, loss(model, batch(0, step)))
        hvd.broadcast_parameters(list(model.named_parameters()), 0)
        before = values(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert values(model) == before
        assert optimizer.param_groups[0]["lr"] == 0.7
        take_step(optimizer, loss(model, batch(0, 9)))
        assert same_everywhere(comm, values(model))


@with_hvd(1)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
def test_what_cannot_be_pickled_says_what_to_do(comm: Communicator, op: int) -> None:
    optimizer = distributed(make_model(), op=op)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        refused(TypeError, {"save optimizer.state_dict": lambda attempt=attempt: attempt(optimizer)})
    assert next(iter(optimizer._parameter_names.values())) == "0.weight"


def combined(parts: list[Any]) -> Any:
    """Adasum as the paper has it: pairs of halves, by recursion."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    a, b = combined(parts[:half]), combined(parts[half:])
    dot = float(np.vdot(a, b))
    return (1 - dot / (2 * np.vdot(a, a))) * a + (1 - dot / (2 * np.vdot(b, b))) * b


def part(rank: int, seed: int = 0) -> Any:
    return np.random.default_rng(10 * seed + rank).normal(size=(5, 3)) + 0.5


@with_hvd(1, 4)
def test_adasum(comm: Communicator) -> None:
    """One by one and in a group, whose tensors are combined apart; equal parts stay what they are."""
    every = [[part(rank, seed) for rank in range(comm.size)] for seed in (1, 2)]
    mine = [torch.from_numpy(each[comm.rank]) for each in every]
    found = hvd.allreduce(mine[0], op=hvd.Adasum)
    np.testing.assert_allclose(found.numpy(), combined(every[0]), rtol=1e-12)
    for each, parts in zip(hvd.grouped_allreduce(mine, op=hvd.Adasum), every, strict=True):
        np.testing.assert_allclose(each.numpy(), combined(parts), rtol=1e-12)
    same = torch.from_numpy(part(0))
    np.testing.assert_allclose(hvd.allreduce_(same.clone(), op=hvd.Adasum).numpy(), part(0), rtol=1e-12)
    assert not hvd.allreduce(torch.zeros(3), op=hvd.Adasum).any()


@with_hvd(4)
def test_adasum_optimizer(comm: Communicator) -> None:
    """The changes that the ranks' own steps make are combined."""
    torch.manual_seed(1)
    model = nn.Linear(5, 3, bias=False).double()
    copies = [copy.deepcopy(model) for _ in range(comm.size)]
    inner = [sgd(each, momentum=0.9) for each in copies]
    own = sgd(model, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), op=hvd.Adasum)
    assert type(optimizer).__name__ == "SGD"
    for step in range(3):
        inputs = [torch.from_numpy(part(rank, step).T.copy()) for rank in range(comm.size)]
        before = copies[0].weight.detach().clone()
        for each, other, x in zip(copies, inner, inputs, strict=True):
            take_step(other, each(x).square().mean())
        change = combined([(each.weight.detach() - before).numpy() for each in copies])
        with torch.no_grad():
            for each in copies:
                each.weight.copy_(before + torch.from_numpy(change))
        take_step(optimizer, model(inputs[comm.rank]).square().mean())
        torch.testing.assert_close(model.weight, copies[0].weight, rtol=1e-11, atol=1e-13)
    assert same_everywhere(comm, model.weight.tolist())


def test_batch_normalisation_is_the_adapters() -> None:
    layer = hvd.SyncBatchNorm(3, 1e-3, 0.2, False, False)
    assert isinstance(layer, multiring.torch.SyncBatchNorm)
    assert (layer.num_features, layer.eps, layer.momentum, layer.affine) == (3, 1e-3, 0.2, False)
    assert not layer.track_running_stats


@on_ranks(4)
def test_batches_of_the_job_are_normalised_together(comm: Communicator) -> None:
    """And not those of all ranks, where hvd.init() was given some."""
    layer = hvd.SyncBatchNorm(1, affine=False)
    ranks = [comm.rank % 2, comm.rank % 2 + 2]
    for _ in range(2):  # the layer outlives the job
        hvd.init(comm=ranks)
        found = layer(torch.full((2, 1), float(comm.rank)))
        torch.testing.assert_close(found, torch.full((2, 1), comm.rank - sum(ranks) / 2), rtol=1e-4, atol=0)
        hvd.shutdown()


@with_hvd()
def test_closures(comm: Communicator) -> None:
    """What a closure computes is reduced before the step; LBFGS calls it several times."""
    for make in (sgd, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)):
        model, reference = make_model(), make_model()
        own: Any = make(model)
        optimizer, alone = hvd.DistributedOptimizer(own, model.named_parameters()), make(reference)

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            found = loss(model, batch(comm.rank, 0))  # noqa: B023
            found.backward()  # type: ignore[no-untyped-call]
            return found

        def whole() -> Tensor:
            alone.zero_grad()  # noqa: B023
            found = whole_loss(reference, range(comm.size), 0, comm.size)  # noqa: B023
            found.backward()  # type: ignore[no-untyped-call]
            return found

        for _ in range(2):
            assert float(optimizer.step(closure)) > 0
            alone.step(whole)
        assert_same_model(comm, model, reference)
