"""Tells when a parameter's gradient is final while the backward pass still runs.

Chainer keeps the gradients of parameters in a table of its own until a backward pass is over, and no hook of
its sees them before. But the gradient of a variable that a function has made is handed to that function as
soon as all users of the variable have been walked, for it depends on nothing else. So between the forward and
the backward pass every parameter of the graph gets a *watch* as its creator: a function node that computes
nothing, and whose backward is called with the finished gradient.

Chainer walks function nodes by falling rank (a node's rank is one more than that of any function before it)
and knows only those that it has met. A watch is met with the parameter's last user in forward order at the
earliest, so its rank has to be lower than that of all users, and not lower than necessary, or the gradient
would wait for the end of the pass: it lies half a rank below the lowest of them.

        loss ... conv2 (rank 4) ... conv1 (rank 2) ... images
                   |                  |
                 W2 - watch (3.5)   W1 - watch (1.5)      walked: conv2, watch, ..., conv1, watch

When the pass is over, the parameters are leaves again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import chainer
from chainer.functions.util.forget import Forget

__all__ = ["watched_gradients"]

Arrived = Callable[[int, Any], None]


class _Watch(chainer.FunctionNode):
    """Creator of a parameter for the time of one backward pass."""

    def __init__(self, index: int, parameter: chainer.Parameter, rank: float, arrived: Arrived) -> None:
        self._index, self._parameter, self._arrived = index, parameter, arrived
        self.rank = rank
        self.inputs = (chainer.Variable(np.zeros((), np.float32)).node,)
        self.outputs = (weakref.ref(parameter.node),)

    @property
    def label(self) -> str:
        return f"gradient of {self._parameter.name}"

    def backward(self, indexes: Sequence[int], gradients: Sequence[Any]) -> tuple[None]:
        if gradients[0] is not None:
            earlier, gradient = self._parameter.grad, gradients[0].array
            if earlier is not None:  # as for any leaf, gradients add up until they are cleared
                # Two arrays without dimensions give a number.
                gradient = chainer.backend.get_array_module(earlier).asarray(gradient + earlier)
            self._parameter.grad = gradient
            self._arrived(self._index, gradient)
        return (None,)


@contextmanager
def watched_gradients(
    loss: chainer.Variable,
    parameters: Sequence[chainer.Parameter],
    arrived: Arrived,
    loss_scale: float | None,
) -> Iterator[None]:
    """Context of `loss.backward()` in which `arrived(index, gradient)` is called as gradients are finished.

    Each finished gradient is `parameter.grad` by then. A graph with parts that are computed again in the
    backward pass (`chainer.functions.forget`) is left alone: their parameters get gradients in passes of
    their own, any number of times.

    Args:
        loss: Where the backward pass begins.
        parameters: The parameters to watch.
        arrived: Called in the backward pass; what it raises comes out of `backward()`.
        loss_scale: What `backward` is called with.
    """
    ranks = _lowest_user_ranks(loss, parameters)
    for index, rank in ranks.items():
        parameter = parameters[index]
        parameter.node.set_creator_node(_Watch(index, parameter, rank - 0.5, arrived))
    try:
        yield
    finally:
        for index in ranks:
            parameter = parameters[index]
            parameter.node.unchain()
            parameter.node._rank = 0
            # The backward pass leaves it on leaves; update rules divide by it.
            parameter._loss_scale = loss_scale


def _lowest_user_ranks(loss: chainer.Variable, parameters: Sequence[chainer.Parameter]) -> dict[int, int]:
    """For each parameter that the loss depends on the lowest rank of the functions that use it."""
    position = {
        id(parameter.node): index
        for index, parameter in enumerate(parameters)
        if parameter.requires_grad and parameter.creator_node is None
    }
    found: dict[int, int] = {}
    start = loss.creator_node
    pending, seen = ([] if start is None else [start]), {id(start)}
    while pending:
        function = pending.pop()
        if isinstance(function, Forget):
            return {}
        for node in function.inputs:
            creator = node.creator_node
            if creator is None:
                index = position.get(id(node))
                if index is not None:
                    found[index] = min(found.get(index, function.rank), function.rank)
            elif id(creator) not in seen:
                seen.add(id(creator))
                pending.append(creator)
    return found
