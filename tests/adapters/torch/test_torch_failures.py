"""What goes wrong with gradient hooks of Torch, what is refused, and what is left afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import SMALL, assert_gradients, draw, expected, explode, make_model, squares
from tests.on_ranks import all_raise


def test_a_second_gradient_in_a_round_is_refused(comm: Communicator) -> None:
    model = nn.Linear(6, 6).double()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    x = draw(0).requires_grad_(True)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match=r"received a second gradient .*use_reentrant=False"):
        torch.autograd.backward(y.sum())
    model.zero_grad()
    torch.autograd.backward(model(x).sum())
    hooks.remove()


def test_hooks_survive_a_backward_pass_that_fails_on_all_ranks(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for step in range(3):
        if step != 1:
            model.zero_grad()
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, expected(comm, squares), comm)
            continue
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(model[2:](explode(model[:2](draw(0)))).sum())
    hooks.remove()


@all_raise(MismatchError, r"gradients\[")
def test_a_backward_pass_that_fails_on_one_rank_is_reported(comm: Communicator) -> None:
    """Half of its gradients are gone; the next pass must not be mixed with what the others wait for."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(model[2:](explode(model[:2](draw(0)))).sum())
        model.zero_grad()
    try:
        torch.autograd.backward(squares(model, comm.rank))
    finally:
        hooks.remove()


def test_refused(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match=r"'0\.weight' already has gradient hooks"):
        multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match="'weight' already has gradient hooks"):
        multiring.torch.register_gradient_hooks(model[2], comm)
    with pytest.raises(UsageError, match="create_graph=True"):
        torch.autograd.backward(squares(model, 0), create_graph=True)
    model.zero_grad()
    with pytest.raises(UsageError, match=r"'4.bias' has become torch.float32 \(3,\), it was torch.float64"):
        torch.autograd.backward((model.float()(draw(0).float()) ** 2).mean())
    hooks.remove()
    with pytest.raises(UsageError, match="have been removed"):
        hooks.synchronize()
    with pytest.raises(UsageError, match="no parameters"):
        multiring.torch.register_gradient_hooks(nn.Tanh(), comm)
    odd = nn.ParameterList([nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))])
    with pytest.raises(UsageError, match=r"dtype torch\.float8"):
        multiring.torch.register_gradient_hooks(odd, comm)
    with pytest.raises(UsageError, match=r"'weight' is lazy"):
        multiring.torch.register_gradient_hooks(nn.LazyLinear(2), comm)
    with pytest.raises(UsageError, match="on device meta"):
        multiring.torch.register_gradient_hooks(nn.Linear(2, 2, device="meta"), comm)
    with pytest.raises(UsageError, match="postscale is 0"):
        multiring.torch.register_gradient_hooks(make_model(), comm, postscale=0.0)
    multiring.torch.register_gradient_hooks(make_model(), comm).remove()


@pytest.mark.parametrize(("how", "bucket_bytes"), [("taken away", 1 << 20), ("replaced", 64)])
@all_raise(UsageError, r"the gradient of '2\.weight' was replaced or taken away")
def test_gradients_that_another_hook_replaces_are_refused(
    comm: Communicator, how: str, bucket_bytes: int
) -> None:
    """By a hook that runs after ours, when the gradient is on its way or about to be."""
    model = make_model()
    multiring.torch.register_gradient_hooks(
        model, comm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
    )
    model[2].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", None if how == "taken away" else p.grad.clamp(-1, 1))
    )
    torch.autograd.backward(squares(model, comm.rank))


@all_raise(
    MismatchError,
    what={
        "strides": "'2.weight' .*strides",
        "frozen": "'2.weight'",
        "options": "'options'.*bucket_bytes",
    },
)
def test_models_that_differ_in_small_things(comm: Communicator, what: str) -> None:
    model = make_model()
    options: dict[str, Any] = {}
    if comm.rank == 1:
        if what == "strides":
            model[2].weight = nn.Parameter(model[2].weight.detach().t())
        elif what == "frozen":
            model[2].weight.requires_grad_(False)
        else:
            options["bucket_bytes"] = 1 << 20
    multiring.torch.register_gradient_hooks(model, comm, **options)


def test_a_dropped_model_releases_its_buckets(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    dropped = [weakref.ref(hooks), weakref.ref(model), weakref.ref(hooks._slots.reducer._memory)]
    del model, hooks
    gc.collect()
    assert [ref() for ref in dropped] == [None, None, None]


def test_hooks_work_without_their_handle(comm: Communicator) -> None:
    model = make_model()
    multiring.torch.register_gradient_hooks(model, comm)
    gc.collect()
    torch.autograd.backward(squares(model, comm.rank))
    assert_gradients(model, expected(comm, squares), comm)


def test_a_part_of_the_model_is_replaced(comm: Communicator) -> None:
    """The old head is gone, its hooks with it; the new one is not known; the rest goes on, unless checked."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=0, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    model[4] = nn.Linear(8, 2).double()
    gc.collect()
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        bits = comm.allgather_object(
            [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
        )
        assert bits[0][:4] == bits[1][:4]
        assert bits[0][4:] != bits[1][4:]
    hooks.remove()
