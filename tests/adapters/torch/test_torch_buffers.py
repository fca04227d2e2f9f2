"""Buffers that a graph still needs are taken over later: all is as one process computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multiring import Communicator
from tests.adapters.torch.support import assert_same_weights, bits, draw, register, wrap
from tests.on_ranks import same_everywhere


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
