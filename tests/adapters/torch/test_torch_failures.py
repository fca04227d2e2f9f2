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
from tests.adapters.torch.support import (
    assert_gradients,
    backward,
    bits,
    draw,
    expected,
    explode,
    gradients_of,
    make_model,
    register,
    squares,
    wrap,
)
from tests.on_ranks import all_raise, same_everywhere


def test_a_second_gradient_in_a_round_is_refused(comm: Communicator) -> None:
    model = nn.Linear(6, 6).double()
    multiring.torch.register_gradient_hooks(model, comm)
    x = draw(0).requires_grad_(True)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match=r"received a second gradient .*use_reentrant=False"):
        torch.autograd.backward(y.sum())
    model.zero_grad()
    torch.autograd.backward(model(x).sum())


@all_raise(MismatchError, r"gradients\[")
def test_a_backward_pass_that_fails_on_one_rank_is_reported(comm: Communicator) -> None:
    """Half of its gradients are gone; the next pass must not be mixed with what the others wait for."""
    model = make_model()
    register(model, comm)
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(model[2:](explode(model[:2](draw(0)))).sum())
        model.zero_grad()
    torch.autograd.backward(squares(model, comm.rank))


def test_refused(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match=r"'0\.weight' already has gradient hooks"):
        multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match="create_graph=True"):
        torch.autograd.backward(squares(model, 0), create_graph=True)
    hooks.remove()
    with pytest.raises(UsageError, match="have been removed"):
        hooks.synchronize()
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("no parameters", nn.Tanh(), {}),
        (r"dtype torch\.float8", nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)]), {}),
        ("'weight' is lazy", nn.LazyLinear(2), {}),
        ("on device meta", nn.Linear(2, 2, device="meta"), {}),
        ("postscale is 0", make_model(), {"postscale": 0.0}),
        ("buffers is 'mean'; accepted: broadcast, average, local", make_model(), {"buffers": "mean"}),
        (r"comm is .*: pass a multiring\.Communicator", make_model(), {"comm": 3}),
    ]
    for text, part, options in cases:
        with pytest.raises(UsageError, match=text):
            register(part, **({"comm": comm} | options))
    register(make_model(), comm)


@pytest.mark.parametrize(
    ("how", "bucket_bytes"), [("taken away", 1 << 20), ("replaced", 64), ("written to", 1)]
)
@all_raise(UsageError, r"the gradient of '4\.weight' was replaced or taken away, or written to")
def test_gradients_that_another_hook_changes_are_refused(
    comm: Communicator, how: str, bucket_bytes: int
) -> None:
    """By a hook that runs after ours, when the gradient is on its way or about to be."""
    model = make_model()
    register(model, comm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)

    def change(parameter: Any) -> None:
        if how == "written to":
            parameter.grad *= 2
        else:
            parameter.grad = None if how == "taken away" else parameter.grad.clamp(-1, 1)

    model[4].weight.register_post_accumulate_grad_hook(change)
    torch.autograd.backward(squares(model, comm.rank))


@all_raise(
    MismatchError,
    what={
        "strides": "'2.weight' .*strides",
        "frozen": "'2.weight'",
        "options": "'options'.*bucket_bytes",
        "buffers": "buffers",
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
            options = {"bucket_bytes": 1 << 20} if what == "options" else {"buffers": "average"}
    multiring.torch.register_gradient_hooks(model, comm, **options)


def test_hooks_live_as_long_as_the_model(comm: Communicator) -> None:
    """Without their handle; a dropped model releases its buckets."""
    model = make_model()
    hooks = register(model, comm)
    dropped = [weakref.ref(hooks), weakref.ref(model), weakref.ref(hooks._gradients.reducer._memory)]
    del hooks
    gc.collect()
    torch.autograd.backward(squares(model, comm.rank))
    assert_gradients(model, expected(comm, squares), comm)
    del model
    gc.collect()
    assert [ref() for ref in dropped] == [None, None, None]


def test_a_part_of_the_model_is_replaced(comm: Communicator) -> None:
    """The old head is gone, its hooks with it; the new one is not known; the rest goes on, unless checked."""
    model = make_model()
    register(model, comm, check_every=0)
    torch.autograd.backward(squares(model, comm.rank))
    model[4] = nn.Linear(8, 2).double()
    gc.collect()
    for _ in range(2):
        backward(model, comm.rank)
        found = bits(gradients_of(model))
        assert same_everywhere(comm, found[:4])
        assert not same_everywhere(comm, found[4:])


@pytest.mark.parametrize(("unscale", "fused"), [(False, True), (True, False)])
def test_an_overflow_in_a_partial_group_stops_all(comm: Communicator, unscale: bool, fused: bool) -> None:
    """The last group of an epoch has fewer passes, and one rank's gradients in it are infinite or not."""
    model = make_model()
    inner = torch.optim.Adam(model.parameters(), fused=fused)
    optimizer = wrap(inner, model, comm, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        before = bits(model.parameters())
        overflows = step == 1 and comm.rank == 1
        if step != 2 or comm.rank == 0:  # a rank without a loss, right after a step that was left out
            loss = squares(model, 100 * step + comm.rank) * (float("inf") if overflows else 1.0)
            torch.autograd.backward(scaler.scale(loss))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
        after = bits(model.parameters())
        assert (after == before) == (step == 1)
        assert same_everywhere(comm, after)
