"""The gradients of a link's parameters in the slots of the shared reducer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import chainer
from multiring.arrays import STREAMING_BYTES, copy_large
from multiring.bucketing import ParameterSpec
from multiring.chainer.arrays import Array, on_device, place, to_host
from multiring.errors import UsageError
from multiring.gradient_reducer import GradientReducer
from multiring.gradient_source import ReducerOptions, RoundResult

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["GradientSlots", "fill_with_zeros", "named_parameters", "specifications"]


def named_parameters(link: chainer.Link) -> dict[str, chainer.Parameter]:
    """The parameters of a link by path ("block/conv/W"), each once, in ChainerMN's order."""
    found: dict[int, tuple[str, chainer.Parameter]] = {}
    for path, parameter in sorted(link.namedparams(), key=lambda pair: pair[0]):
        found.setdefault(id(parameter), (path.lstrip("/"), parameter))
    return dict(found.values())


def fill_with_zeros(parameters: Mapping[str, chainer.Parameter]) -> None:
    """Give every initialised parameter without a gradient one of zeros."""
    for parameter in parameters.values():
        if parameter.is_initialized and parameter.grad is None:
            parameter.grad = parameter.xp.zeros_like(parameter.array)


class GradientSlots:
    """Moves gradients between parameters and buckets; the reducer's `GradientSource`.

    Chainer computes every gradient in memory of its own. It is copied into its slot, and when it has been
    reduced `parameter.grad` is a view of the slot (an array on the parameter's device for CuPy). That view
    tells what has been reduced: a gradient that is any other array is new.
    """

    def __init__(
        self, parameters: Mapping[str, chainer.Parameter], comm: Communicator, options: ReducerOptions
    ) -> None:
        """Compare the parameters over ranks and allocate buckets. Collective.

        Args:
            parameters: By name. Those without an array yet are compared too, but take no part.
            comm: Ranks that train together.
            options: How to reduce.

        Raises:
            UsageError: A dtype that cannot be reduced, or ChainerX arrays.
            MismatchError: The ranks have different parameters or options.
        """
        ready = {name: p for name, p in parameters.items() if p.is_initialized}
        self.parameters = list(ready.values())
        self._comm = comm
        specs = specifications(comm.rank, ready)
        self.reducer = GradientReducer(comm, specs, options)
        self._generation = -1
        self._views: list[Array] = []
        self._shown: list[Any] = [None] * len(specs)
        self._refresh_views()

    @property
    def has_new(self) -> bool:
        """Whether this rank has gradients that were not reduced yet."""
        return any(self._is_new(index) for index in range(len(self.parameters)))

    def arrived(self, index: int, gradient: Any) -> None:
        """A gradient of this round is final: put it in its slot, from where it may leave.

        Raises:
            UsageError: It has another shape or dtype than the parameter had, or there was one already.
        """
        if self.reducer.is_ready(index):
            name = self.reducer.specs[index].name
            raise UsageError(
                f"rank {self._comm.rank}: parameter '{name}' received a second gradient in one backward "
                "pass, as when a function runs a backward pass of its own; create the optimizer with "
                "overlap=False",
                rank=self._comm.rank,
                tensor=name,
            )
        self._put(index, gradient)
        self.reducer.mark_ready(index)

    def send(self) -> None:
        """Put all new gradients in their slots, and let everything leave that has not."""
        for index in range(len(self.parameters) - 1, -1, -1):
            if not self.reducer.is_ready(index) and self._is_new(index):
                self.arrived(index, self.parameters[index].grad)
        self.reducer.flush(self)

    def receive(self) -> RoundResult:
        """End the round: wait, and make the slots the gradients where any rank had a new one. Collective."""
        result = self.reducer.finish(self)
        self._refresh_views()
        for index in np.flatnonzero(result.produced):
            self._show(int(index))
        return result

    def reduce(self) -> RoundResult:
        """`send` and `receive`. Collective."""
        self.send()
        return self.receive()

    def cancel(self) -> None:
        """Forget the round of a backward pass that was aborted by an exception."""
        if self.reducer.is_open:
            self.reducer.cancel()
            self._refresh_views()

    def join(self) -> int:
        """Answer the rounds of ranks that still have data; returns one that had to the end. Collective."""
        root = self.reducer.join()
        for parameter in self.parameters:
            parameter.cleargrad()
        self._refresh_views()
        return root

    def close(self) -> None:
        """Release the buckets; gradients go on in memory of their own. May be called twice."""
        for index, parameter in enumerate(self.parameters):
            if self._shown[index] is not None and parameter.grad is self._shown[index]:
                parameter.grad = self._shown[index].copy()
        self._views, self._shown = [], [None] * len(self.parameters)
        self.reducer.close()

    def store(self, index: int) -> bool:
        """Part of `GradientSource`: what is not new is in its slot, if it is there at all."""
        return self.parameters[index].grad is not None

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: `receive` shows all slots at once."""

    def _is_new(self, index: int) -> bool:
        gradient = self.parameters[index].grad
        return gradient is not None and gradient is not self._shown[index]

    def _put(self, index: int, gradient: Any) -> None:
        view = self._views[index]
        if gradient.dtype != view.dtype or gradient.shape != view.shape:
            name = self.reducer.specs[index].name
            raise UsageError(
                f"rank {self._comm.rank}: the gradient of '{name}' has become {gradient.dtype} "
                f"{gradient.shape}, it was {view.dtype} {view.shape} when the model was set up; set the "
                "optimizer up again after changing a model",
                rank=self._comm.rank,
                tensor=name,
            )
        host = to_host(gradient) if on_device(gradient) else gradient
        if view.nbytes >= STREAMING_BYTES and host.flags.c_contiguous:
            copy_large(view.ctypes.data, host.ctypes.data, view.nbytes)
        else:
            view[...] = host

    def _show(self, index: int) -> None:
        parameter = self.parameters[index]
        shown = place(self._views[index], on_device(parameter.array))
        parameter.grad = self._shown[index] = shown

    def _refresh_views(self) -> None:
        """Views of the slots, if these have moved; gradients move along."""
        if self._generation == self.reducer.generation:
            return
        self._generation = self.reducer.generation
        self._views = [
            self.reducer.slot(index).view(spec.dtype).reshape(spec.shape)
            for index, spec in enumerate(self.reducer.specs)
        ]
        for index, parameter in enumerate(self.parameters):
            if self._shown[index] is not None and parameter.grad is self._shown[index]:
                self._show(index)


def specifications(rank: int, parameters: Mapping[str, chainer.Parameter]) -> list[ParameterSpec]:
    """What the ranks have to agree on for each initialised parameter.

    Raises:
        UsageError: An array is of ChainerX.
    """
    return [_specification(rank, name, p) for name, p in parameters.items() if p.is_initialized]


def _specification(rank: int, name: str, parameter: chainer.Parameter) -> ParameterSpec:
    array = parameter.array
    if not isinstance(array, np.ndarray) and not on_device(array):
        raise UsageError(
            f"rank {rank}: parameter '{name}' is an array of {type(array).__module__}; gradients of NumPy "
            "and CuPy arrays are reduced: move the model with to_cpu() or to_gpu()"
        )
    return ParameterSpec(name, tuple(array.shape), array.dtype.name)
