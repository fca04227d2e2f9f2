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
from tests.adapters.torch.support import SMALL, draw, make_model, squares
from tests.on_ranks import Pool, all_raise, on_ranks, same_everywhere


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


@on_ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_buffers(comm: Communicator, mode: Any) -> None:
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


def test_buffers_change_between_forward_and_backward(comm: Communicator) -> None:
    """Autograd does not mind that running statistics change between a forward pass and its backward pass."""
    model = make_normalised()
    frozen = make_normalised().eval()
    for part in (model, frozen):
        hooks = multiring.torch.register_gradient_hooks(part, comm, **SMALL)
        losses = [(part(batch(comm.rank, k)) ** 2).mean() for k in range(2)]
        for loss in losses:
            torch.autograd.backward(loss)
        hooks.remove()


@on_ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_buffers_with_uneven_data(comm: Communicator, mode: Any) -> None:
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
    assert same_everywhere(comm, bits(model))
    hooks.remove()


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


@all_raise(
    MismatchError,
    "on rank 1",
    what={
        "tensor rate": r"^step 2: .*'parameter 0\.weight'",  # the update has been made with it
        "optimizer": r"^step 2: .*'parameter 0\.weight'",
        "edit": r"^step 8: .*'parameter 2\.weight'.*something has changed them on some rank alone",
        "frozen": r"^step 2: .*'parameter 0\.weight'",
        "codebook": r"^step 8: .*'parameter codes'",
    },
)
def test_drift_is_an_error_on_every_rank(comm: Communicator, what: str) -> None:
    model = make_model()
    rate: Any = torch.tensor(0.1 + 0.1 * comm.rank) if what == "tensor rate" else 0.1
    kind = torch.optim.Adam if what == "optimizer" and comm.rank == 1 else torch.optim.SGD
    if what == "frozen":
        model[0].weight.requires_grad_(False).add_(comm.rank)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = multiring.torch.DistributedOptimizer(
        kind([{"params": trained, "of_this_rank": comm.rank}], rate), model, comm, check_every=4, **SMALL
    )
    for step in range(1, 9):
        if what == "edit" and step == 6 and comm.rank == 1:
            with torch.no_grad():
                model[2].weight[0, 0] += 1e-9
        if what == "codebook" and step == 6:
            model.codes += comm.rank
        optimizer.zero_grad()
        try:
            torch.autograd.backward(squares(model, comm.rank))
        except MismatchError as error:
            raise MismatchError(f"step {step}: {error}") from error
        optimizer.step()


@pytest.mark.parametrize("kind", ["number", "tensor"])
@all_raise(MismatchError, "'lr of parameter group 0'")
def test_hyperparameters_are_compared(comm: Communicator, kind: str) -> None:
    """That differ before they have done anything."""
    model = make_model()
    rate: Any = torch.tensor(0.1 + comm.rank) if kind == "tensor" else 0.1 + comm.rank
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), rate), comm=comm, check_every=1, **SMALL
    )
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))


def test_two_models_are_compared_in_any_order(comm: Communicator) -> None:
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


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_parameters_that_come_later_are_found(comm: Communicator, with_optimizer: bool) -> None:
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


def test_synchronised_normalisation_needs_no_buffers_sent(comm: Communicator) -> None:
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


@all_raise(MismatchError, what={"buffers": "buffers", "check_every": "check_every"})
def test_options_that_differ(comm: Communicator, what: str) -> None:
    options: Any = {"buffers": "local" if comm.rank else "average"} if what == "buffers" else {}
    options |= {"check_every": comm.rank + 1} if what == "check_every" else {}
    multiring.torch.register_gradient_hooks(make_normalised(), comm, **options)


def test_the_check_can_be_left_out(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="buffers is 'mean'; accepted: broadcast, average, local"):
        multiring.torch.register_gradient_hooks(make_model(), comm, buffers="mean")  # type: ignore[arg-type]
    model = make_model(comm.rank)  # deliberately not the same
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=0, **SMALL)
    for _ in range(3):
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
    hooks.remove()
