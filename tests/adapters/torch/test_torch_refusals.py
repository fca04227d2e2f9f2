"""What would go wrong without a word with hooked models of Torch, and is refused instead."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.support import (
    check_steps,
    draw,
    expected,
    gradients_of,
    make_model,
    register,
    squares,
    wrap,
)


@pytest.mark.full
@pytest.mark.parametrize("how", ["config", "enable"])
def test_compiled_autograd(comm: Communicator, how: str) -> None:
    from torch._dynamo import compiled_autograd, config

    model = make_model()
    register(model, comm)
    with pytest.raises(UsageError, match="compiled autograd"):
        if how == "config":
            with config.patch(compiled_autograd=True):
                torch.compile(lambda: torch.autograd.backward(squares(model, comm.rank)), backend="eager")()
        else:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                torch.autograd.backward(squares(model, comm.rank))


def test_a_pickle_of_a_hooked_model_is_a_plain_one(comm: Communicator) -> None:
    """It needs no multiring to be loaded, and is trained alone."""
    model = make_model()
    register(model, comm)
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
    model = make_model()
    hooks = register(model, comm)
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
    model: Any = make_model()
    hooks = register(model, comm, check_every=1)
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.5)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    model[2].weight = model[0].weight_orig
    model.load_state_dict(model.state_dict())
    others = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"load_state_dict\(assign=True\) has put other parameters"):
        model.load_state_dict(others, assign=True)
    hooks.remove()
    model.load_state_dict(others, assign=True)


def test_embeddings_of_limited_norm(comm: Communicator) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    with pytest.raises(
        UsageError, match="module '0' is an Embedding with max_norm=1, which changes .* would drift"
    ):
        multiring.torch.register_gradient_hooks(model, comm)


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


def test_what_is_no_communicator(comm: Communicator) -> None:
    other: Any = "world"
    text = r"comm is 'world'.*: pass a multiring\.Communicator"
    with pytest.raises(UsageError, match=text):
        wrap(torch.optim.SGD(make_model().parameters()), make_model(), other)
    with pytest.raises(UsageError, match=text):
        multiring.torch.broadcast_parameters(make_model(), 0, other)


def test_what_goes_past_the_wrapper_is_refused(comm: Communicator) -> None:
    model = make_model()
    inner = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    optimizer = wrap(inner, model, comm, backward_passes_per_step=2)
    torch.autograd.backward(squares(model, comm.rank))
    with pytest.raises(UsageError, match=r"step\(\) of the wrapped optimizer .* not reduced"):
        inner.step()
    torch.autograd.backward(squares(model, comm.rank))
    inner.step()  # schedulers and the like may have the wrapped one
    inner.add_param_group({"params": list(model[:2].parameters())})
    text = r"parameter 0 of group 1 of the optimizer, of shape \(8, 6\).* by add_param_group\(\) of the"
    with pytest.raises(UsageError, match=text):
        optimizer.step()
    optimizer.remove()
    inner.step()
