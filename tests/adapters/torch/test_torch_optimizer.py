"""The wrapped optimizer: schedulers, scaling, clipping, closures, accumulation, saving, compression."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import multiring.torch
from multiring import Communicator, TopK
from multiring.errors import UsageError
from tests.adapters.torch.support import (
    assert_same_weights,
    bits,
    draw,
    expected,
    gradients_of,
    make_hooked,
    make_model,
    register,
    squares,
    update,
    wrap,
)
from tests.on_ranks import on_ranks, refuses, same_everywhere

Make = Callable[[nn.Sequential], torch.optim.Optimizer]
Step = Callable[[Any, nn.Module, Callable[[], Tensor]], None]


def whole_loss(model: nn.Module, size: int, step: int) -> Tensor:
    """Average over ranks of `own_loss`."""
    return (model(torch.cat([draw(100 * step + rank) for rank in range(size)])) ** 2).mean()


def own_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return squares(model, 100 * step + rank)


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


def make_sgd(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [{"params": list(model[:2].parameters()), "lr": 0.2}, {"params": list(model[2:].parameters())}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def make_fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def make_lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def make_pair(comm: Communicator, make: Make = make_sgd, **options: Any) -> tuple[Any, ...]:
    """A model with its wrapped optimizer, and both for one process."""
    model, reference = make_model(), make_model()
    return model, wrap(make(model), model, comm, **options), reference, make(reference)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (make_fused_adam, clipped_step),
        (make_sgd, closure_step),
        (make_lbfgs, closure_step),
        (make_fused_adam, scaled_step),
    ],
)
@on_ranks(1, 3)
def test_ranks_train_like_one(comm: Communicator, make: Make, step: Step) -> list[bytes | None]:
    model, optimizer, reference, alone = make_pair(comm, make)
    for k in range(5):
        step(optimizer, model, lambda k=k: own_loss(model, comm.rank, k))  # type: ignore[misc]
        step(alone, reference, lambda k=k: whole_loss(reference, comm.size, k))  # type: ignore[misc]
        assert_same_weights(model, reference, rtol=1e-8)
    return bits(model.parameters())


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
        scheduler: Any
        if kind == "plateau":
            scheduler = lr_scheduler.ReduceLROnPlateau(target, patience=1)
        else:
            parts = [lr_scheduler.LinearLR(target), lr_scheduler.CosineAnnealingLR(target, 5)]
            scheduler = lr_scheduler.SequentialLR(target, parts, [3])
        history = []
        for k in range(6):
            update(optimizer, own_loss(model, comm.rank, k))
            scheduler.step(*([1.0] if kind == "plateau" else []))
            history.append(optimizer.param_groups[0]["lr"])
            assert inner.param_groups[0]["lr"] == history[-1]
        rates.append(history)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_several_backward_passes_per_step(comm: Communicator) -> None:
    """Gradients of several passes are added; a step before the last pass reduces what there is, and
    zero_grad() begins anew."""
    passes = 3
    model, optimizer, reference, alone = make_pair(comm, backward_passes_per_step=passes)
    for step, count in enumerate([passes, passes, 1, 2 * passes]):
        torch.autograd.backward(own_loss(model, comm.rank, 9))
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


def test_a_rank_without_a_loss_takes_part(comm: Communicator) -> None:
    """A rank whose loss does not involve the model makes up for it in step()."""
    model, optimizer, reference, alone = make_pair(comm)
    for step in range(3):
        optimizer.zero_grad()
        if comm.rank == 0 or step == 1:
            torch.autograd.backward(own_loss(model, comm.rank, step))
        optimizer.step()
        losses = [own_loss(reference, rank, step) for rank in range(comm.size) if rank == 0 or step == 1]
        update(alone, torch.stack(losses).sum() / comm.size)
        assert_same_weights(model, reference)


def test_it_looks_like_the_wrapped_optimizer(comm: Communicator) -> None:
    model = make_model()
    inner: Any = make_sgd(model)
    optimizer = multiring.torch.DistributedOptimizer(inner, model.named_parameters(), comm)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.wrapped is inner
    assert repr(inner) in repr(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    update(optimizer, own_loss(model, comm.rank, 0))
    assert calls == ["pre", "post"]
    saved = copy.deepcopy(optimizer.state_dict())
    update(optimizer, own_loss(model, comm.rank, 1))
    optimizer.load_state_dict(saved)
    key = next(iter(optimizer.state))
    assert torch.equal(optimizer.state[key]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    refuses(UsageError, "state_dict", copy.deepcopy, optimizer)
    optimizer.state = defaultdict(dict)  # momentum starts afresh
    assert not inner.state
    assert optimizer.state is inner.state
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    assert inner.param_groups[0]["lr"] == 0.5
    optimizer.note = "ours"
    assert inner.note == "ours"
    del optimizer.note
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_attribute
    optimizer.remove()
    update(optimizer, own_loss(model, comm.rank, 2))
    assert not same_everywhere(comm, bits(model.parameters()))  # everyone for itself now


def test_parameter_groups_can_be_added(comm: Communicator) -> None:
    """A new layer is trained along after add_param_group."""
    model, optimizer, reference, alone = make_pair(comm, lambda m: torch.optim.SGD(m[2:].parameters(), 0.1))
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(model[:2].parameters()), "lr": 0.3})
            alone.add_param_group({"params": list(reference[:2].parameters()), "lr": 0.3})
        update(optimizer, own_loss(model, comm.rank, step))
        update(alone, whole_loss(reference, comm.size, step))
        assert_same_weights(model, reference)


def test_two_optimizers_for_one_model(comm: Communicator) -> None:
    """Two optimizers for two parts of one model."""
    model, reference = make_model(), make_model()
    parts = [torch.optim.SGD(model[part].parameters(), 0.1) for part in (slice(0, 2), slice(2, None))]
    optimizers = [wrap(part, model, comm) for part in parts]
    alone = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(own_loss(model, comm.rank, step))
        for optimizer in optimizers:
            optimizer.step()
        update(alone, whole_loss(reference, comm.size, step))
        assert_same_weights(model, reference)


def test_refused(comm: Communicator) -> None:
    model = make_model()
    not_named = "6 of the optimizer's 6 parameters are not among the named ones"
    refuses(UsageError, not_named, wrap, make_sgd(model), make_model(), comm)
    with pytest.raises(UsageError, match="0 backward passes per step"):
        wrap(make_sgd(model), model, comm, backward_passes_per_step=0)
    refuses(UsageError, "op is 'max'", wrap, make_sgd(model), model, comm, op="max")
    unnamed = multiring.torch.DistributedOptimizer(make_sgd(model), comm=comm)
    with pytest.raises(UsageError, match=r"'group0\.parameter0' already has"):
        multiring.torch.DistributedOptimizer(make_sgd(model), comm=comm)
    unnamed.remove()


def test_what_compression_keeps_back_comes_later(comm: Communicator) -> None:
    """The same gradients step after step: what has been received in all, and what is kept on average over the
    ranks, is all of them. Parameters are frozen, and thawed again, meanwhile."""
    options = {"bucket_bytes": 64, "compression": TopK(0.2)}
    model, hooks = make_hooked(comm, **options)
    wanted = expected(comm, squares)
    names = [name for name, _ in model.named_parameters()]
    received = [torch.zeros_like(parameter) for parameter in model.parameters()]
    steps = [0] * len(names)
    frozen = names.index("2.weight")
    for step in range(6):
        list(model.parameters())[frozen].requires_grad_(step % 3 != 2)
        model.zero_grad()
        if step == 1:  # in two passes
            with hooks.no_sync():
                (0.25 * squares(model, comm.rank)).backward()
        (squares(model, comm.rank) * (0.75 if step == 1 else 1.0)).backward()
        for index, gradient in enumerate(gradients_of(model)):
            if gradient is not None:
                received[index] += gradient
                steps[index] += 1
        if step == 2:  # as a checkpoint is taken up, while a parameter is frozen
            state = {name: kept.clone() for name, kept in hooks.residuals().items()}
            hooks.remove()
            hooks = register(model, comm, **options)
            with pytest.raises(UsageError, match=r"'2.weight' with 3 elements .* has 64 elements"):
                hooks.load_residuals({names[frozen]: torch.zeros(3)})
            hooks.load_residuals(state)
    assert steps == [4 if index == frozen else 6 for index in range(len(names))]
    for index, name in enumerate(names):
        kept = hooks.residuals()[name].clone()
        assert kept.abs().sum() > 0, name
        comm.allreduce(kept, "average", out=kept)
        total = received[index] + kept.reshape(received[index].shape)
        torch.testing.assert_close(total, steps[index] * wanted[index], rtol=1e-12, atol=1e-14)


def test_a_parameter_group_that_is_added_keeps_what_was_kept_back(comm: Communicator) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model[2:].parameters(), 0.2), model, comm, compression=TopK(0.1))
    for step in range(4):
        if step == 2:
            before = {name: kept.clone() for name, kept in optimizer.residuals().items()}
            optimizer.add_param_group({"params": list(model[:2].parameters())})
            after = optimizer.residuals()
            assert set(before) <= set(after)
            assert all(torch.equal(after[name], kept) for name, kept in before.items())
        update(optimizer, squares(model, comm.rank))
    assert same_everywhere(comm, bits(model.parameters()))
