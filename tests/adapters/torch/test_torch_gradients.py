"""All kinds of gradients: dtypes, memory layouts, sparse ones, shared parameters, compiled models."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from tests.adapters.torch.support import (
    assert_gradients,
    assert_same_weights,
    backward,
    check_steps,
    draw,
    expected,
    make_model,
    register,
    squares,
    step_with,
    update,
)
from tests.on_ranks import on_ranks, same_everywhere


def make_mixed() -> Any:
    """Parameters of every dtype that gradients may have, also without elements and without dimensions."""
    torch.manual_seed(3)
    real = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    model = nn.ParameterList(
        nn.Parameter(torch.randn(shape, dtype=torch.float64).to(kind))
        for shape in ((5, 3), (), (0, 4))
        for kind in (*real, torch.complex64, torch.complex128)
    )
    model.register_buffer("integers", torch.arange(4))
    model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    return model


@on_ranks(3)
def test_mixed_dtypes(comm: Communicator) -> None:
    """Gradients are small integers, so that half types add them without rounding."""
    model = make_mixed()
    register(model, comm)
    for step in range(2):
        model.zero_grad()
        parts = [(p * (comm.rank * 4 + step + k)).abs().sum() * 0 for k, p in enumerate(model)]
        parts += [(p * (comm.rank * 4 + step + k)).real.sum() for k, p in enumerate(model)]
        torch.autograd.backward(sum(part.double() for part in parts))  # type: ignore[misc]
        for k, parameter in enumerate(model):
            mean = sum(rank * 4 + step + k for rank in range(comm.size)) / comm.size
            assert parameter.grad.dtype == parameter.dtype
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, mean).detach())


def make_strided() -> Any:
    """Layers whose gradients lie in other orders of elements than row-major, and a parameter with gaps."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(32, 2)]
    model: Any = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[4].weight = nn.Parameter(torch.randn(32, 2, dtype=torch.float64).t())
    model.register_parameter("gaps", nn.Parameter(torch.randn(4, 4, dtype=torch.float64)[:, ::2]))
    return model


def test_memory_layouts(comm: Communicator) -> None:
    """Gradients lie like their parameters where these have no gaps, but for those that the program gives."""
    layout = torch.channels_last

    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank, 36).view(2, 3, 6, 6).to(memory_format=layout)
        return (model(x) ** 2).mean() + (model.gaps**2).sum() * rank

    model = make_strided()
    hooks = register(model, comm)
    wanted = expected(comm, loss, make_strided)
    for step in range(4):
        layout = torch.channels_last if step < 2 else torch.contiguous_format
        backward(model, comm.rank, loss, keep=step % 2 == 0)
        assert_gradients(model, wanted, comm)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert model[4].weight.grad.stride() == (1, 2)
    assert model.gaps.grad.is_contiguous()
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()
    for parameter in model.parameters():
        memory = torch.full((2 * parameter.numel(),), float(comm.rank), dtype=torch.float64)
        strides = [2 * stride for stride in parameter.detach().contiguous().stride()]
        parameter.grad = memory.as_strided(parameter.shape, strides)
    given = [parameter.grad for parameter in model.parameters()]
    hooks.synchronize()
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        assert parameter.grad is gradient
        assert bool((gradient == sum(range(comm.size)) / comm.size).all())


def make_tied(*, sparse: bool = False) -> nn.Module:
    """Embedding and output layer share their weights; a layer occurs twice."""
    torch.manual_seed(2)
    embedding, layer = nn.Embedding(10, 6, sparse=sparse), nn.Linear(6, 6)
    output = nn.Linear(6, 10, bias=False)
    output.weight = embedding.weight
    return nn.Sequential(embedding, layer, nn.Tanh(), layer, nn.Tanh(), output).double()


def test_shared_parameters(comm: Communicator) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        return (model(torch.tensor([rank, 3, 3 + rank])) ** 2).mean()

    model = make_tied()
    register(model, comm)
    check_steps(model, loss, expected(comm, loss, make_tied), comm)


WORDS = ([1, 7, 7, 49], [7, 3], [], [0, 1, 2])
RARE = ([5, 5, 1], [], [], [8])


def make_tables(sparse: bool) -> nn.ModuleDict:
    torch.manual_seed(4)
    words, rare = nn.Embedding(50, 4, sparse=sparse), nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum")
    return nn.ModuleDict({"words": words, "rare": rare, "layer": nn.Linear(4, 2)}).double()


def look_up(model: nn.ModuleDict, place: int) -> Tensor:
    """A loss of words, and of a table that hardly any rank looks at."""
    words, rare = WORDS[place], RARE[place]
    x = model["words"](torch.tensor(words)).sum(0) if words else torch.zeros(4, dtype=torch.float64)
    if rare:
        x = x + model["rare"](torch.tensor([rare]))[0]
    loss: Tensor = (model["layer"](torch.tanh(x)) ** 2).sum()
    return loss


@on_ranks(3)
def test_sparse_gradients_have_the_bits_of_dense_ones(comm: Communicator) -> None:
    """The same bits as dense gradients, row for row; ranks without words, and without the rare table."""
    models: list[Any] = [make_tables(True), make_tables(False)]
    handles = [register(model, comm) for model in models]
    for step in range(3):
        place = (comm.rank + step) % 4
        for model, hooks in zip(models, handles, strict=True):
            if step != 2:
                model.zero_grad()
            with hooks.no_sync() if step == 1 else nullcontext():
                torch.autograd.backward(look_up(model, place))
        if step == 1:
            continue
        for name in ("words", "rare"):
            found, wanted = (model[name].weight.grad for model in models)
            assert (found is None) == (wanted is None)
            if found is not None:
                assert found.is_sparse
                assert found.is_coalesced()
                assert torch.equal(found.to_dense(), wanted)
                parts = (found.indices(), found.values())
                assert same_everywhere(comm, [part.numpy().tobytes() for part in parts])
    norms = [multiring.torch.clip_grad_norm_(model.parameters(), 1e-3) for model in models]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
    clipped, wanted = (model["words"].weight.grad for model in models)
    assert torch.allclose(clipped.to_dense(), wanted, rtol=1e-12)


@on_ranks(3)
def test_a_model_of_sparse_parameters_alone(comm: Communicator) -> None:
    """No dense parameter at all, no gradient anywhere in the first step, join, a sparse optimizer."""
    table: Any = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    nn.init.zeros_(table.weight)
    hooks = multiring.torch.register_gradient_hooks(table, comm)
    hooks.synchronize()
    assert table.weight.grad is None
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.5)
    with hooks.join(optimizer):
        for step in range(1 + comm.rank):
            optimizer.zero_grad()
            torch.autograd.backward(table(torch.tensor([comm.rank, 5])).sum())
            # Rank 0 has left after its first batch: the average of the rest is over one rank less.
            active = comm.size if step == 0 else comm.size - step
            torch.testing.assert_close(table.weight.grad.to_dense()[5, 0].item(), 1.0)
            torch.testing.assert_close(table.weight.grad.to_dense()[comm.rank, 0].item(), 1.0 / active)
            optimizer.step()
    assert same_everywhere(comm, table.weight.detach().numpy().tobytes())
    assert optimizer.state[table.weight]["step"] == comm.size


def test_two_models_of_sparse_parameters(comm: Communicator) -> None:
    """Ranks differentiate them in different order; neither waits for the other."""
    torch.manual_seed(0)
    tables: list[Any] = [nn.Embedding(4, 2, sparse=True, dtype=torch.float64) for _ in range(2)]
    for table in tables:
        register(table, comm)
    for step in range(3):
        losses = []
        for table in tables if comm.rank == 0 else reversed(tables):
            table.zero_grad()
            losses.append(table(torch.tensor([comm.rank, 3])).sum() * (step + 1))
        torch.autograd.backward(losses[0] + losses[1])
        for table in tables:
            wanted = torch.tensor([0.5, 0.5, 0.0, 1.0], dtype=torch.float64) * (step + 1)
            assert torch.equal(table.weight.grad.to_dense()[:, 0], wanted)


def test_sparse_gradients_nobody_announced(comm: Communicator) -> None:
    """A sparse gradient nobody announced becomes dense; an announced one that comes dense stays so."""
    table: Any = nn.ParameterDict({"table": torch.zeros(6, 2)})
    for names in ((), ("table",)):
        table.zero_grad()
        hooks = multiring.torch.register_gradient_hooks(table, comm, sparse_parameters=names)
        rows = torch.tensor([comm.rank, 5])
        torch.autograd.backward(nn.functional.embedding(rows, table["table"], sparse=not names).sum())
        gradient = table["table"].grad
        assert not gradient.is_sparse
        wanted = torch.zeros(6, 2)
        wanted[: comm.size] = 1 / comm.size
        wanted[5] += 1
        torch.testing.assert_close(gradient.to_dense(), wanted)
        hooks.remove()
    with pytest.raises(multiring.UsageError, match="names \\['tabel'\\]"):
        multiring.torch.register_gradient_hooks(table, comm, sparse_parameters=["tabel"])


def test_a_sparse_embedding_with_the_weight_of_a_linear_layer(comm: Communicator) -> None:
    """Its gradient is dense: optimizers for dense gradients take what comes."""

    def loss(model: Any, rank: int) -> Tensor:
        return nn.functional.cross_entropy(model(torch.arange(rank, rank + 3) % 10), torch.arange(3))

    model, reference = make_tied(sparse=True), make_tied(sparse=True)
    optimizer, alone = (torch.optim.Adam(m.parameters(), 0.1) for m in (model, reference))
    register(model, comm, check_every=1)
    for _ in range(3):
        update(optimizer, loss(model, comm.rank))
        step_with(alone, expected(comm, loss, lambda: copy.deepcopy(reference)))
        alone.zero_grad()
    assert_same_weights(model, reference)


@pytest.mark.full
def test_compiled_models(comm: Communicator) -> None:
    """Rank 1 compiles its model, rank 0 does not: names agree all the same."""
    model: Any = make_model()
    runner = torch.compile(model, backend="aot_eager") if comm.rank == 1 else model
    wanted = expected(comm, squares)
    for hooked in (model, runner):
        hooks = register(hooked, comm)
        check_steps(model, lambda _, rank: (runner(draw(rank)) ** 2).mean(), wanted, comm)
        hooks.remove()
