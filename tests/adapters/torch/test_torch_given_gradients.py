"""Gradients that the program puts into `p.grad` itself, and what it does to those that were reduced."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import (
    assert_gradients,
    backward,
    bits,
    draw,
    expected,
    make_hooked,
    make_model,
    make_wrapped,
    register,
    squares,
    wrap,
)
from tests.on_ranks import all_raise, on_ranks, same_everywhere


def own_gradients(model: nn.Module, rank: int) -> list[tuple[Any, Tensor]]:
    """Each parameter and its gradient, which autograd does not accumulate."""
    parameters = list(model.parameters())
    return list(zip(parameters, torch.autograd.grad(squares(model, rank), parameters), strict=True))


def by_autograd_grad(model: nn.Module, rank: int) -> None:
    for parameter, gradient in own_gradients(model, rank):
        parameter.grad = gradient


def by_torch_func(model: nn.Module, rank: int) -> None:
    def loss(parameters: dict[str, Tensor]) -> Any:
        return (torch.func.functional_call(model, parameters, (draw(rank),)) ** 2).mean()

    for name, gradient in torch.func.grad(loss)(dict(model.named_parameters())).items():
        model.get_parameter(name).grad = gradient


def into_the_same_tensors(model: nn.Module, rank: int) -> None:
    """Manual accumulation into gradients that the program keeps."""
    for parameter, gradient in own_gradients(model, rank):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        parameter.grad += gradient


def through_data(model: nn.Module, rank: int) -> None:
    """As old programs do it: the tensor stays, its memory is another."""
    for parameter, gradient in own_gradients(model, rank):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad.data = gradient


def some_by_backward(model: nn.Module, rank: int) -> None:
    """The first layers' gradients come from backward(), the last one's are given."""
    gradients = own_gradients(model, rank)
    torch.autograd.backward(squares(model, rank), inputs=list(model.parameters())[:4])
    for parameter, gradient in gradients[4:]:
        parameter.grad = gradient


def replaced_after_backward(model: nn.Module, rank: int) -> None:
    """What backward() has reduced gives way to gradients of this rank."""
    torch.autograd.backward(squares(model, rank + 10))
    by_autograd_grad(model, rank)


def on_one_rank(model: nn.Module, rank: int) -> None:
    by_autograd_grad(model, rank) if rank == 0 else torch.autograd.backward(squares(model, rank))


GIVE = [by_autograd_grad, by_torch_func, into_the_same_tensors, through_data]


@pytest.mark.parametrize("give", [*GIVE, some_by_backward, replaced_after_backward, on_one_rank])
def test_step_reduces_gradients_that_the_program_gives(
    comm: Communicator, give: Callable[[nn.Module, int], None]
) -> None:
    wanted = expected(comm, squares)
    for keep in (False, True):
        model, optimizer = make_wrapped(comm, 0.0)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=not keep)
            give(model, comm.rank)
            optimizer.step()
            assert_gradients(model, wanted, comm)


@all_raise(MismatchError, "gradients replaced by the program")
def test_a_gradient_that_is_replaced_on_one_rank_only(comm: Communicator) -> None:
    """The others do not know of it: their next reduction meets the comparison. Errors say what it is."""
    model, optimizer = make_wrapped(comm)
    try:
        for _ in range(2):
            torch.autograd.backward(squares(model, comm.rank))
            if comm.rank == 0:
                by_autograd_grad(model, 0)
            optimizer.step()
    except MismatchError as error:
        assert comm.rank > 0 or "another gradient of '0.weight' into p.grad" in str(error)
        raise


@on_ranks(3)
def test_synchronize_reduces_them_once(comm: Communicator) -> None:
    model, hooks = make_hooked(comm, average=False)
    wanted = [gradient * comm.size for gradient in expected(comm, squares)]
    for give in GIVE:
        give(model, comm.rank)
        hooks.synchronize()
        assert_gradients(model, wanted, comm)
        for parameter in model.parameters():
            parameter.grad = parameter.grad  # the same tensor: nothing new
        hooks.synchronize()
        assert_gradients(model, wanted, comm)


@pytest.mark.parametrize("in_place", [True, False])
def test_edits_of_reduced_gradients_are_not_reduced(comm: Communicator, in_place: bool) -> None:
    """What every rank makes of a sum is not added up again, by step() or by the next backward(). Edits in
    place send nothing: rank 1 makes its step when rank 0 has made its own."""
    model: Any = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.0), model, comm, op="sum")
    wanted = [gradient * comm.size / 8 for gradient in expected(comm, squares)]
    for _ in range(2):
        backward(model, comm.rank)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.div_(8) if in_place else parameter.grad / 8
        if in_place and comm.rank == 1:
            comm.recv(0)
        optimizer.step()
        if in_place and comm.rank == 0:
            comm.send(torch.zeros(1), 1)
        assert_gradients(model, wanted, comm)
    assert optimizer._hooks.rounds == 2
    model[:1].zero_grad()
    torch.autograd.backward(model[:1](draw(comm.rank)).sum())
    assert_gradients(model[2:], wanted[2:], comm)


@on_ranks(3)
@pytest.mark.parametrize("how", ["flat", "list", "later"])
def test_gradients_stay_the_tensors_that_the_program_knows(comm: Communicator, how: str) -> None:
    """A program that keeps references to its gradients, or has them all in one tensor."""
    model, _ = make_hooked(comm)
    wanted = expected(comm, squares)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    saved = [torch.zeros_like(p) for p in parameters]
    if how == "flat":
        parts = torch.split(flat, [p.numel() for p in parameters])
        saved = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
    for parameter, gradient in zip(parameters, saved, strict=True):
        parameter.grad = gradient
    for step in range(4):
        if how == "later" and step in (0, 2):  # gradients that have moved into their slots by then
            saved = [p.grad for p in parameters if p.grad is not None]
        flat.zero_() if how == "flat" else torch._foreach_zero_(saved)
        torch.autograd.backward(squares(model, comm.rank))
        assert_gradients(model, wanted, comm)
        assert all(p.grad is gradient for p, gradient in zip(parameters, saved, strict=True))
        if how == "flat":
            whole = torch.cat([gradient.reshape(-1) for gradient in wanted])
            torch.testing.assert_close(flat, whole, rtol=1e-12, atol=1e-14)
        if how == "later" and step == 1:
            saved = []
            for _ in range(2):
                backward(model, comm.rank, keep=True)
    for required in (False, True):  # buckets are planned anew
        model[4].requires_grad_(required)
        flat.zero_() if how == "flat" else torch._foreach_zero_(saved)
        torch.autograd.backward(squares(model, comm.rank))
        part = model if required else model[:4]
        assert_gradients(part, wanted[: len(list(part.parameters()))], comm)


@pytest.mark.parametrize("how", ["channels_last", "share_memory", "data"])
def test_memory_of_gradients_may_change(comm: Communicator, how: str) -> None:
    """The memory of kept gradients changes between steps, but not the tensors."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)).double()

    def loss(model: Any, rank: int) -> Tensor:
        return (model(draw(rank, 36).view(2, 3, 6, 6)) ** 2).mean()

    wanted = expected(comm, loss, lambda: copy.deepcopy(model))
    register(model, comm)
    for step in range(5):
        if step == 3 and how == "channels_last":
            model.to(memory_format=torch.channels_last)
        elif step == 3 and how == "share_memory":
            model.share_memory()
        elif step == 3:
            for parameter in model.parameters():
                parameter.grad.data = torch.ones_like(parameter)
        backward(model, comm.rank, loss, keep=True)
        assert_gradients(model, wanted, comm)


def test_a_dtype_that_changes_is_refused(comm: Communicator) -> None:
    """half() or float() between steps is refused, kept gradients or not, sparse or not."""
    for keep in (False, True):
        for model, x in ((make_model(), draw(0)), (nn.Embedding(5, 2, sparse=True), torch.tensor([1, 2]))):
            multiring.torch.register_gradient_hooks(model, comm)
            for _ in range(2):
                model.zero_grad(set_to_none=not keep or isinstance(model, nn.Embedding))
                torch.autograd.backward(model(x).sum())
            model.bfloat16()
            if not keep or isinstance(model, nn.Embedding):  # Torch does not add sparse ones of this dtype
                model.zero_grad()
            with pytest.raises(UsageError, match=r"has become torch.bfloat16 .*register them again"):
                torch.autograd.backward(model(x.bfloat16() if x.is_floating_point() else x).sum())


def test_given_gradients_that_never_come_by_a_hook(comm: Communicator) -> None:
    """As those of `torch.autograd.grad`: the first step of any optimizer tells."""
    model, hooks = make_hooked(comm)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # as it is made to have a state
    gradients = torch.autograd.grad(squares(model, comm.rank), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(
        UsageError, match=r"steps with a gradient of '0.weight' that is not reduced: .*synchron"
    ):
        optimizer.step()
    hooks.synchronize()
    assert_gradients(model, expected(comm, squares), comm)
    optimizer.step()
    hooks.remove()
    optimizer.step()


class _Adapted(nn.Module):
    """A layer, and a small one beside it that is added to it, as in LoRA."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.extra = base, nn.Linear(6, 8).double()

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.extra(x)


def _overwritten(model: nn.Sequential) -> nn.Module:
    """Other parameters in the same model, as a conversion makes them on request."""
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(parameter.detach().clone()))
    return model


def _adapted(model: nn.Sequential) -> nn.Module:
    """Layers put into the model, whose other parameters are frozen."""
    model.requires_grad_(False)
    model[0] = _Adapted(model[0])
    return model


def _wrapped(model: nn.Sequential) -> nn.Module:
    """A head behind a model, which is frozen."""
    return nn.Sequential(model.requires_grad_(False), nn.Linear(3, 3).double())


def _made_anew(model: nn.Sequential) -> nn.Module:
    return make_model()


CHANGES = [_overwritten, _adapted, _wrapped, _made_anew]


@pytest.mark.parametrize("keeps_handle", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_after_registration_is_told_at_the_first_step(
    comm: Communicator, change: Callable[[nn.Sequential], nn.Module], keeps_handle: bool
) -> None:
    """No parameter with hooks takes part in a backward pass, so no round comes."""
    model: Any = make_model()
    handle: Any = register(model, comm)
    if not keeps_handle:
        del handle
    model = change(model)
    gc.collect()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    optimizer.step()  # as it is made to have a state
    torch.autograd.backward(squares(model, comm.rank))
    before = bits(model.parameters())
    with pytest.raises(UsageError, match="steps with (a gradient|gradients).* not reduced.* register"):
        optimizer.step()
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("give", [by_autograd_grad, by_torch_func, into_the_same_tensors, through_data])
@pytest.mark.parametrize("sets_to_none", [False, True])
def test_given_gradients_after_usual_steps(
    comm: Communicator, give: Callable[[nn.Module, int], None], sets_to_none: bool
) -> None:
    model, hooks = make_hooked(comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad(sets_to_none)
        backward(model, comm.rank)
        optimizer.step()
    optimizer.zero_grad(sets_to_none)
    give(model, comm.rank)
    with pytest.raises(UsageError, match="steps with a gradient of '0.weight' that is not reduced"):
        optimizer.step()
    hooks.synchronize()
    optimizer.step()
    assert same_everywhere(comm, bits(model.parameters()))


def test_given_gradients_of_a_part_of_the_model(comm: Communicator) -> None:
    """Those of the others are reduced."""
    model, _ = make_hooked(comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss, head = squares(model, comm.rank), list(model[4].parameters())
    gradients = torch.autograd.grad(loss, head, retain_graph=True)
    torch.autograd.backward(loss, inputs=list(model[:4].parameters()))
    optimizer.step()
    for parameter, gradient in zip(head, gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(UsageError, match=r"a gradient of '4.weight' that is not reduced"):
        optimizer.step()


def test_optimizers_that_may_step_as_they_are(comm: Communicator) -> None:
    """Over a model without hooks beside one with hooks, in turns, with clipping, after no_sync(), and with
    gradients of earlier steps that are kept."""
    model, hooks = make_hooked(comm)
    local: Any = multiring.torch.local_copy(model)
    other = make_model(1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.01)
    alone, own, parts = (torch.optim.SGD(m.parameters(), 0.01) for m in (other, local, model[:2]))
    for step in range(4):
        for optimizer, part in ((alone, other), (own, local)):  # before the first round, too
            torch.autograd.backward(squares(part, comm.rank))
            optimizer.step()
        if step % 2 == 0:
            model.zero_grad()
        backward(model, comm.rank)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for optimizer in (parts, both, parts):
            optimizer.step()
        torch.autograd.backward(model[4].bias.square().sum())
        for parameter in model.parameters():
            parameter.grad = 2 * parameter.grad
        both.step()
    with hooks.no_sync():
        backward(model, comm.rank)
    both.step()
    model.zero_grad()
    closure_model, _ = make_hooked(comm)
    search = torch.optim.LBFGS(closure_model.parameters(), max_iter=3)

    def closure() -> Tensor:
        search.zero_grad()
        loss = squares(closure_model, 0)
        torch.autograd.backward(loss)
        return loss

    for _ in range(3):
        search.step(closure)
