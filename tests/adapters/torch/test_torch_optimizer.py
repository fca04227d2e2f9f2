"""The wrapped optimizer: schedulers, scaling, clipping, closures, accumulation, saving."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.support import SMALL, assert_same_weights, draw, make_model
from tests.on_ranks import on_ranks

Step = Callable[[Any, nn.Module, Callable[[], Tensor]], None]


def whole_loss(model: nn.Module, size: int, step: int) -> Tensor:
    """Average over ranks of `own_loss`."""
    return (model(torch.cat([draw(100 * step + rank) for rank in range(size)])) ** 2).mean()


def own_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(draw(100 * step + rank)) ** 2).mean()


def plain_step(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss())
    optimizer.step()


def clipped_step(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """As programs for Horovod do it."""
    optimizer.zero_grad()
    torch.autograd.backward(loss())
    if isinstance(optimizer, multiring.torch.DistributedOptimizer):
        optimizer.synchronize()
        norm = multiring.torch.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    assert norm > 0.01


def closure_step(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        torch.autograd.backward(value)
        return value

    optimizer.step(closure)


def scaled_step(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.autograd.backward(scaler.scale(loss()))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model[:2].parameters()), "lr": 0.2}, {"params": list(model[2:].parameters())}]  # type: ignore[index]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def make_fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def make_lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (make_sgd, plain_step),
        (make_fused_adam, clipped_step),
        (make_sgd, closure_step),
        (make_lbfgs, closure_step),
        (make_fused_adam, scaled_step),
    ],
)
@on_ranks(1, 3)
def test_ranks_train_like_one(
    comm: Communicator, make: Callable[[nn.Module], torch.optim.Optimizer], step: Step
) -> bytes:
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(make(model), model, comm, **SMALL)
    alone = make(reference)
    for k in range(5):
        step(optimizer, model, lambda k=k: own_loss(model, comm.rank, k))  # type: ignore[misc]
        step(alone, reference, lambda k=k: whole_loss(reference, comm.size, k))  # type: ignore[misc]
        assert_same_weights(model, reference, rtol=1e-8)
    optimizer.remove()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


@pytest.mark.parametrize("kind", ["plateau", "chain"])
@pytest.mark.filterwarnings("error")
def test_schedulers(comm: Communicator, kind: str) -> None:
    """Schedulers take the wrapper or the wrapped optimizer."""
    rates = []
    for on_wrapper in (True, False):
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        optimizer = multiring.torch.DistributedOptimizer(inner, model, comm)
        assert isinstance(optimizer, torch.optim.Optimizer)
        target: torch.optim.Optimizer = optimizer if on_wrapper else inner
        schedulers: dict[str, Callable[[], Any]] = {
            "plateau": lambda t=target: lr_scheduler.ReduceLROnPlateau(t, patience=1),  # type: ignore[misc]
            "chain": lambda t=target: lr_scheduler.SequentialLR(  # type: ignore[misc]
                t, [lr_scheduler.LinearLR(t), lr_scheduler.CosineAnnealingLR(t, 5)], [3]
            ),
        }
        scheduler = schedulers[kind]()
        history = []
        for k in range(6):
            plain_step(optimizer, model, lambda k=k, m=model: own_loss(m, comm.rank, k))  # type: ignore[misc]
            scheduler.step(*([1.0] if kind == "plateau" else []))
            history.append(optimizer.param_groups[0]["lr"])
            assert inner.param_groups[0]["lr"] == history[-1]
        rates.append(history)
        optimizer.remove()
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_several_backward_passes_per_step(comm: Communicator) -> None:
    """Gradients of several passes are added; a step before the last pass reduces what there is."""
    passes = 3
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        make_sgd(model), model, comm, backward_passes_per_step=passes, **SMALL
    )
    alone = make_sgd(reference)
    for step, count in enumerate([passes, passes, 1, 2 * passes]):
        optimizer.zero_grad()
        alone.zero_grad()
        rounds = optimizer._hooks.rounds
        for k in range(count):
            torch.autograd.backward(own_loss(model, comm.rank, 10 * step + k))
            torch.autograd.backward(whole_loss(reference, comm.size, 10 * step + k))
        optimizer.step()
        alone.step()
        assert optimizer._hooks.rounds - rounds == max(1, count // passes)
        assert_same_weights(model, reference)
    optimizer.remove()


def test_zero_grad_begins_a_group_anew(comm: Communicator) -> None:
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        make_sgd(model), model, comm, backward_passes_per_step=2, op="sum", **SMALL
    )
    alone = make_sgd(reference)
    for _ in range(2):
        torch.autograd.backward(own_loss(model, comm.rank, 9))
        optimizer.zero_grad()
        alone.zero_grad()
        for k in range(2):
            torch.autograd.backward(own_loss(model, comm.rank, k))
            torch.autograd.backward(whole_loss(reference, comm.size, k) * comm.size)
        optimizer.step()
        alone.step()
        optimizer.zero_grad()
        assert_same_weights(model, reference)
    optimizer.remove()


def test_a_rank_without_a_loss_takes_part(comm: Communicator) -> None:
    """A rank whose loss does not involve the model makes up for it in step()."""
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(make_sgd(model), model, comm, **SMALL)
    alone = make_sgd(reference)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        if comm.rank == 0 or step == 1:
            torch.autograd.backward(own_loss(model, comm.rank, step))
        optimizer.step()
        losses = [own_loss(reference, rank, step) for rank in range(comm.size) if rank == 0 or step == 1]
        torch.autograd.backward(torch.stack(losses).sum() / comm.size)
        alone.step()
        assert_same_weights(model, reference)
    optimizer.remove()


def test_it_looks_like_the_wrapped_optimizer(comm: Communicator) -> None:
    model = make_model()
    inner = make_sgd(model)
    optimizer = multiring.torch.DistributedOptimizer(inner, model.named_parameters(), comm)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.wrapped is inner
    assert repr(inner) in repr(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    plain_step(optimizer, model, lambda: own_loss(model, comm.rank, 0))
    assert calls == ["pre", "post"]
    saved = copy.deepcopy(optimizer.state_dict())
    plain_step(optimizer, model, lambda: own_loss(model, comm.rank, 1))
    optimizer.load_state_dict(saved)
    key = next(iter(optimizer.state))
    assert torch.equal(optimizer.state[key]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    with pytest.raises(UsageError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_attribute
    optimizer.remove()
    plain_step(optimizer, model, lambda: own_loss(model, comm.rank, 2))
    found = comm.allgather_object([p.detach().numpy().tobytes() for p in model.parameters()])
    assert found[0] != found[1]  # everyone for itself now


def test_parameter_groups_can_be_added(comm: Communicator) -> None:
    """A new layer is trained along after add_param_group."""
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model[2:].parameters(), lr=0.1), model, comm, **SMALL
    )
    alone = torch.optim.SGD(reference[2:].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(model[:2].parameters()), "lr": 0.3})
            alone.add_param_group({"params": list(reference[:2].parameters()), "lr": 0.3})
        plain_step(optimizer, model, lambda k=step: own_loss(model, comm.rank, k))  # type: ignore[misc]
        plain_step(alone, reference, lambda k=step: whole_loss(reference, comm.size, k))  # type: ignore[misc]
        assert_same_weights(model, reference)
    optimizer.remove()


def test_two_optimizers_for_one_model(comm: Communicator) -> None:
    """Two optimizers for two parts of one model."""
    model, reference = make_model(), make_model()
    parts = [slice(0, 2), slice(2, None)]
    optimizers = [
        multiring.torch.DistributedOptimizer(
            torch.optim.SGD(model[part].parameters(), 0.1), model, comm, **SMALL
        )
        for part in parts
    ]
    alone = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(own_loss(model, comm.rank, step))
        for optimizer in optimizers:
            optimizer.step()
        plain_step(alone, reference, lambda k=step: whole_loss(reference, comm.size, k))  # type: ignore[misc]
        assert_same_weights(model, reference)
    for optimizer in optimizers:
        optimizer.remove()


def test_refused(comm: Communicator) -> None:
    model = make_model()
    with pytest.raises(UsageError, match="6 of the optimizer's 6 parameters are not among the named ones"):
        multiring.torch.DistributedOptimizer(make_sgd(model), make_model(), comm)
    with pytest.raises(UsageError, match="0 backward passes per step"):
        multiring.torch.DistributedOptimizer(make_sgd(model), model, comm, backward_passes_per_step=0)
    with pytest.raises(UsageError, match="op is 'max'"):
        multiring.torch.DistributedOptimizer(make_sgd(model), model, comm, op="max")  # type: ignore[arg-type]
    unnamed = multiring.torch.DistributedOptimizer(make_sgd(model), comm=comm)
    with pytest.raises(UsageError, match=r"'group0\.parameter0' already has"):
        multiring.torch.DistributedOptimizer(make_sgd(model), comm=comm)
    unnamed.remove()
