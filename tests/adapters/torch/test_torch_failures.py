"""What goes wrong with hooked models of Torch, or would without a word; and what is left afterwards."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.torch.supported import check_one_device
from tests.adapters.torch.support import (
    assert_gradients,
    backward,
    bits,
    check_steps,
    draw,
    expected,
    explode,
    gradients_of,
    make_hooked,
    make_model,
    register,
    squares,
    wrap,
)
from tests.on_ranks import all_raise, refuses, same_everywhere


def test_a_second_gradient_in_a_round_is_refused(comm: Communicator) -> None:
    """The next round is a new one, though the program keeps the exception and what that has gone through."""

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 6).double()

    def loss(model: Any, rank: int) -> torch.Tensor:
        return (model(draw(rank)) ** 2).sum()

    model = linear()
    multiring.torch.register_gradient_hooks(model, comm)
    x = draw(comm.rank).requires_grad_(True)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match=r"received a second gradient .*use_reentrant=False") as kept:
        y.sum().backward()
    model.zero_grad()
    check_steps(model, loss, expected(comm, loss, linear), comm)
    assert kept.value.__traceback__ is not None


@all_raise(MismatchError, r"gradients\[")
def test_a_backward_pass_that_fails_on_one_rank_is_reported(comm: Communicator) -> None:
    """Half of its gradients are gone; the next pass must not be mixed with what the others wait for."""
    model, _ = make_hooked(comm)
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(model[2:](explode(model[:2](draw(0)))).sum())
        model.zero_grad()
    torch.autograd.backward(squares(model, comm.rank))


def test_parameters_on_several_devices_are_refused() -> None:
    """By the check alone, which needs no such devices."""
    cpu, gpu, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    check_one_device([], 0)
    for device in (cpu, gpu):
        check_one_device([("a", device), ("b", device)], 0)
    for devices in ((gpu, gpu, other), (gpu, gpu, cpu), (cpu, cpu, gpu)):
        text = rf"rank 3: parameter 'c' is on {devices[2]}, and parameter 'a' on {devices[0]};.*model\.to\(\)"
        refuses(UsageError, text, check_one_device, zip("abc", devices, strict=True), 3)


def test_refused(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match=r"'0\.weight' already has gradient hooks"):
        multiring.torch.register_gradient_hooks(model, comm)
    refuses(UsageError, "create_graph=True", torch.autograd.backward, squares(model, 0), create_graph=True)
    hooks.remove()
    refuses(UsageError, "have been removed", hooks.synchronize)
    no_communicator, other = r"comm is 'world'.*: pass a multiring\.Communicator", cast(Any, "world")
    refuses(UsageError, no_communicator, wrap, torch.optim.SGD(model.parameters()), model, other)
    refuses(UsageError, no_communicator, multiring.torch.broadcast_parameters, model, 0, other)
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("no parameters", nn.Tanh(), {}),
        (r"dtype torch\.float8", nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)]), {}),
        ("'weight' is lazy", nn.LazyLinear(2), {}),
        ("on device meta", nn.Linear(2, 2, device="meta"), {}),
        ("postscale is 0", make_model(), {"postscale": 0.0}),
        ("buffers is 'mean'; accepted: broadcast, average, local", make_model(), {"buffers": "mean"}),
        (
            "module '0' is an Embedding with max_norm=1, which changes .* would drift",
            nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2)),
            {},
        ),
        (no_communicator, make_model(), {"comm": other}),
    ]
    for text, part, options in cases:
        refuses(UsageError, text, register, part, **{"comm": comm} | options)
    register(make_model(), comm)


@pytest.mark.parametrize(
    ("how", "bucket_bytes"), [("taken away", 1 << 20), ("replaced", 64), ("written to", 1)]
)
@all_raise(UsageError, r"the gradient of '4\.weight' was replaced or taken away, or written to")
def test_gradients_that_another_hook_changes_are_refused(
    comm: Communicator, how: str, bucket_bytes: int
) -> None:
    """By a hook that runs after ours, when the gradient is on its way or about to be."""
    model, _ = make_hooked(comm, bucket_bytes=bucket_bytes)

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
    model, hooks = make_hooked(comm)
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
    model, _ = make_hooked(comm, check_every=0)
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


@pytest.mark.full
@pytest.mark.parametrize("how", ["config", "enable"])
def test_compiled_autograd(comm: Communicator, how: str) -> None:
    from torch._dynamo import compiled_autograd, config

    model, _ = make_hooked(comm)
    with pytest.raises(UsageError, match="compiled autograd"):
        if how == "config":
            with config.patch(compiled_autograd=True):
                torch.compile(lambda: torch.autograd.backward(squares(model, comm.rank)), backend="eager")()
        else:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                torch.autograd.backward(squares(model, comm.rank))


def test_a_pickle_of_a_hooked_model_is_a_plain_one(comm: Communicator) -> None:
    """It needs no multiring to be loaded, and is trained alone."""
    model, _ = make_hooked(comm)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"multiring" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.load_state_dict(model.state_dict())
    torch.autograd.backward(squares(loaded, comm.rank))
    alone = make_model()
    torch.autograd.backward(squares(alone, comm.rank))
    torch.testing.assert_close(gradients_of(loaded), gradients_of(alone), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["copy of a part", "copy of a copy"])
def test_copies_of_hooked_models(comm: Communicator, how: str) -> None:
    """A copy may be used, loaded and averaged (a teacher), but not trained as if it had hooks."""
    model, hooks = make_hooked(comm)
    if how == "copy of a part":
        duplicate = nn.Sequential(*model[:4], copy.deepcopy(model[4]))
    else:
        duplicate = copy.deepcopy(copy.deepcopy(model))
    for parameter, mean in zip(model.parameters(), duplicate.parameters(), strict=True):
        mean.data.lerp_(parameter.data, 0.1)
    if how != "copy of a part":
        duplicate.load_state_dict(model.state_dict(), assign=how == "copy of a copy")
        duplicate.load_state_dict(model.state_dict())
    duplicate(draw(0))
    if how == "copy of a copy":  # whose parameters are those of the model now
        duplicate = copy.deepcopy(model)
    with pytest.raises(
        UsageError, match=r"copy of a model with gradient hooks is trained .*local_copy\(model\)"
    ):
        torch.autograd.backward(squares(duplicate, comm.rank))
    wanted = expected(comm, squares)
    check_steps(model, squares, wanted, comm, steps=1)
    # With hooks of its own it is trained together.
    duplicate = copy.deepcopy(model)
    others = register(duplicate, comm)
    check_steps(duplicate, squares, wanted, comm, steps=1)
    hooks.remove()
    others.remove()
    torch.autograd.backward(squares(copy.deepcopy(model), comm.rank))


def test_load_state_dict(comm: Communicator) -> None:
    """Parameters that pruning renames and tying shares have hooks as before; others, assigned, have none."""
    model, hooks = make_hooked(comm, check_every=1)
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.5)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    model[2].weight = model[0].weight_orig
    model.load_state_dict(model.state_dict())
    others = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"load_state_dict\(assign=True\) has put other parameters"):
        model.load_state_dict(others, assign=True)
    hooks.remove()
    model.load_state_dict(others, assign=True)


@pytest.mark.parametrize("how", ["before", "after"])
def test_ddp_over_a_hooked_model(comm: Communicator, tmp_path: Path, how: str) -> None:
    model = make_model()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=comm.rank, world_size=comm.size
    )
    try:
        if how == "before":
            wrapped = DistributedDataParallel(model)
            with pytest.raises(UsageError, match="the model is a DistributedDataParallel, which reduces"):
                multiring.torch.register_gradient_hooks(wrapped, comm)
            with pytest.raises(UsageError, match="module '1' is a DistributedDataParallel"):
                multiring.torch.register_gradient_hooks(nn.Sequential(nn.Linear(2, 2), wrapped), comm)
            hooks = multiring.torch.register_gradient_hooks(wrapped.module, comm)
        else:
            hooks = multiring.torch.register_gradient_hooks(model, comm)
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        with pytest.raises(UsageError, match="or by DistributedDataParallel, which averages gradients"):
            torch.autograd.backward(squares(wrapped, comm.rank))
        hooks.remove()
        dist.barrier()  # what DDP has sent has arrived
        del wrapped
        comm.barrier()
    finally:
        dist.destroy_process_group()


def test_synchronised_normalisation_in_two_threads(comm: Communicator) -> None:
    """Two models with synchronised normalisation, each in a thread: over one communicator refused."""
    batches = [[draw(10 * k + rank, 3) * (1 + rank + k) for rank in range(comm.size)] for k in range(2)]
    models = [multiring.torch.convert_sync_batchnorm(nn.BatchNorm1d(6).double(), comm) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(models[0], batches[0][comm.rank]).result()
        with pytest.raises(UsageError, match=r"another thread has used other layers .* comm.split\(0\)"):
            other.submit(models[1], batches[1][comm.rank]).result()
        other.submit(models[0], batches[0][comm.rank]).result()  # handed over
        groups: list[Any] = [comm.split(0) for _ in range(2)]
        models = [multiring.torch.convert_sync_batchnorm(nn.BatchNorm1d(6).double(), g) for g in groups]
        # The ranks begin in different order.
        places = [0, 1] if comm.rank == 0 else [1, 0]
        pools = [one, other]
        found = {k: pools[k].submit(models[k], batches[k][comm.rank]) for k in places}
        for k in range(2):
            wanted = nn.BatchNorm1d(6).double()(torch.cat(batches[k]))[3 * comm.rank :][:3]
            torch.testing.assert_close(found[k].result(), wanted, rtol=1e-10, atol=1e-12)
    for group in groups:
        group.close()


def test_what_goes_past_the_wrapper_is_refused(comm: Communicator) -> None:
    model = make_model()
    inner = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    optimizer = wrap(inner, model, comm, backward_passes_per_step=2)
    torch.autograd.backward(squares(model, comm.rank))
    refuses(UsageError, r"step\(\) of the wrapped optimizer .* not reduced", inner.step)
    torch.autograd.backward(squares(model, comm.rank))
    inner.step()  # schedulers and the like may have the wrapped one
    inner.add_param_group({"params": list(model[:2].parameters())})
    text = r"parameter 0 of group 1 of the optimizer, of shape \(8, 6\).* by add_param_group\(\) of the"
    refuses(UsageError, text, optimizer.step)
    optimizer.remove()
    inner.step()


@pytest.mark.parametrize("when", ["when the first gradient arrives", "at its end"])
def test_an_exception_that_the_program_keeps_does_not_keep_the_pass(comm: Communicator, when: str) -> None:
    model, hooks = make_hooked(comm)
    wanted = expected(comm, squares)
    # Registered after the hooks of multiring: the gradient is on its way.
    writer = model[-1].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", p.grad.detach().mul_(2)) if when == "at its end" else None
    )
    with pytest.raises(UsageError) as kept:
        squares(model, comm.rank).backward(create_graph=when == "when the first gradient arrives")
    writer.remove()
    for _ in range(3):
        model.zero_grad()
        backward(model, comm.rank)
        assert_gradients(model, wanted, comm)
    assert hooks.rounds == 3
    assert kept.value.__traceback__ is not None
