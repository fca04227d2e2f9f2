"""The rewrite that has gradients reduced in the memory that they were computed in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from multiring.pytensor.gradient_ops import Begin, Ready, ReadyInPlace
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.features import AlreadyThere, Feature
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter

if TYPE_CHECKING:
    from pytensor.graph.fg import FunctionGraph

__all__ = ["BeginFirst"]


class BeginFirst(Feature):
    """Has `Begin` run before the nodes that write the memory of gradients that are reduced in place.

    Linkers let nodes write again into the arrays of the call before. If that ended with an exception, a
    reduction in them may be under way still.
    """

    def on_attach(self, fgraph: FunctionGraph) -> None:
        """One is enough for a graph."""
        if any(isinstance(feature, BeginFirst) for feature in fgraph._features):
            raise AlreadyThere

    def clone(self) -> BeginFirst:
        """For a copy of the graph; there is no state."""
        return BeginFirst()

    def orderings(self, fgraph: FunctionGraph) -> dict[Apply, list[Apply]]:
        """Which nodes have to run before which; called by the linkers."""
        before: dict[Apply, list[Apply]] = {}
        for node in fgraph.apply_nodes:
            if isinstance(node.op, ReadyInPlace):
                begin = _begin_of(node)
                for writer in _writers(node.inputs[0]):
                    known = before.setdefault(writer, [])
                    if begin not in known:
                        known.append(begin)
        return before


def _begin_of(node: Apply) -> Apply:
    begin: Apply = node.inputs[1].owner
    assert isinstance(begin.op, Begin)
    return begin


def _writers(variable: Variable) -> Iterator[Apply]:
    """The node that makes an array, and those that have worked in place on its memory or made views of it."""
    while (node := variable.owner) is not None:
        yield node
        origins = {**node.op.view_map, **node.op.destroy_map}.get(node.outputs.index(variable))
        if not origins:
            return
        variable = node.inputs[origins[0]]


@node_rewriter([Ready])
def _reduce_where_it_lies(fgraph: FunctionGraph, node: Apply) -> Any:
    """PyTensor takes it back where the gradient is needed by others still, or is not the function's own."""
    if type(node.op) is not Ready:
        return False
    fgraph.attach_feature(BeginFirst())
    op = ReadyInPlace(node.op.name, node.op.current, node.op.index)
    return op(*node.inputs, return_list=True)


# Before elementwise operations look for memory to work in: a gradient is more than they save.
_rewriter = dfs_rewriter(_reduce_where_it_lies)
optdb.register("multiring_gradients_inplace", _rewriter, "fast_run", "inplace", position=50.4)
