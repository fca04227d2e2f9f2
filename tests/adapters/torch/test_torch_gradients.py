"""All kinds of gradients: dtypes, memory layouts, sparse ones, shared parameters, compiled models."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from tests.adapters.torch.support import (
    SMALL,
    assert_gradients,
    check_steps,
    draw,
    expected,
    make_model,
    squares,
)
from tests.on_ranks import on_ranks, same_everywhere


class Mixed(nn.Module):
    """Parameters of every dtype that gradients may have, one without elements and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        kinds = (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
        )
        self.values = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.float64).to(kind))
            for shape in ((5, 3), (), (0, 4))
            for kind in kinds
        )
        self.register_buffer("integers", torch.arange(4))
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)


@on_ranks(3)
def test_mixed_dtypes(comm: Communicator) -> None:
    """Gradients are small integers, so that half types add them without rounding."""
    model = Mixed()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for step in range(2):
        model.zero_grad()
        parts = [(p * (comm.rank * 4 + step + k)).abs().sum() * 0 for k, p in enumerate(model.values)]
        parts += [(p * (comm.rank * 4 + step + k)).real.sum() for k, p in enumerate(model.values)]
        torch.autograd.backward(sum(part.double() for part in parts))  # type: ignore[misc]
        for k, parameter in enumerate(model.values):
            mean = sum(rank * 4 + step + k for rank in range(comm.size)) / comm.size
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, mean).detach())
    hooks.remove()


def make_strided() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 2)
    ).double()
    model = model.to(memory_format=torch.channels_last)
    model[4].weight = nn.Parameter(torch.randn(32, 2, dtype=torch.float64).t())
    gaps = nn.Parameter(torch.randn(4, 4, dtype=torch.float64)[:, ::2])
    model.register_parameter("gaps", gaps)
    return model


def test_memory_layouts(comm: Communicator) -> None:
    """Gradients lie like their parameters where these have no gaps."""

    def loss(model: Any, rank: int) -> Tensor:
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        return (model(x.to(memory_format=torch.channels_last)) ** 2).mean() + (model.gaps**2).sum() * rank

    model: Any = make_strided()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    wanted = expected(comm, loss, make_strided)
    for step in range(3):
        model.zero_grad(set_to_none=step == 1)
        torch.autograd.backward(loss(model, comm.rank))
        assert_gradients(model, wanted, comm)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert model[4].weight.grad.stride() == (1, 2)
    assert model.gaps.grad.is_contiguous()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.step()
    hooks.remove()


class Tied(nn.Module):
    """Embedding and output layer share their weights; a layer occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(10, 6, dtype=torch.float64)
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.again = self.layer
        self.output = nn.Linear(6, 10, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(torch.tanh(self.again(torch.tanh(self.layer(self.embedding(x))))))
        return y


def test_shared_parameters(comm: Communicator) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        return (model(torch.tensor([rank, 3, 3 + rank])) ** 2).mean()

    model = Tied()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    wanted = expected(comm, loss, Tied)
    check_steps(model, loss, wanted, comm)
    hooks.remove()


class Sparse(nn.Module):
    """Words of a sparse and of a dense table, and a table that hardly any rank looks at."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(50, 4, sparse=sparse, dtype=torch.float64)
        self.rare = nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum", dtype=torch.float64)
        self.layer = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, words: Tensor, rare: Tensor | None) -> Tensor:
        x = self.words(words).sum(0) if len(words) else torch.zeros(4, dtype=torch.float64)
        if rare is not None:
            x = x + self.rare(rare.unsqueeze(0))[0]
        y: Tensor = self.layer(torch.tanh(x))
        return y


WORDS = ([1, 7, 7, 49], [7, 3], [], [0, 1, 2])
RARE = ([5, 5, 1], None, None, [8])


@on_ranks(3)
def test_sparse_gradients_have_the_bits_of_dense_ones(comm: Communicator) -> None:
    """The same bits as dense gradients, row for row; ranks without words, and without the rare table."""
    models = [Sparse(True), Sparse(False)]

    handles = [multiring.torch.register_gradient_hooks(model, comm, **SMALL) for model in models]
    for step in range(3):
        place = (comm.rank + step) % 4
        for model, hooks in zip(models, handles, strict=True):
            if step != 2:
                model.zero_grad()
            words, rare = torch.tensor(WORDS[place], dtype=torch.int64), RARE[place]
            with hooks.no_sync() if step == 1 else nullcontext():
                loss = (model(words, None if rare is None else torch.tensor(rare)) ** 2).sum()
                torch.autograd.backward(loss + model.layer.weight.sum() * 0 + model.words.weight[0, 0] * 0)
        if step == 1:
            continue
        for name in ("words", "rare"):
            found, wanted = (getattr(model, name).weight.grad for model in models)
            assert (found is None) == (wanted is None)
            if found is not None:
                assert found.is_sparse
                assert found.is_coalesced()
                assert torch.equal(found.to_dense(), wanted)
                parts = (found.indices(), found.values())
                assert same_everywhere(comm, [part.numpy().tobytes() for part in parts])
    norms = [multiring.torch.clip_grad_norm_(model.parameters(), 1e-3) for model in models]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
    assert torch.allclose(models[0].words.weight.grad.to_dense(), models[1].words.weight.grad, rtol=1e-12)  # type: ignore[union-attr,arg-type]
    for hooks in handles:
        hooks.remove()


@on_ranks(3)
def test_a_model_of_sparse_parameters_alone(comm: Communicator) -> None:
    """No dense parameter at all, no gradient anywhere in the first step, join, a sparse optimizer."""
    table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)
    nn.init.zeros_(table.weight)
    hooks = multiring.torch.register_gradient_hooks(table, comm)
    hooks.synchronize()
    assert table.weight.grad is None
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.5)
    with hooks.join(optimizer):
        for step in range(1 + comm.rank):
            optimizer.zero_grad()
            torch.autograd.backward(table(torch.tensor([comm.rank, 5])).sum())
            assert table.weight.grad is not None
            # Rank 0 has left after its first batch: the average of the rest is over one rank less.
            active = comm.size if step == 0 else comm.size - step
            torch.testing.assert_close(table.weight.grad.to_dense()[5, 0].item(), 1.0)
            torch.testing.assert_close(table.weight.grad.to_dense()[comm.rank, 0].item(), 1.0 / active)
            optimizer.step()
    assert same_everywhere(comm, table.weight.detach().numpy().tobytes())
    assert optimizer.state[table.weight]["step"] == comm.size
    hooks.remove()


def test_two_models_of_sparse_parameters(comm: Communicator) -> None:
    """Ranks differentiate them in different order; neither waits for the other."""
    torch.manual_seed(0)
    tables = [nn.Embedding(4, 2, sparse=True, dtype=torch.float64) for _ in range(2)]
    handles = [multiring.torch.register_gradient_hooks(table, comm) for table in tables]
    for step in range(3):
        losses = []
        for table in tables if comm.rank == 0 else reversed(tables):
            table.zero_grad()
            losses.append(table(torch.tensor([comm.rank, 3])).sum() * (step + 1))
        torch.autograd.backward(losses[0] + losses[1])
        for table in tables:
            assert table.weight.grad is not None
            wanted = torch.tensor([0.5, 0.5, 0.0, 1.0], dtype=torch.float64) * (step + 1)
            assert torch.equal(table.weight.grad.to_dense()[:, 0], wanted)
    for hooks in handles:
        hooks.remove()


def test_sparse_gradients_nobody_announced(comm: Communicator) -> None:
    """A sparse gradient nobody announced becomes dense; an announced one that comes dense becomes sparse."""
    table = nn.ParameterDict({"table": torch.zeros(6, 2)})
    for names in ((), ("table",)):
        table.zero_grad()
        hooks = multiring.torch.register_gradient_hooks(table, comm, sparse_parameters=names)
        rows = torch.tensor([comm.rank, 5])
        loss = nn.functional.embedding(rows, table["table"], sparse=not names).sum()
        torch.autograd.backward(loss)
        gradient = table["table"].grad
        assert gradient is not None
        assert gradient.is_sparse == bool(names)
        wanted = torch.zeros(6, 2)
        wanted[: comm.size] = 1 / comm.size
        wanted[5] += 1
        torch.testing.assert_close(gradient.to_dense(), wanted)
        hooks.remove()
    with pytest.raises(multiring.UsageError, match="names \\['tabel'\\]"):
        multiring.torch.register_gradient_hooks(table, comm, sparse_parameters=["tabel"])


@pytest.mark.full
def test_compiled_models(comm: Communicator) -> None:
    """Rank 1 compiles its model, rank 0 does not: names agree all the same."""
    model: Any = make_model()
    runner = torch.compile(model, backend="aot_eager") if comm.rank == 1 else model
    wanted = expected(comm, squares)
    for hooked in (model, runner):
        hooks = multiring.torch.register_gradient_hooks(hooked, comm, **SMALL)
        for _ in range(2):
            model.zero_grad()
            torch.autograd.backward((runner(draw(comm.rank)) ** 2).mean())
            assert_gradients(model, wanted, comm)
        hooks.remove()
