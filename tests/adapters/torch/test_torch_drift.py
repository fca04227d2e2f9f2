"""Buffers are the same on all ranks after each step, and whatever else drifts is found by the check."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import SMALL, Pool, draw, make_model, squares


def make_normalised(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    model.register_buffer("shorts", torch.zeros(3, dtype=torch.float16))
    model.register_buffer("pairs", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("marks", torch.zeros(5, dtype=torch.bool))
    return model


def batch(rank: int, step: int) -> Tensor:
    return draw(100 * step + rank, 5) * (1 + rank)


def train(model: Any, rank: int, step: int) -> None:
    model.zero_grad()
    torch.autograd.backward((model(batch(rank, step)) ** 2).mean())
    model.shorts += rank + 1
    model.pairs += complex(rank, 2)
    model.marks[step] = rank == 0


def bits(model: nn.Module) -> list[bytes]:
    return [b.detach().contiguous().view(torch.uint8).numpy().tobytes() if b.dim() else str(b).encode()
            for b in model.buffers()]  # fmt: skip


def same_buffers(comm: Communicator, mode: Any) -> None:
    """After each step those of rank 0, or averages, as one process computes them."""
    model = make_normalised()
    references: Any = [make_normalised() for _ in range(comm.size)]
    hooks = multiring.torch.register_gradient_hooks(model, comm, buffers=mode, check_every=1, **SMALL)
    for step in range(4):
        train(model, comm.rank, step)
        for rank, reference in enumerate(references):
            train(reference, rank, step)
        hooks.synchronize()
        parts = [dict(reference.named_buffers()) for reference in references]
        for name, buffer in model.named_buffers():
            wanted = parts[0 if mode == "broadcast" else comm.rank][name].clone()
            if mode == "average":
                wanted = parts[0][name].clone()
                if wanted.is_floating_point() or wanted.is_complex():
                    wanted = torch.stack([part[name] for part in parts]).to(torch.complex128).mean(0)
                    wanted = (wanted if buffer.is_complex() else wanted.real).to(buffer.dtype)
            torch.testing.assert_close(buffer, wanted, rtol=1e-3 if name == "shorts" else 1e-6, atol=0)
            if mode == "broadcast":
                assert torch.equal(buffer, wanted)
        everyone = comm.allgather_object(bits(model))
        assert (everyone[0] == everyone[-1]) == (mode != "local")
        for reference in references:
            if mode != "local":  # all go on from what they have in common
                reference.load_state_dict(model.state_dict())
            for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
                assert torch.equal(mine, theirs)
    hooks.remove()


@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_buffers(ranks: Pool, mode: str) -> None:
    ranks(3).run(same_buffers, mode)


def two_forward_passes(comm: Communicator) -> None:
    """Autograd does not mind that running statistics change between a forward pass and its backward pass."""
    model = make_normalised()
    frozen = make_normalised().eval()
    for part in (model, frozen):
        hooks = multiring.torch.register_gradient_hooks(part, comm, **SMALL)
        losses = [(part(batch(comm.rank, k)) ** 2).mean() for k in range(2)]
        for loss in losses:
            torch.autograd.backward(loss)
        hooks.remove()


def test_buffers_change_between_forward_and_backward(ranks: Pool) -> None:
    ranks(2).run(two_forward_passes)


def buffers_and_uneven_data(comm: Communicator, mode: Any) -> None:
    """Ranks that have left the loop answer; the first that has not gives its buffers."""
    model: Any = make_normalised()
    hooks = multiring.torch.register_gradient_hooks(model, comm, buffers=mode, check_every=1, **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with hooks.join(optimizer):
        for step in range(2 + comm.rank):
            optimizer.zero_grad()
            with torch.no_grad():
                model.shorts.fill_(comm.rank)
            torch.autograd.backward((model(batch(comm.rank, step)) ** 2).mean())
            optimizer.step()
            active = [rank for rank in range(comm.size) if step < 2 + rank]
            first = active[0] if mode == "broadcast" else sum(active) / len(active)
            assert bool((model.shorts == first).all())
    everyone = comm.allgather_object(bits(model))
    assert all(other == everyone[0] for other in everyone)
    hooks.remove()


@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_buffers_with_uneven_data(ranks: Pool, mode: str) -> None:
    ranks(3).run(buffers_and_uneven_data, mode)


def different_shapes(comm: Communicator, when: str) -> None:
    model: Any = make_normalised()
    if when == "before" and comm.rank == 1:
        model.register_buffer("cache", torch.zeros(7))
    elif when == "later":
        model.register_buffer("cache", torch.zeros(1))
    multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for step in range(3):
        if step == 1:  # on all ranks alike: fine
            model.cache = torch.zeros(4)
        if step == 2:  # as a cache that grows with the longest sequence
            model.cache = torch.zeros(4 + comm.rank)
        train(model, comm.rank, step)


@pytest.mark.parametrize("when", ["before", "later"])
def test_buffers_of_different_shapes_are_refused(ranks: Pool, when: str) -> None:
    for rank, error in enumerate(ranks(2).run_expecting_errors(different_shapes, when)):
        assert isinstance(error, MismatchError), error
        assert 'or pass buffers="local"' in str(error)
        if when == "before" or rank == 1:
            assert "cache" in str(error)


def plateau(comm: Communicator, mode: Any) -> None:
    """Every rank evaluates the whole validation set, whose loss decides about the learning rate."""
    model = make_normalised()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.3), model, comm, buffers=mode, check_every=1, **SMALL
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    validation = draw(7, 30)
    for step in range(12):
        model.train()
        optimizer.zero_grad()
        torch.autograd.backward((model(batch(comm.rank, step)) ** 2).mean())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = float((model(validation) ** 2).mean())
        scheduler.step(loss)
    found = comm.allgather_object(([p.detach().numpy().tobytes() for p in model.parameters()], bits(model)))
    assert found[0] == found[1]
    assert optimizer.param_groups[0]["lr"] < 0.3
    optimizer.remove()


def test_a_scheduler_on_metrics_of_the_whole_set_decides_alike(ranks: Pool) -> None:
    ranks(2).run(plateau, "broadcast")


def test_and_the_check_finds_where_it_does_not(ranks: Pool) -> None:
    for error in ranks(2).run_expecting_errors(plateau, "local"):
        assert isinstance(error, MismatchError), error
        assert "lr of parameter group 0" in str(error)


def drift(comm: Communicator, what: str) -> None:
    model = make_model(seed=comm.rank if what == "no broadcast" else 0)
    rate: Any = 0.1 + 0.1 * comm.rank if what == "rate" else 0.1
    if what == "tensor rate":
        rate = torch.tensor(0.1 + 0.1 * comm.rank)
    kind = torch.optim.Adam if what == "optimizer" and comm.rank == 1 else torch.optim.SGD
    optimizer: Any = multiring.torch.DistributedOptimizer(
        kind(model.parameters(), rate), model, comm, check_every=4, **SMALL
    )
    for step in range(1, 9):
        if what == "edit" and step == 6 and comm.rank == 1:
            with torch.no_grad():
                model[2].weight[0, 0] += 1e-9
        optimizer.zero_grad()
        try:
            torch.autograd.backward(squares(model, comm.rank))
        except MismatchError as error:
            raise MismatchError(f"step {step}: {error}") from error
        optimizer.step()


@pytest.mark.parametrize(
    ("what", "step", "text"),
    [
        ("no broadcast", 2, "'parameter 0.weight'"),
        ("rate", 2, "'parameter 0.weight'"),  # the update has been made with it
        ("tensor rate", 2, "'parameter 0.weight'"),
        ("optimizer", 2, "'parameter 0.weight'"),
        ("edit", 8, "'parameter 2.weight'"),
    ],
)
def test_drift_is_an_error_on_every_rank(ranks: Pool, what: str, step: int, text: str) -> None:
    for error in ranks(2).run_expecting_errors(drift, what):
        assert isinstance(error, MismatchError), error
        assert str(error).startswith(f"step {step}: ")
        assert text in str(error)
        assert "on rank 1" in str(error)


def hyperparameters_alone(comm: Communicator, kind: str) -> None:
    """That differ before they have done anything."""
    model = make_model()
    rate: Any = torch.tensor(0.1 + comm.rank) if kind == "tensor" else 0.1 + comm.rank
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), rate), comm=comm, check_every=1, **SMALL
    )
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_hyperparameters_are_compared(ranks: Pool, kind: str) -> None:
    for error in ranks(2).run_expecting_errors(hyperparameters_alone, kind):
        assert isinstance(error, MismatchError), error
        assert "'lr of parameter group 0'" in str(error)


def two_models_in_any_order(comm: Communicator) -> None:
    """Buffers and checks of two models, whose backward passes end in another order on rank 1."""
    models = [make_normalised(k) for k in range(2)]
    hooks = [multiring.torch.register_gradient_hooks(m, comm, check_every=1, **SMALL) for m in models]
    for step in range(4):
        order = models if comm.rank == 0 else models[::-1]
        torch.autograd.backward(torch.stack([model(batch(comm.rank, step)).sum() for model in order]).sum())
        everyone = comm.allgather_object([bits(model) for model in models])
        assert everyone[0] == everyone[1]
    for hook in hooks:
        hook.remove()


def test_two_models_are_compared_in_any_order(ranks: Pool) -> None:
    ranks(2).run(two_models_in_any_order)


def new_part(comm: Communicator, with_optimizer: bool) -> None:
    model = make_model()
    if with_optimizer:
        inner = torch.optim.SGD(model.parameters(), 0.1)
        multiring.torch.DistributedOptimizer(inner, model, comm, **SMALL)
    else:
        multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    model[4] = nn.Linear(8, 2).double()
    if with_optimizer:
        inner.param_groups[0]["params"][4:] = list(model[4].parameters())
    gc.collect()
    with pytest.raises(UsageError, match=r"gradients of parameter '4.weight' are not reduced"):
        torch.autograd.backward(squares(model, comm.rank))


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_parameters_that_come_later_are_found(ranks: Pool, with_optimizer: bool) -> None:
    ranks(2).run(new_part, with_optimizer)


def frozen_layer_is_compared(comm: Communicator) -> None:
    """SyncBatchNorm has the same statistics anyway, and nothing is sent for them."""
    model: Any = multiring.torch.convert_sync_batchnorm(make_normalised(), comm)
    del model.shorts, model.pairs, model.marks
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=1, **SMALL)
    assert hooks._state is not None
    assert hooks._state._buffers is not None
    assert not hooks._state._buffers._forms
    for step in range(3):
        torch.autograd.backward((model(batch(comm.rank, step)) ** 2).mean())
    duplicate = copy.deepcopy(model.state_dict())
    everyone = comm.allgather_object([value.numpy().tobytes() for value in duplicate.values()])
    assert everyone[0] == everyone[1]
    hooks.remove()


def test_synchronised_normalisation_needs_no_buffers_sent(ranks: Pool) -> None:
    ranks(2).run(frozen_layer_is_compared)


def options_differ(comm: Communicator, what: str) -> None:
    options: Any = {"buffers": "local" if comm.rank else "average"} if what == "buffers" else {}
    options |= {"check_every": comm.rank + 1} if what == "check_every" else {}
    multiring.torch.register_gradient_hooks(make_normalised(), comm, **options)


@pytest.mark.parametrize("what", ["buffers", "check_every"])
def test_options_that_differ(ranks: Pool, what: str) -> None:
    for error in ranks(2).run_expecting_errors(options_differ, what):
        assert isinstance(error, MismatchError), error
        assert what in str(error)


def unchanged(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="buffers is 'mean'; accepted: broadcast, average, local"):
        multiring.torch.register_gradient_hooks(make_model(), comm, buffers="mean")  # type: ignore[arg-type]
    model = make_model(comm.rank)  # deliberately not the same
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=0, **SMALL)
    for _ in range(3):
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
    hooks.remove()


def test_the_check_can_be_left_out(ranks: Pool) -> None:
    ranks(2).run(unchanged)
