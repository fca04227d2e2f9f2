"""The ops behind `collectives`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from multiring.derived import derived, reserve_name, shared_queue
from multiring.errors import UsageError
from multiring.pytensor.blocking import BlockingOp, is_plain
from multiring.types import ReduceOpName
from pytensor.compile.mode import optdb
from pytensor.gradient import DisconnectedType, disconnected_type, grad_undefined
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.type import TensorType

if TYPE_CHECKING:
    from multiring import Communicator
    from pytensor.graph.fg import FunctionGraph

__all__ = ["Allgather", "Allreduce", "Broadcast"]

LINEAR = ("sum", "average")


class Collective(BlockingOp):
    """What the collectives have in common: `count` arrays, each of which gives one.

    Attributes:
        comm: The ranks.
    """

    def __init__(self, name: str, count: int, comm: Communicator) -> None:
        super().__init__(name, count)
        self.comm = comm

    def output_types(self, inputs: Sequence[Variable]) -> list[Any]:
        """Those of the inputs."""
        return [variable.type for variable in inputs]

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """Those of the inputs: they have to be the same on all ranks."""
        return [*shapes[: self.count], ()]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """Each result depends on its own array, if that is made of floating numbers."""
        indices = range(self.count)
        own = [[i == j and _is_float(node.inputs[i]) for j in indices] + [False] for i in indices]
        return [*own, [False] * (self.count + 1)]

    @abstractmethod
    def derivative(self, tensors: list[Variable], name: str) -> list[Variable]:
        """The same collective of other arrays; it is linear."""

    def pushforward(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], tangents: Sequence[Variable]
    ) -> list[Variable]:
        """The collective of the tangents."""
        known = [i for i in range(self.count) if not isinstance(tangents[i].type, DisconnectedType)]
        result: list[Variable] = [disconnected_type() for _ in outputs]
        found = self.derivative([tangents[i] for i in known], f"{self.name}/tangent") if known else []
        for index, tangent in zip(known, found, strict=True):
            result[index] = tangent
        return result


class Allreduce(Collective):
    """Reduction of one or several arrays over the ranks.

    The submissions of all arrays are on their way before the first is waited for.
    """

    kind: ClassVar[str] = "allreduce"

    def __init__(self, name: str, count: int, comm: Communicator, op: ReduceOpName) -> None:
        super().__init__(name, count, comm)
        self.op: ReduceOpName = op
        self.queue = shared_queue(comm, "pytensor")
        self.destroy_map: dict[int, list[int]] = {}

    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """Submit all, wait for all."""
        reserve_name(self.comm, "pytensor", self.name)
        works = []
        for index, array in enumerate(inputs):
            name = self.name if self.count == 1 else f"{self.name}[{index}]"
            out = array if self.destroy_map and is_plain(array) else np.empty(array.shape, array.dtype)
            works.append((out, self.queue.allreduce_async(array, name=name, op=self.op, out=out)))
        for storage, (out, work) in zip(outputs, works, strict=True):
            work.wait()
            storage[0] = out

    def derivative(self, tensors: list[Variable], name: str) -> list[Variable]:
        """The same reduction."""
        found: list[Variable] = Allreduce(name, len(tensors), self.comm, self.op)(*tensors, return_list=True)
        return found[:-1]

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """The reduction of the cotangents: the derivative of the sum of all ranks' costs.

        Only those of several arrays that the cost depends on are reduced.
        """
        if self.op not in LINEAR:
            comment = f"Only {' and '.join(LINEAR)} have a gradient, {self.op} has none."
            return [
                *(grad_undefined(self, index, inputs[index], comment) for index in range(self.count)),
                disconnected_type(),
            ]
        wanted = [
            index
            for index in range(self.count)
            if _is_float(inputs[index]) and not _is_disconnected(cotangents[index])
        ]
        tensors = [cotangents[index] for index in wanted]
        result: list[Variable] = [disconnected_type() for _ in inputs]
        found = self.derivative(tensors, f"{self.name}/gradient") if wanted else []
        for index, gradient in zip(wanted, found, strict=True):
            result[index] = gradient
        return result

    def pushforward(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], tangents: Sequence[Variable]
    ) -> list[Variable]:
        """The reduction of the tangents."""
        if self.op not in LINEAR:
            raise UsageError(f"{self} has no derivative; only {' and '.join(LINEAR)} have one")
        return super().pushforward(inputs, outputs, tangents)


class SumAtRoot(Allreduce):
    """The gradient of a broadcast: the sum over the ranks at the root, zeros elsewhere.

    An op and not an expression, because the graph has to be the same on all ranks: in an expression that
    multiplies by zero elsewhere, the ranks other than the root would have the reduction optimised away.
    """

    kind: ClassVar[str] = "sum_at_root"

    def __init__(self, name: str, comm: Communicator, root: int) -> None:
        super().__init__(name, 1, comm, "sum")
        self.root = root

    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """Reduce, forget."""
        super().run(inputs, outputs)
        if self.comm.rank != self.root:
            outputs[0][0][...] = 0

    def derivative(self, tensors: list[Variable], name: str) -> list[Variable]:
        """The same."""
        return [SumAtRoot(name, self.comm, self.root)(*tensors, return_list=True)[0]]

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """The root's cotangent, on all ranks."""
        op = Broadcast(f"{self.name}/gradient", self.comm, self.root)
        return [op(cotangents[0], return_list=True)[0], disconnected_type()]


class Broadcast(Collective):
    """One rank's array on all ranks."""

    kind: ClassVar[str] = "broadcast"

    def __init__(self, name: str, comm: Communicator, root: int) -> None:
        super().__init__(name, 1, comm)
        self.root = root
        self.group = derived(comm, "pytensor")

    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """Broadcast into a copy."""
        reserve_name(self.comm, "pytensor", "")
        value = np.array(inputs[0], order="C")
        self.group.broadcast(value, root=self.root, out=value, name=self.name)
        outputs[0][0] = value

    def derivative(self, tensors: list[Variable], name: str) -> list[Variable]:
        """The same broadcast."""
        found: list[Variable] = Broadcast(name, self.comm, self.root)(*tensors, return_list=True)
        return found[:-1]

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """The sum of all ranks' cotangents at the root, zeros elsewhere."""
        op = SumAtRoot(f"{self.name}/gradient", self.comm, self.root)
        return [op(cotangents[0], return_list=True)[0], disconnected_type()]


class Allgather(Collective):
    """The ranks' arrays joined along their first axis.

    The second output is where this rank's rows begin, and how many rows there are: known when the function
    runs, so that the graph that uses it is the same on all ranks.
    """

    kind: ClassVar[str] = "allgather"

    def __init__(self, name: str, comm: Communicator) -> None:
        super().__init__(name, 1, comm)
        self.group = derived(comm, "pytensor")

    def output_types(self, inputs: Sequence[Variable]) -> list[Any]:
        """The array with any number of rows, and int64 (2,)."""
        kind = inputs[0].type
        return [TensorType(kind.dtype, shape=(None, *kind.shape[1:])), TensorType("int64", shape=(2,))]

    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """Gather the numbers of rows, then the rows."""
        reserve_name(self.comm, "pytensor", "")
        array = inputs[0]
        mine = np.array([array.shape[0]], dtype=np.int64)
        rows = np.asarray(self.group.allgather(mine, name=f"{self.name}.rows"))
        outputs[0][0] = np.asarray(self.group.allgather(array, name=self.name))
        outputs[1][0] = np.array([rows[: self.comm.rank].sum(), rows.sum()], dtype=np.int64)

    def infer_shape(self, fgraph: FunctionGraph, node: Apply, shapes: Sequence[Any]) -> list[Any]:
        """The number of rows is known to this op only."""
        return [(node.outputs[1][1], *shapes[0][1:]), (2,), ()]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """The joined array depends on the array."""
        return [[_is_float(node.inputs[0]), False, False], [False] * 3]

    def derivative(self, tensors: list[Variable], name: str) -> list[Variable]:
        """The same of the tangent."""
        return [Allgather(name, self.comm)(*tensors, return_list=True)[0]]

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], cotangents: Sequence[Variable]
    ) -> list[Variable]:
        """This rank's rows of the sum of all ranks' cotangents."""
        op = Allreduce(f"{self.name}/gradient", 1, self.comm, "sum")
        total = op(cotangents[0], return_list=True)[0]
        start = outputs[1][0]
        return [total[start : start + inputs[0].shape[0]], disconnected_type()]


def _is_float(x: Variable) -> bool:
    return str(x.type.dtype).startswith("float")


def _is_disconnected(x: Variable) -> bool:
    return isinstance(x.type, DisconnectedType)


@node_rewriter([Allreduce])
def _reduce_in_place(fgraph: FunctionGraph, node: Apply) -> Any:
    """Reduce into the inputs; PyTensor takes it back where one is still needed by others."""
    if node.op.destroy_map or not node.op.count:
        return False
    op = node.op.with_(destroy_map={index: [index] for index in range(node.op.count)})
    return op(*node.inputs, return_list=True)


optdb.register("multiring_inplace", dfs_rewriter(_reduce_in_place), "fast_run", "inplace", position=50.3)
