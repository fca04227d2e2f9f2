"""Gradients that leave for the other ranks while a compiled function still computes the rest of them.

Three kinds of nodes for the gradients of one model in one function:

    Begin    a new round; takes nothing
    Ready    one for each gradient: tells where it lies and returns; a full bucket leaves
    Finish   waits for all buckets; its outputs are the reduced gradients, where they lie

Ready never waits, so the Ready nodes of different functions, models or ranks may run in any order: buckets
leave in an order of their own. Finish depends on all of them, and is a `BlockingOp`.

Where the graph lets it, a gradient is reduced in the memory that it was computed in (`ReadyInPlace`, put in
by a rewrite): PyTensor is told that Ready destroys it, so other readers of it run before. That memory must
not be written again before the reduction has ended, and an exception may leave one under way when the
function is called anew. Linkers keep the arrays of a call for the next one; so Ready takes away what it
reduces.

Elsewhere Ready copies it to its slot in a bucket, which the next round overwrites. PyTensor is told so by
declaring the slot a view of a constant: it then never works in place on it, and copies what a function
returns or stores in a shared variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import pytensor.tensor as pt
from multiring.arrays import STREAMING_BYTES, address_of, copy_large
from multiring.derived import reserve_name
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.refusals import check_gradient
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource
from multiring.pytensor.blocking import TOKEN, BlockingOp, PerformOp, is_plain, token
from multiring.state.check import StateCheck
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.gradient import disconnected_type, grad_not_implemented
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

if TYPE_CHECKING:
    from multiring import Communicator
    from pytensor.graph.fg import FunctionGraph

__all__ = ["Begin", "Finish", "Ready", "ReadyInPlace", "Round"]


class Round(GradientSource):
    """The reducer as the ops see it. Implements `GradientSource`.

    Attributes:
        comm: The ranks.
        state: Shared variables that have to be the same on all ranks, by name.
    """

    def __init__(self, comm: Communicator, specs: Sequence[ParameterSpec], options: ReducerOptions) -> None:
        self.comm, self.rank, self.specs = comm, comm.rank, specs
        self.reducer = GradientReducer(comm, specs, options, self)
        own = self.reducer.comm
        self._check = None if own is None else StateCheck(own, options.check_every)
        self.state: dict[str, SharedVariable] = {}
        self.is_closed = False
        self.elsewhere: dict[int, NDArray[Any]] = {}  # gradients of this round that are not in their slots

    def fetch(self, index: int) -> Gradient | None:
        """Part of `GradientSource`: what is there has been brought by a Ready node."""
        array = self.elsewhere.get(index)
        if array is not None:
            return Gradient(address_of(array), array)
        return IN_SLOT if self.reducer.is_ready(index) else None

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: Finish gives all gradients anyway."""

    def take_results(self) -> list[NDArray[Any]]:
        """All gradients, wherever they lie."""
        elsewhere, self.elsewhere = self.elsewhere, {}
        return [elsewhere.get(index, view) for index, view in enumerate(self.reducer.views)]

    def compare(self, *, active: bool = True) -> None:
        """At the end of each round: compare the state over ranks, if it is time. What was computed from the
        gradients is still that of the step before."""
        if self._check is not None and self._check.due():
            values = ((name, shared.get_value(borrow=True)) for name, shared in self.state.items())
            self._check.compare(values, active=active)

    def close(self) -> None:
        """Release the buckets."""
        self.is_closed = True
        self.reducer.close()
        self.elsewhere.clear()


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
        reserve_name(self.current.comm, "pytensor", f"gradients {id(self.current)}: {self.name}")
        if self.current.reducer.is_open:
            self.current.reducer.cancel()
        self.current.elsewhere.clear()
        output_storage[0][0] = np.array(1, dtype=np.int8)


class Ready(PerformOp):
    """One gradient is there: it is copied to its slot. The output is the slot.

    Attributes:
        current: The round.
        index: Which parameter's gradient.
        destroy_map: As PyTensor knows it.
        view_map: As PyTensor knows it.
    """

    kind: ClassVar[str] = "ready"

    def __init__(self, name: str, current: Round, index: int) -> None:
        super().__init__(name)
        self.current, self.index = current, index
        self.destroy_map: dict[int, list[int]] = {}
        self.view_map = {0: [2]}

    def make_node(self, gradient: Variable, begun: Variable, memory: Variable) -> Apply:
        """A gradient, the token of `Begin`, and the constant that stands for the memory of the buckets."""
        return Apply(self, [gradient, begun, memory], [gradient.type()])

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """That of the gradient."""
        return [shapes[0]]

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Put it where it is reduced; its bucket leaves if it was the last."""
        check_gradient(self.current.rank, self.current.specs[self.index], inputs[0])
        output_storage[0][0] = self.bring(inputs[0])

    def bring(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Have a gradient reduced; returns the array where its average will be."""
        target = self.current.reducer.views[self.index]
        if gradient.nbytes >= STREAMING_BYTES and gradient.flags.c_contiguous:
            copy_large(address_of(target), address_of(gradient), gradient.nbytes)
        else:
            target[...] = gradient
        self.current.reducer.mark_ready(self.index)
        return target

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """Refused: silence would be taken for zero."""
        comment = "Derivatives of averaged gradients: use multiring.pytensor.allreduce, which has a gradient."
        return [grad_not_implemented(self, 0, inputs[0], comment), disconnected_type(), disconnected_type()]


class ReadyInPlace(Ready):
    """One gradient is there, in memory that nobody else needs. The output is the same memory."""

    kind: ClassVar[str] = "ready_in_place"

    def __init__(self, name: str, current: Round, index: int) -> None:
        super().__init__(name, current, index)
        self.destroy_map, self.view_map = {0: [0]}, {}

    def make_py_thunk(
        self, node: Apply, storage_map: Any, compute_map: Any, no_recycling: Any, debug: bool = False
    ) -> Any:
        """How the linkers but Numba's, which keeps no arrays, run it."""
        thunk = super().make_py_thunk(node, storage_map, compute_map, no_recycling, debug)
        kept = [storage_map[made] for made in origins(node.inputs[0]) if made.owner is not None]

        def take() -> Any:
            try:
                return thunk()
            finally:
                for cell in kept:
                    cell[0] = None

        for name in ("inputs", "outputs", "lazy", "perform"):
            setattr(take, name, getattr(thunk, name))
        return take

    def bring(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Have a gradient reduced where it lies."""
        array = gradient if is_plain(gradient) else np.array(gradient, order="C")
        self.current.elsewhere[self.index] = array
        self.current.reducer.mark_ready(self.index)
        return array


def origins(variable: Variable) -> Iterator[Variable]:
    """What shares the memory of an array: itself, what it is a view of, or what it was made in place of."""
    while variable.owner is not None:
        yield variable
        sources = {**variable.owner.op.view_map, **variable.owner.op.destroy_map}
        found = sources.get(variable.owner.outputs.index(variable))
        if not found:
            return
        variable = variable.owner.inputs[found[0]]
    yield variable


class Finish(BlockingOp):
    """The end of the round.

    Args:
        name: What messages call it.
        current: The round.
        ready: Of each input, the parameter whose gradient it is; another input stands for the memory of the
            buckets.
    """

    kind: ClassVar[str] = "gradients"

    def __init__(self, name: str, current: Round, ready: Sequence[int]) -> None:
        super().__init__(name, len(ready) + 2)
        self.current = self.identity = current
        # A gradient is where its Ready has put it. Slots of those that this rank lacks are in the buckets.
        self.view_map = {index: [len(ready)] for index in range(len(current.specs))}
        self.view_map.update({index: [position] for position, index in enumerate(ready)})

    def output_types(self, inputs: Sequence[Variable]) -> list[Any]:
        """All gradients, then which of them any rank has had: bool (parameters,)."""
        kinds = [TensorType(spec.dtype, shape=spec.shape) for spec in self.current.specs]
        return [*kinds, TensorType("bool", shape=(len(kinds),))]

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """Those of the parameters."""
        return [*(spec.shape for spec in self.current.specs), (len(self.current.specs),), ()]

    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """Send what has not left, wait for all."""
        try:
            result = self.current.reducer.finish()
            self.current.compare()
        finally:
            arrays = self.current.take_results()
        for storage, array in zip(outputs, arrays, strict=False):
            storage[0] = array
        outputs[-1][0] = result.produced

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """Leads on to `Ready`, which refuses."""
        count = self.count - 2
        return [
            *(pt.zeros_like(gradient) for gradient in inputs[:count]),
            *(disconnected_type() for _ in inputs[count:]),
        ]
