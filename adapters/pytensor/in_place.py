"""The rewrite that has gradients reduced in the memory that they were computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiring.pytensor.gradient_ops import Ready, ReadyInPlace, origins
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter

if TYPE_CHECKING:
    from pytensor.graph.fg import FunctionGraph

__all__ = ["reduce_where_it_lies"]


@node_rewriter([Ready])
def reduce_where_it_lies(fgraph: FunctionGraph, node: Apply) -> Any:
    """PyTensor takes it back where the gradient is needed by others still.

    Memory that comes from outside is left alone, even where the function may overwrite it: the program may
    read or write it while a reduction is under way that a failed call has left.
    """
    *_, root = origins(node.inputs[0])
    if type(node.op) is not Ready or root.owner is None:
        return False
    op = ReadyInPlace(node.op.name, node.op.current, node.op.index)
    return op(*node.inputs, return_list=True)


# After all other rewrites in place, which decide what memory a gradient is in.
_rewriter = dfs_rewriter(reduce_where_it_lies)
optdb.register("multiring_gradients_inplace", _rewriter, "fast_run", "inplace", position=96)
