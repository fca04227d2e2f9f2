"""Ops that wait for the other ranks, and the order in which a compiled function runs them.

The danger. A compiled function runs its nodes one after the other, in any order that its data dependencies
allow; which one differs between linkers and between versions. Let two reductions A and B be independent of
each other. If rank 0 waits in A while rank 1 waits in B, both wait for ever, however well names are matched.

The rule. Every op that waits (a `BlockingOp`) has one more input and one more output, a *token*, and a number
that grows as graphs are built. Whenever a function is compiled, a rewrite sorts its blocking nodes: again and
again it takes, of the nodes whose blocking ancestors have all been taken, the one with the smallest number.
Then it feeds the token of each node to the next. The tokens are data dependencies, so every linker keeps to
this order.

Why that is enough. Ranks that build the same program number its collectives in the same order, so they sort
them alike: an op is numbered after those that it depends on, hence the order is that of the numbers, whatever
rewrites have made of the rest of the graph. So all ranks run the same list c1, c2, ... one after the other.
Take the rank that has finished the fewest of them, and let it be in c(k): all others have finished c(k-1), so
each of them is in c(k), past it, or computes on its way to it without waiting for anybody. Nobody waits for
what is behind c(k), so c(k) is submitted by every rank and ends. By induction all of them do. Ops that only
submit (see `gradients`) never wait and may run anywhere in between.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from multiring.errors import UsageError
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.tensor.type import TensorType

if TYPE_CHECKING:
    from pytensor.graph.fg import FunctionGraph

__all__ = ["TOKEN", "BlockingOp", "GraphError", "PerformOp", "is_plain", "token"]

TOKEN = TensorType("int8", shape=())
_numbers = itertools.count()


class GraphError(UsageError, AssertionError):
    """A graph cannot be compiled as it is.

    It is an AssertionError too, since PyTensor logs and forgets every other error of a rewrite.
    """


def token(value: int) -> Variable:
    """A constant token: 0 for "nobody has ordered this yet", 1 for the first of an order."""
    made: Variable = TOKEN.make_constant(np.array(value, dtype=np.int8))
    return made


def is_plain(array: Any) -> bool:
    """Whether the elements of an array lie one behind the other in memory that may be written."""
    return bool(array.flags.c_contiguous and array.flags.writeable)


class PerformOp(Op):
    """An op that runs as Python code and acts on the outside world.

    It has no `__props__`, so two ops are equal only if they are the same object: two reductions of one array
    stay two. It is never folded, not even where all inputs are constants.

    Attributes:
        name: What messages call it.
    """

    kind: ClassVar[str] = "op"

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"multiring.{self.kind}{{{self.name}}}"

    __repr__ = __str__

    def do_constant_folding(self, fgraph: FunctionGraph, node: Apply) -> bool:
        """Never: what the other ranks contribute is not in the graph."""
        return False


class BlockingOp(PerformOp):
    """An op that waits for the other ranks.

    Derived classes define `output_types` and `run`; the token is taken care of here.

    Attributes:
        count: Number of inputs without the token.
        number: Place among all blocking ops of this process, in the order in which they were made.
        identity: What may occur only once in a function.
    """

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name)
        self.count = count
        self.number = next(_numbers)
        self.identity: object = self

    @abstractmethod
    def output_types(self, inputs: Sequence[Variable]) -> list[Any]:
        """Types of the outputs without the token."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], outputs: Sequence[list[Any]]) -> None:
        """What `perform` does, token aside."""

    def make_node(self, *inputs: Variable) -> Apply:
        """A node with a token that is not yet ordered, unless one is given."""
        data, tokens = list(inputs[: self.count]), list(inputs[self.count :])
        outputs = [kind() for kind in self.output_types(data)]
        return Apply(self, [*data, *(tokens or [token(0)])], [*outputs, TOKEN()])

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Sequence[list[Any]]) -> None:
        """Run; called by the linkers."""
        self.run(inputs[: self.count], output_storage[:-1])
        output_storage[-1][0] = np.array(1, dtype=np.int8)

    def prepare_node(self, node: Apply, storage_map: Any, compute_map: Any, impl: str | None) -> None:
        """Called by the linkers but Numba's before a node is run for the first time."""
        check_ordered(node)

    def with_(self, **attributes: Any) -> BlockingOp:
        """A copy with the same number and other attributes, for rewrites that replace a node."""
        op = copy.copy(self)
        op.__dict__.update(attributes)
        return op


def check_ordered(node: Apply) -> None:
    """Raise GraphError where the rewrite has not seen a node."""
    first = node.inputs[-1]
    if isinstance(first, Constant) and not first.data:
        raise GraphError(
            f"{node.op} was compiled without the rewrite 'multiring_order', so ranks could wait for each "
            "other for ever; use a mode that includes the tag 'minimum_compile', as all of PyTensor's do"
        )


class OrderBlockingOps(GraphRewriter):
    """The rewrite that the module's documentation describes."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Chain the blocking nodes of a function.

        Raises:
            GraphError: A blocking op in an inner graph, or the same op twice.
        """
        nodes, ancestors = _blocking_nodes(fgraph)
        _refuse_repeated(nodes)
        previous = token(1)
        for node in _in_order(nodes, ancestors):
            if node.inputs[-1] is not previous:
                fgraph.change_node_input(
                    node, len(node.inputs) - 1, previous, reason="multiring_order", import_missing=True
                )
            previous = node.outputs[-1]


def _blocking_nodes(fgraph: FunctionGraph) -> tuple[list[Apply], list[int]]:
    """The blocking nodes, and for each the set of those that it depends on, as bits by place in the list."""
    nodes: list[Apply] = []
    ancestors: list[int] = []
    reached: dict[Apply, int] = {}
    for node in fgraph.toposort():
        before = 0
        for variable in node.inputs:
            if variable.owner is not None:
                before |= reached[variable.owner]
        if isinstance(node.op, BlockingOp):
            ancestors.append(before)
            before |= 1 << len(nodes)
            nodes.append(node)
        elif isinstance(node.op, HasInnerGraph):
            for inner in _inner_nodes(node):
                raise GraphError(
                    f"{inner.op} is inside {node.op}, where it cannot be ordered among the function's other "
                    "collectives; take it out of the scan or inner graph (OpFromGraph: inline=True)"
                )
        reached[node] = before
    return nodes, ancestors


def _inner_nodes(node: Apply) -> Iterator[Apply]:
    for inner in node.op.fgraph.apply_nodes:
        if isinstance(inner.op, PerformOp):
            yield inner
        elif isinstance(inner.op, HasInnerGraph):
            yield from _inner_nodes(inner)


def _refuse_repeated(nodes: Sequence[Apply]) -> None:
    seen: set[int] = set()
    for node in nodes:
        if id(node.op.identity) in seen:
            raise GraphError(
                f"{node.op} occurs twice in one function; reduce a model's gradients once in a function, and "
                "build a second collective by a call of its own instead of cloning the graph"
            )
        seen.add(id(node.op.identity))


def _in_order(nodes: Sequence[Apply], ancestors: Sequence[int]) -> Iterator[Apply]:
    """Topological order of the nodes in which ties go to the smallest number."""
    waiting = dict(enumerate(ancestors))
    free: list[tuple[int, int]] = []
    done = 0
    while waiting or free:
        for position in [position for position, before in waiting.items() if not before & ~done]:
            del waiting[position]
            heapq.heappush(free, (nodes[position].op.number, position))
        _, position = heapq.heappop(free)
        done |= 1 << position
        yield nodes[position]


class RefuseForeignLinkers(GraphRewriter):
    """Clear words for modes that turn the whole function into another framework's."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Raise GraphError where there is an op that runs as Python code."""
        for node in fgraph.apply_nodes:
            if isinstance(node.op, PerformOp):
                raise GraphError(
                    f"{node.op} runs as Python code, which this mode cannot call; compile with mode='CVM', "
                    "'FAST_COMPILE' or 'NUMBA'"
                )


@_vectorize_node.register(PerformOp)
def _refuse_to_vectorize(op: PerformOp, node: Apply, *inputs: Variable) -> Apply:
    raise UsageError(f"{op} cannot be vectorised: it would communicate once for each element")


# Every linker asks for "minimum_compile". Once before everything that simplifies: of two modes one may find
# out that a result is multiplied by zero and drop its collective, but not when the next one wants its token.
# And once before the rewrites in place, for what has been inlined meanwhile.
_TAGS = ("minimum_compile", "fast_run", "fast_compile", "multiring_order")
optdb.register("multiring_order_early", OrderBlockingOps(), *_TAGS, position=-0.005)
optdb.register("multiring_order_late", OrderBlockingOps(), *_TAGS, position=49.2)
optdb.register("multiring_refuse", RefuseForeignLinkers(), "jax", "mlx", position=-1)
