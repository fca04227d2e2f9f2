"""How functions compiled by Numba call the ops: as Python code, in object mode.

PyTensor has a way of its own for ops without Numba code, but it hands the node, and with it the whole graph,
to Numba, which pickles what it is handed: a communicator does not pickle, and weights should not. Here Numba
gets a number, by which the node is looked up.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multiring.pytensor.blocking import BlockingOp, PerformOp, check_ordered
from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import GraphRewriter

if TYPE_CHECKING:
    from pytensor.graph.fg import FunctionGraph

__all__ = ["RegisterNumbaCall", "call"]

# The compiled function holds its nodes.
_nodes: weakref.WeakValueDictionary[int, Apply] = weakref.WeakValueDictionary()
_keys = itertools.count()


def call(key: int, inputs: tuple[Any, ...]) -> Any:
    """Run a node; called from compiled code."""
    node = _nodes[key]
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    node.op.perform(node, inputs, storage)
    return storage[0][0] if len(storage) == 1 else tuple(cell[0] for cell in storage)


class RegisterNumbaCall(GraphRewriter):
    """Tells PyTensor about `call` before the first function for Numba is compiled.

    Importing Numba takes seconds, so it waits for a mode that uses it. Changes nothing in the graph.
    """

    def apply(self, fgraph: FunctionGraph) -> None:
        """Register the conversion, once."""
        from pytensor.link.numba.dispatch.basic import numba_funcify

        if PerformOp not in numba_funcify.registry:
            numba_funcify.register(PerformOp)(_convert)


def _convert(op: PerformOp, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    import numba

    from pytensor.link.numba.dispatch.basic import get_numba_type, numba_njit

    if isinstance(op, BlockingOp):
        check_ordered(node)
    key = next(_keys)
    _nodes[key] = node
    kinds = [get_numba_type(output.type) for output in node.outputs]
    kind = kinds[0] if len(kinds) == 1 else numba.types.Tuple(kinds)

    @numba_njit
    def perform(*inputs: Any) -> Any:
        with numba.objmode(result=kind):
            result = call(key, inputs)
        return result  # noqa: RET504  # what Numba wants it to look like

    convert: Callable[..., Any] = perform
    return convert


optdb.register("multiring_numba", RegisterNumbaCall(), "numba", position=-1)
