"""What would go wrong without a word with hooked models of Torch, and is refused instead."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.support import SMALL, assert_gradients, draw, expected, make_model, squares


@pytest.mark.full
@pytest.mark.parametrize("how", ["config", "enable"])
def test_compiled_autograd(comm: Communicator, how: str) -> None:
    from torch._dynamo import compiled_autograd, config

    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match="compiled autograd"):
        if how == "config":
            with config.patch(compiled_autograd=True):
                torch.compile(lambda: torch.autograd.backward(squares(model, comm.rank)), backend="eager")()
        else:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                torch.autograd.backward(squares(model, comm.rank))
    hooks.remove()


@pytest.mark.parametrize("how", ["pickle", "copy of a part", "copy of a copy"])
def test_copies_of_hooked_models(comm: Communicator, how: str) -> None:
    """A copy may be used, loaded and averaged (a teacher), but not trained as if it had hooks."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    if how == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        duplicate = torch.load(file, weights_only=False)
    else:
        duplicate = copy.deepcopy(model)
    if how == "copy of a part":
        duplicate = nn.Sequential(*model[:4], copy.deepcopy(model[4]))
    elif how == "copy of a copy":
        duplicate = copy.deepcopy(duplicate)
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
    model.zero_grad()
    torch.autograd.backward(squares(model, comm.rank))
    assert_gradients(model, expected(comm, squares), comm)
    # With hooks of its own it is trained together, as a local copy alone.
    duplicate = copy.deepcopy(model)
    duplicate.zero_grad()
    others = multiring.torch.register_gradient_hooks(duplicate, comm, **SMALL)
    torch.autograd.backward(squares(duplicate, comm.rank))
    assert_gradients(duplicate, expected(comm, squares), comm)
    hooks.remove()
    others.remove()
    torch.autograd.backward(squares(copy.deepcopy(model), comm.rank))


def test_load_state_dict_that_assigns(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    model.load_state_dict(make_model(1).state_dict())
    with pytest.raises(UsageError, match=r"load_state_dict\(assign=True\) has put other parameters"):
        model.load_state_dict(make_model(1).state_dict(), assign=True)
    hooks.remove()
    model.load_state_dict(make_model(2).state_dict(), assign=True)


def test_embeddings_of_limited_norm(comm: Communicator) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    with pytest.raises(
        UsageError, match=r"module '0' is an Embedding with max_norm=1, which changes the rows"
    ):
        multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match=r"max_norm=1, .* ranks would drift"):
        multiring.torch.DistributedOptimizer(torch.optim.SGD(model.parameters()), model, comm)


@pytest.mark.parametrize(("how", "as_view"), [("before", False), ("after", True)])
def test_ddp_over_a_hooked_model(comm: Communicator, tmp_path: Path, how: str, as_view: bool) -> None:
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
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        with pytest.raises(
            UsageError, match="or by DistributedDataParallel, which averages gradients itself"
        ):
            torch.autograd.backward(squares(wrapped, comm.rank))
        hooks.remove()
        dist.barrier()  # what DDP has sent has arrived
        del wrapped
        comm.barrier()
    finally:
        dist.destroy_process_group()


def test_synchronised_normalisation_in_two_threads(comm: Communicator) -> None:
    """Two models with synchronised normalisation, each in a thread: over one communicator refused."""

    def train(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    batches = [[draw(10 * k + rank, 3) * (1 + rank + k) for rank in range(comm.size)] for k in range(2)]
    models = [multiring.torch.convert_sync_batchnorm(nn.BatchNorm1d(6).double(), comm) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(train, models[0], batches[0][comm.rank]).result()
        with pytest.raises(UsageError, match=r"another thread has used other layers .* comm.split\(0\)"):
            other.submit(train, models[1], batches[1][comm.rank]).result()
        other.submit(train, models[0], batches[0][comm.rank]).result()  # handed over
        groups = [comm.split(0) for _ in range(2)]
        models = [multiring.torch.convert_sync_batchnorm(nn.BatchNorm1d(6).double(), g) for g in groups]
        # The ranks begin in different order.
        places = [0, 1] if comm.rank == 0 else [1, 0]
        pools = [one, other]
        found = {k: pools[k].submit(train, models[k], batches[k][comm.rank]) for k in places}
        for k in range(2):
            wanted = nn.BatchNorm1d(6).double()(torch.cat(batches[k]))[3 * comm.rank :][:3]
            torch.testing.assert_close(found[k].result(), wanted, rtol=1e-10, atol=1e-12)
    for group in groups:
        assert group is not None
        group.close()


def test_what_is_no_communicator(comm: Communicator) -> None:
    model = nn.Linear(2, 2)
    for call in (
        lambda: multiring.torch.register_gradient_hooks(model, comm=3),  # type: ignore[arg-type]
        lambda: multiring.torch.DistributedOptimizer(torch.optim.SGD(model.parameters()), model, "world"),  # type: ignore[arg-type]
        lambda: multiring.torch.broadcast_parameters(model, 0, model),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=r"comm is .*: pass a multiring\.Communicator"):
            call()
    hooks = multiring.torch.register_gradient_hooks(model, comm)  # nothing is left of what was refused
    hooks.remove()
