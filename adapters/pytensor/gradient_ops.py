"""Gradients that leave for the other ranks while a compiled function still computes the rest of them.

Three kinds of nodes for the gradients of one model in one function:

    Begin    a new round; takes nothing
    Ready    one for each gradient: copies it into its place in a bucket and returns; a full bucket leaves
    Finish   waits for all buckets; its outputs are the reduced gradients, where they lie in the buckets

Ready never waits, so the Ready nodes of different functions, models or ranks may run in any order: buckets
leave in an order of their own. Finish depends on all of them, and is a `BlockingOp`.

The outputs of Finish are memory of the buckets, which the next round overwrites. PyTensor is told so by
declaring them views of a constant: it then never works in place on them, and copies what a function returns
or stores in a shared variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import pytensor.tensor as pt
from multiring.arrays import STREAMING_BYTES, copy_large
from multiring.bucketing import ParameterSpec
from multiring.errors import UsageError
from multiring.gradient_reducer import GradientReducer
from multiring.gradient_source import ReducerOptions
from multiring.pytensor.blocking import TOKEN, BlockingOp, PerformOp, token
from pytensor.gradient import disconnected_type, grad_not_implemented
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

if TYPE_CHECKING:
    from multiring import Communicator
    from pytensor.graph.fg import FunctionGraph

__all__ = ["Begin", "Finish", "Ready", "Round"]


class Round:
    """The reducer as the ops see it. Implements `GradientSource`."""

    def __init__(self, comm: Communicator, specs: Sequence[ParameterSpec], options: ReducerOptions) -> None:
        self.rank, self.specs = comm.rank, specs
        self.reducer = GradientReducer(comm, specs, options)
        self.is_closed = False
        self._views: list[NDArray[Any]] = []
        self._generation = -1

    @property
    def views(self) -> list[NDArray[Any]]:
        """The slots as arrays; they move when the buckets are planned anew."""
        if self._generation != self.reducer.generation:
            self._generation = self.reducer.generation
            self._views = [
                self.reducer.slot(index).view(spec.dtype).reshape(spec.shape)
                for index, spec in enumerate(self.specs)
            ]
        return self._views

    def store(self, index: int) -> bool:
        """Part of `GradientSource`: what is there has been brought by a Ready node."""
        return False

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: Finish gives all gradients anyway."""

    def close(self) -> None:
        """Release the buckets."""
        self._views = []
        self.is_closed = True
        self.reducer.close()


class Begin(PerformOp):
    """A new round."""

    kind: ClassVar[str] = "begin"

    def __init__(self, name: str, current: Round) -> None:
        super().__init__(name)
        self.current = current

    def make_node(self) -> Apply:
        """Takes a constant, since Numba wants every op to have an input."""
        return Apply(self, [token(1)], [TOKEN()])

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """Of a token."""
        return [()]

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Forget what a call that raised an error has left behind."""
        if self.current.is_closed:
            raise UsageError(
                f"rank {self.current.rank}: this function reduces gradients, but its DistributedGradients is "
                "closed; build and compile it anew"
            )
        if self.current.reducer.is_open:
            self.current.reducer.cancel()
        output_storage[0][0] = np.array(1, dtype=np.int8)


class Ready(PerformOp):
    """One gradient is there."""

    kind: ClassVar[str] = "ready"

    def __init__(self, name: str, current: Round, index: int) -> None:
        super().__init__(name)
        self.current, self.index = current, index

    def make_node(self, gradient: Variable, begun: Variable) -> Apply:
        """A gradient and the token of `Begin`."""
        return Apply(self, [gradient, begun], [TOKEN()])

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """Of a token."""
        return [()]

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Copy it to its place; its bucket leaves if it was the last."""
        gradient, shape = inputs[0], self.current.specs[self.index].shape
        if gradient.shape != shape:
            raise UsageError(
                f"rank {self.current.rank}: the gradient of '{self.name}' has shape {gradient.shape}, but "
                f"the parameter had shape {shape} when it was registered",
                rank=self.current.rank,
                tensor=self.name,
            )
        target = self.current.views[self.index]
        if gradient.nbytes >= STREAMING_BYTES and gradient.flags.c_contiguous:
            copy_large(target.ctypes.data, gradient.ctypes.data, gradient.nbytes)
        else:
            target[...] = gradient
        self.current.reducer.mark_ready(self.index)
        output_storage[0][0] = np.array(1, dtype=np.int8)

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """Refused: silence would be taken for zero."""
        comment = "Derivatives of averaged gradients: use multiring.pytensor.allreduce, which has a gradient."
        return [grad_not_implemented(self, 0, inputs[0], comment), disconnected_type()]


class Finish(BlockingOp):
    """The end of the round."""

    kind: ClassVar[str] = "gradients"

    def __init__(self, name: str, current: Round, count: int) -> None:
        super().__init__(name, count + 1)
        self.current = self.identity = current
        self.view_map = {index: [count] for index in range(len(current.specs))}

    def output_types(self, inputs: Sequence[Variable]) -> list[Any]:
        """All gradients, then which of them any rank has had: bool (parameters,)."""
        kinds = [TensorType(spec.dtype, shape=spec.shape) for spec in self.current.specs]
        return [*kinds, TensorType("bool", shape=(len(kinds),))]

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """Those of the parameters."""
        return [*(spec.shape for spec in self.current.specs), (len(self.current.specs),), ()]

    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """Send what has not left, wait for all."""
        result = self.current.reducer.finish(self.current)
        for storage, view in zip(outputs, self.current.views, strict=False):
            storage[0] = view
        outputs[-1][0] = result.produced

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """Leads on to `Ready`, which refuses."""
        return [
            *(pt.zeros((), dtype="float64") for _ in inputs[:-2]),
            disconnected_type(),
            disconnected_type(),
        ]
