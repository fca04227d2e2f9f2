"""Operations of one name run in the order of the program.

The k-th run of a name on one rank meets the k-th on the others. Operations of different names may overlap and
run in any order; those of one name, in one graph or in functions, branches and loops that it calls, must not.
`tf.function` orders calls of functions by the variables that they write and nothing else, so the order is
added here, as control dependencies, when a graph is finished.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf
from multiring.errors import UsageError
from multiring.tensorflow.graph.library import is_asynchronous, native_ops, on_host
from multiring.tensorflow.graph.threads import leave_branch, reserve, reserve_at_each_call

__all__ = ["run"]

_Key = tuple[int, str]  # number of the communicator's queue, name

_PREFIX = "Multiring"
# What the functions of a finished graph, and of all that it calls, submit.
_keys: weakref.WeakKeyDictionary[Any, frozenset[_Key]] = weakref.WeakKeyDictionary()
# Operations of each graph when it was put in order.
_sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# How often a name was used in a graph of TensorFlow 1.
_uses: weakref.WeakKeyDictionary[Any, dict[_Key, int]] = weakref.WeakKeyDictionary()


def run(name: str, *inputs: Any, **attributes: Any) -> Any:
    """Run a native op, or add it to the graph that is being built, in the order of its name.

    Args:
        name: Of the function in the library, "multiring_allreduce".
        inputs: Its inputs.
        attributes: Its attributes, "communicator" and "tensor_name" among them.

    Raises:
        UsageError: Nothing keeps the operation in an order: it is in a function of a `tf.data` pipeline or in
            a parallel loop of TensorFlow 1, or another thread uses the name.
    """
    with on_host():
        return _run(name, *inputs, **attributes)


def _run(name: str, *inputs: Any, **attributes: Any) -> Any:
    op = getattr(native_ops(), name)
    key = (
        attributes["communicator"],
        f"{'step ' if name == 'multiring_step' else ''}{attributes['tensor_name']}",
    )
    if tf.executing_eagerly():
        reserve([key])
        return op(*inputs, **attributes)
    graph = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    if not isinstance(graph, tf.__internal__.FuncGraph) or context is not None:
        _refuse_parallel_loop(context, attributes["tensor_name"])
        attributes["tensor_name"] = _numbered(graph, key, attributes["tensor_name"])
        return op(*inputs, **attributes)
    _refuse_dataset(graph, key)
    last = _last_of(graph)
    manager = getattr(graph, "experimental_acd_manager", None)
    with tf.control_dependencies([last[key]] if key in last and manager is None else []):
        results = op(*inputs, **attributes)
    first = results[0] if isinstance(results, list | tuple) else results
    last[key] = first.op
    reserve_at_each_call(graph, key)
    if manager is None:
        graph.control_outputs.append(first.op)  # the caller of the function waits for it
    elif _resolvers is not None and is_asynchronous():
        # Has to run, but needs no order among other operations with effects. Operations that hold a thread
        # while they wait do: the order that all ranks share.
        manager.run_independently(first.op)
    return results


def _last_of(graph: Any) -> dict[_Key, Any]:
    """The last operation of each name so far.

    Kept by the graph itself: operations refer to their graph, which would never be freed otherwise.
    """
    last: dict[_Key, Any] | None = getattr(graph, "_multiring_last", None)
    if last is None:
        last = graph._multiring_last = {}
    return last


def _order(graph: Any) -> None:
    """Make everything in a finished graph that submits a name wait for what has submitted it before."""
    last: dict[_Key, Any] = {}
    for op in graph.get_operations():
        keys = _keys_of(op)
        if not keys:
            continue
        before = {last[key] for key in keys if key in last}
        op._add_control_inputs(list(before.difference(op.control_inputs)))
        last.update(dict.fromkeys(keys, op))
    _keys[graph] = frozenset(last)
    for key in last:
        _refuse_dataset(graph, key)


def _keys_of(op: Any) -> frozenset[_Key]:
    """What an operation submits, or the functions that it calls."""
    kind = op.type
    if kind.startswith(_PREFIX):
        name = op.get_attr("tensor_name").decode()
        return frozenset([(op.get_attr("communicator"), f"step {name}" if kind == "MultiringStep" else name)])
    found: frozenset[_Key] = frozenset()
    for attribute in _function_attributes(kind):
        value = op.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            found |= _keys_of_function(op.graph, function.name)
    return found


def _keys_of_function(graph: Any, name: str) -> frozenset[_Key]:
    function = graph._get_function(name)
    if function is None:
        return frozenset()
    called = function.graph
    if called not in _keys:  # without automatic control dependencies, or of another process
        _keys[called] = frozenset().union(*(_keys_of(op) for op in called.get_operations()))
    return _keys[called]


@functools.cache
def _function_attributes(kind: str) -> tuple[str, ...]:
    """Names of an op's attributes that are functions."""
    definition = op_def_registry.get(kind)
    if definition is None:
        return ()
    return tuple(attr.name for attr in definition.attr if attr.type in ("func", "list(func)"))


def _numbered(graph: Any, key: _Key, name: str) -> str:
    """A name of its own for each use in a graph of TensorFlow 1, of which each session runs any part."""
    uses = _uses.setdefault(graph, {})
    uses[key] = uses.get(key, 0) + 1
    return name if uses[key] == 1 else f"{name} ({uses[key]})"


def _refuse_parallel_loop(context: Any, name: str) -> None:
    while context is not None:
        if context.IsWhileContext() and context.parallel_iterations != 1:
            raise UsageError(
                f"'{name}' cannot run in a tf.while_loop of TensorFlow 1 whose iterations overlap: ranks "
                "would reach them in different order; pass parallel_iterations=1"
            )
        context = context.outer_context


def _refuse_dataset(graph: Any, key: _Key) -> None:
    while graph is not None:
        if str(getattr(graph, "name", "")).startswith(("Dataset_", "tf_data_")):
            raise UsageError(
                f"'{key[1]}' cannot run in a function of a tf.data pipeline: elements are made in parallel "
                "and ahead of time, in another order on each rank; call it outside of the pipeline"
            )
        graph = getattr(graph, "outer_graph", None)


def _resolve(op: Any, reads: Any, writes: Any) -> bool:
    """Called for the operations of each graph that TensorFlow adds automatic control dependencies to."""
    graph = op.graph
    if _sizes.get(graph) != graph.num_operations():
        _order(graph)
        leave_branch(graph)
        _sizes[graph] = graph.num_operations()
    return False


# Not part of TensorFlow's public interface; without it operations run one after the other, and calls of
# functions that cannot be ordered are refused by the kernels where they overlap.
try:
    from tensorflow.python.framework import op_def_registry
    from tensorflow.python.framework.auto_control_deps import register_acd_resource_resolver as _resolvers

    _resolvers(_resolve)
except ImportError:
    _resolvers = None
