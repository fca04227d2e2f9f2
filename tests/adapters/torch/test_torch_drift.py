"""Buffers are the same on all ranks after each step, and whatever else drifts is found by the check.

Buffers that a graph still needs are taken over later: all is as one process computes it."""

from __future__ import annotations

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
    assert_same_weights,
    bits,
    draw,
    make_model,
    register,
    squares,
    update,
    wrap,
)
from tests.on_ranks import all_raise, on_ranks, same_everywhere


def make_normalised(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    model.register_buffer("shorts", torch.zeros(3, dtype=torch.float16))
    model.register_buffer("pairs", torch.zeros(2, dtype=torch.complex64))
    model.register_buffer("marks", torch.zeros(5, dtype=torch.bool))
    return model


def batch(rank: int, step: int) -> Tensor:
    return draw(100 * step + rank, 5) * (1 + rank)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(batch(rank, step)) ** 2).mean()


def train(model: Any, rank: int, step: int) -> None:
    model.zero_grad()
    torch.autograd.backward(loss_of(model, rank, step))
    model.shorts += rank + 1
    model.pairs += complex(rank, 2)
    model.marks[step] = rank == 0


@on_ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_buffers(comm: Communicator, mode: Any) -> None:
    """After each step those of rank 0, or averages, as one process computes them."""
    model = make_normalised()
    references: Any = [make_normalised() for _ in range(comm.size)]
    hooks = register(model, comm, buffers=mode, check_every=1)
    for step in range(4):
        train(model, comm.rank, step)
        for rank, reference in enumerate(references):
            train(reference, rank, step)
        hooks.synchronize()
        for name, buffer in model.named_buffers():
            parts = [reference.get_buffer(name) for reference in references]
            wanted, rtol = parts[comm.rank if mode == "local" else 0], 0.0
            if mode == "average" and (buffer.is_floating_point() or buffer.is_complex()):
                mean = torch.stack(parts).to(torch.complex128).mean(0)
                wanted = (mean if buffer.is_complex() else mean.real).to(buffer.dtype)
                rtol = 1e-3 if name == "shorts" else 1e-6
            torch.testing.assert_close(buffer, wanted, rtol=rtol, atol=0)
        assert same_everywhere(comm, bits(model.buffers())) == (mode != "local")
        for reference in references:
            if mode != "local":  # all go on from what they have in common
                reference.load_state_dict(model.state_dict())


@on_ranks(3)
@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_buffers_with_uneven_data(comm: Communicator, mode: Any) -> None:
    """Ranks that have left the loop answer; the first that has not gives its buffers."""
    model: Any = make_normalised()
    hooks = register(model, comm, buffers=mode, check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with hooks.join(optimizer):
        for step in range(2 + comm.rank):
            model.shorts.fill_(comm.rank)
            update(optimizer, loss_of(model, comm.rank, step))
            active = [rank for rank in range(comm.size) if step < 2 + rank]
            first = active[0] if mode == "broadcast" else sum(active) / len(active)
            assert bool((model.shorts == first).all())
    assert same_everywhere(comm, bits(model.buffers()))


@all_raise(
    MismatchError,
    'or pass buffers="local"',
    when={"before": "cache", "later": r"on rank 0|on rank 1 'cache' is \(5,\), was \(4,\)"},
)
def test_buffers_of_different_shapes_are_refused(comm: Communicator, when: str) -> None:
    model: Any = make_normalised()
    if when == "before" and comm.rank == 1:
        model.register_buffer("cache", torch.zeros(7))
    elif when == "later":
        model.register_buffer("cache", torch.zeros(1))
    register(model, comm)
    for step in range(3):
        if step == 1:  # on all ranks alike: fine
            model.cache = torch.zeros(4)
        if step == 2:  # as a cache that grows with the longest sequence
            model.cache = torch.zeros(4 + comm.rank)
        train(model, comm.rank, step)


@all_raise(
    MismatchError,
    "on rank 1",
    what={
        "edit": r"^step 8: .*'parameter 2\.weight'.*something has changed them on some rank alone",
        "frozen": r"^step 2: .*'parameter 0\.weight'",
        "codebook": r"^step 8: .*'parameter codes'",
        "gradient": r"^step 2: .*'parameter 0\.weight'",
    },
)
def test_drift_is_an_error_on_every_rank(comm: Communicator, what: str) -> None:
    model = make_model()
    if what == "frozen":
        model[0].weight.requires_grad_(False).add_(comm.rank)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # What a group holds beside the options of the optimizer may be each rank's own.
    group = {"params": trained, "number": comm.rank, "log": f"log.{comm.rank}", "tags": {f"tag{comm.rank}"}}
    optimizer = wrap(torch.optim.SGD([group], 0.1), model, comm, check_every=4)
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
        if what == "gradient":
            model[0].weight.grad += comm.rank
        optimizer.step()


@pytest.mark.parametrize("kind", ["number", "tensor"])
@all_raise(MismatchError, "'lr of parameter group 0'")
def test_hyperparameters_are_compared(comm: Communicator, kind: str) -> None:
    """That differ before they have done anything."""
    model = make_model()
    rate: Any = torch.tensor(0.1 + comm.rank) if kind == "tensor" else 0.1 + comm.rank
    optimizer = wrap(torch.optim.SGD(model.parameters(), rate), None, comm, check_every=1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))


@pytest.mark.parametrize("wraps", [True, False])
@all_raise(MismatchError, "at this call of check_state.*'parameter 4.bias'")
def test_drift_after_the_last_check(comm: Communicator, wraps: bool) -> None:
    """Step 3 compares nothing; the program asks at its end."""
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer: Any = wrap(plain, model, comm) if wraps else plain
    hooks: Any = optimizer if wraps else register(model, comm)
    for step in range(3):
        update(optimizer, squares(model, comm.rank + step))
        hooks.check_state()
    with torch.no_grad():
        model[4].bias += comm.rank
    hooks.check_state()


def test_two_models_are_compared_in_any_order(comm: Communicator) -> None:
    """Buffers and checks of two models, whose backward passes end in another order on rank 1."""
    models = [make_normalised(k) for k in range(2)]
    for model in models:
        register(model, comm, check_every=1)
    for step in range(4):
        order = models if comm.rank == 0 else models[::-1]
        torch.autograd.backward(torch.stack([model(batch(comm.rank, step)).sum() for model in order]).sum())
        assert same_everywhere(comm, [bits(model.buffers()) for model in models])


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_parameters_that_come_later_are_found(comm: Communicator, with_optimizer: bool) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    wrap(inner, model, comm) if with_optimizer else register(model, comm)
    torch.autograd.backward(squares(model, comm.rank))
    model[4] = nn.Linear(8, 2).double()
    inner.param_groups[0]["params"][4:] = list(model[4].parameters())
    gc.collect()
    with pytest.raises(UsageError, match=r"gradients of parameter '4.weight' are not reduced"):
        torch.autograd.backward(squares(model, comm.rank))


def test_synchronised_normalisation_needs_no_buffers_sent(comm: Communicator) -> None:
    """SyncBatchNorm has the same statistics anyway, and nothing is sent for them."""
    model: Any = multiring.torch.convert_sync_batchnorm(make_normalised(), comm)
    del model.shorts, model.pairs, model.marks
    hooks: Any = register(model, comm, check_every=1)
    assert not hooks._state._buffers._forms
    for step in range(3):
        torch.autograd.backward(loss_of(model, comm.rank, step))
    assert same_everywhere(comm, bits(model.state_dict().values()))


class Scaled(nn.Module):
    """A linear layer of what its buffer scales, which forward renews: by another one, or in place."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6, dtype=torch.float64))
        self.scale: Tensor
        self.layer = nn.Linear(6, 3).double()
        self._in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            renewed = self.scale * 0.5 + x.mean(0)
            self.scale = self.scale.copy_(renewed) if self._in_place else renewed
        out: Tensor = self.layer(x * self.scale)
        return out


class Tracking(nn.BatchNorm1d):
    """Normalisation with a buffer of its own, which is no running statistic: its graph needs it."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("size", torch.ones(features))
        self.size: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.size = self.size * 0.5 + x.detach().abs().mean(0)
        return super().forward(x) * self.size


def normalised(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), norm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def in_both_modes(model: nn.Module, x: Tensor, y: Tensor, keep: bool) -> Any:
    loss = (model.train()(x) ** 2).mean()
    other = (model.eval()(y) ** 2).mean()
    torch.autograd.backward(loss, retain_graph=keep)
    torch.autograd.backward(other)
    return loss


def over_one_graph(model: nn.Module, x: Tensor, y: Tensor, keep: bool) -> Any:
    out = model(x)
    torch.autograd.backward(out.sin().mean(), retain_graph=True)
    torch.autograd.backward((out**2).mean(), retain_graph=keep)
    return out


def over_two_graphs(model: nn.Module, x: Tensor, y: Tensor, keep: bool) -> Any:
    losses = [(model(one.requires_grad_()) ** 2).mean() for one in (x, y)]
    for loss in losses:
        torch.autograd.backward(loss, retain_graph=keep)
    return losses


def by_parts(model: Any, x: Tensor, y: Tensor, keep: bool) -> Any:
    with torch.no_grad():
        model.middle(x)  # of its own; nothing else of the model is called before the buffers are used
    out = model.last(model.middle(x))
    torch.autograd.backward((out**2).mean(), retain_graph=keep)
    return out


def in_parts() -> nn.Module:
    model: Any = nn.Module()
    model.middle, model.last = Scaled(), nn.Linear(3, 3).double()
    return model  # type: ignore[no-any-return]


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "train and eval": (normalised, in_both_modes),
    "a subclass of normalisation": (lambda: normalised(Tracking), over_one_graph),
    "renewed": (Scaled, over_two_graphs),
    "renewed in place": (lambda: Scaled(in_place=True), over_one_graph),
    "parts": (in_parts, by_parts),
}


@pytest.mark.parametrize("stepped", ["optimizer", "wrapper", "by hand"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_that_need_buffers(comm: Communicator, name: str, stepped: str) -> None:
    make, program = PROGRAMS[name]

    def seeded() -> Any:
        torch.manual_seed(0)
        return make()

    model, alone = seeded(), [seeded() for _ in range(comm.size)]
    plain: Any = torch.optim.SGD(model.parameters(), 0.1)
    if stepped == "wrapper":
        plain = wrap(plain, model, comm, check_every=1)
    else:
        register(model, comm, check_every=1)
    for step in range(4):
        keep = step % 2 == 1
        for one, rank in [(model, comm.rank), *zip(alone, range(comm.size), strict=True)]:
            one.zero_grad()
            graph = program(one, draw(10 * step + rank), draw(500 + 10 * step + rank), keep)
            if one is model and stepped != "by hand":
                plain.step()
                assert same_everywhere(comm, bits(model.buffers()))
            elif one is model:
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
            del graph
        with torch.no_grad():
            for parameters in zip(*(one.parameters() for one in alone), strict=True):
                mean = sum(p.grad for p in parameters) / comm.size
                for p in parameters:
                    p.sub_(0.1 * mean)
            for one in alone:
                for own, first in zip(one.buffers(), alone[0].buffers(), strict=True):
                    own.copy_(first)
        assert_same_weights(model, alone[0])
        if step % 2 == 1:  # what is saved; in the other steps the next forward pass uses it first
            torch.testing.assert_close(model.state_dict(), alone[0].state_dict(), rtol=1e-10, atol=1e-12)
            assert same_everywhere(comm, bits(model.buffers()))
