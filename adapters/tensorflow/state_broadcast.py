"""State from one rank to all, and weights of batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multiring import metrics
from multiring.derived import derived, resolve
from multiring.errors import UsageError
from multiring.reductions import explain_arguments
from multiring.state.broadcast import broadcast_arrays, check_root
from multiring.state.buffer_sync import check_mode, sync_arrays
from multiring.tensorflow.variables import NAMES_ADVICE, buffers_of, named_variables, to_numpy
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["batch_weight", "broadcast_variables", "sync_buffers"]


@explain_arguments
def broadcast_variables(variables: Any, root: int = 0, comm: Communicator | None = None) -> None:
    """Overwrite variables of all ranks with those of `root`. Collective; eagerly or inside `tf.function`.

    In a `tf.function` it happens in each run of what is traced: trace it for the first batch alone, with a
    Python bool (`if first_batch:`) or a `tf.cond` that all ranks decide alike.

    Args:
        variables: A model, an optimizer, a mapping, or a sequence of variables, of TensorFlow or of Keras on
            any backend, of any dtypes; in the same order on every rank. Of a model its `weights`: the seeds
            of its random layers stay as they are.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank; or, in a `tf.function`, a variable is not TensorFlow's.
        MismatchError: The ranks pass different names, shapes or dtypes. From a `tf.function` it comes as an
            error of TensorFlow; see `multiring.tensorflow.translate_errors`.
    """
    comm = resolve(comm)
    check_root(comm, root)
    if comm.size == 1:
        return
    found = named_variables(variables)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and not tensorflow.executing_eagerly():
        # Nothing in it is for AutoGraph, which would take long.
        tensorflow.autograph.experimental.do_not_convert(_broadcast_in_graph)(tensorflow, found, root, comm)
        return
    arrays = {name: to_numpy(variable) for name, variable in found.items()}
    broadcast_arrays(comm, arrays, root, advice=NAMES_ADVICE)
    if comm.rank != root:
        for name, variable in found.items():
            variable.assign(arrays[name])


def _broadcast_in_graph(tf: Any, found: Mapping[str, Any], root: int, comm: Communicator) -> None:
    """Add the broadcast to the function that is being traced."""
    from multiring.tensorflow.graph.library import number_of
    from multiring.tensorflow.graph.naming import operation_name
    from multiring.tensorflow.ops import grouped_allreduce, grouped_broadcast

    if not isinstance(tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph):
        raise UsageError(
            "broadcast_variables runs eagerly or in a tf.function: in a graph of TensorFlow 1 assign what "
            "multiring.tensorflow.grouped_broadcast returns, and run the assignments"
        )
    for name, variable in found.items():
        if not _is_of_tensorflow(variable, tf) or variable.dtype in ("string", tf.string):
            raise UsageError(f"variable '{name}' cannot be broadcast in a tf.function: it holds no numbers")
    name = operation_name("broadcast_variables", number_of(comm))
    values = [tf.convert_to_tensor(variable) for variable in found.values()]
    labels = [f"{title} {value.dtype.name} {value.shape}" for title, value in zip(found, values, strict=True)]
    # A broadcast compares counts of elements alone; this one compares what the variables are.
    compared = grouped_allreduce(
        [tf.zeros([], tf.uint8)] * len(labels), "max", name=f"{name}: compare", labels=labels, comm=comm
    )
    with tf.control_dependencies(compared):
        received = grouped_broadcast(values, root, name=name, comm=comm)
    if comm.rank != root:
        for variable, result in zip(found.values(), received, strict=True):
            variable.assign(result)


def sync_buffers(model: Any, mode: BufferMode = "broadcast", comm: Communicator | None = None) -> None:
    """Make what a model holds beside its trained variables, such as moving statistics, the same on all ranks.

    Collective. For loops of one's own, at the end of each training step, in a `tf.function` or not: then
    evaluation and checkpoints are the same on all ranks. Under `fit()` the callback `BroadcastInitialState`
    does it.

    Args:
        model: A model of Keras or tf_keras, a `tf.Module`, or variables. Of a model its layers' variables
            that are never trained, without metrics and the seeds of random layers.
        mode: "broadcast" those of rank 0, "average" what is floating-point, or leave all "local".
        comm: Ranks that train together; the world by default.

    Raises:
        UsageError: There is no such mode.
    """
    comm = resolve(comm)
    check_mode(comm.rank, mode)
    found = buffers_of(model)
    if comm.size == 1 or mode == "local" or not found:
        return
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not all(_is_of_tensorflow(v, tensorflow) for v in found.values()):
        arrays = {name: to_numpy(variable) for name, variable in found.items()}
        sync_arrays(derived(comm, "buffers of Keras"), arrays, mode)
        for name, variable in found.items():
            variable.assign(arrays[name])
        return
    from multiring.tensorflow.ops import grouped_allreduce, grouped_broadcast

    values = {name: tensorflow.convert_to_tensor(variable) for name, variable in found.items()}
    averaged = [name for name in found if mode == "average" and values[name].dtype.is_floating]
    rest = [name for name in found if name not in averaged]
    title = f"buffers: {next(iter(found))} and {len(found) - 1} more"
    results = grouped_broadcast([values[name] for name in rest], name=title, comm=comm)
    means = grouped_allreduce(
        [values[name] for name in averaged], "average", name=f"{title}, averaged", comm=comm
    )
    for name, value in zip([*rest, *averaged], [*results, *means], strict=True):
        found[name].assign(value)


def _is_of_tensorflow(variable: Any, tensorflow: Any) -> bool:
    # A variable of Keras 3 has the one of its backend as its value.
    return isinstance(variable, tensorflow.Variable) or isinstance(
        getattr(variable, "_value", None), tensorflow.Variable
    )


def batch_weight(count: Any, comm: Communicator | None = None) -> Any:
    """What to multiply the mean loss of a batch with where batches differ in size over ranks. Collective.

    Gradients are averaged over ranks, not over samples. With `loss * batch_weight(tf.shape(x)[0])` the
    average over ranks is the mean over the samples of all ranks.

    Args:
        count: Number of samples of this rank's batch (or another weight, 0 or more); a tensor or a number.
        comm: Ranks that train together; the world by default.

    Returns:
        count * size / (sum of the counts of all ranks), 0 where no rank has a sample; a tensor (float32)
        for a tensor and in a `tf.function`, otherwise a float.
    """
    comm = resolve(comm)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or (tensorflow.executing_eagerly() and not tensorflow.is_tensor(count)):
        return metrics.batch_weight(float(count), comm)
    from multiring.tensorflow.ops import allreduce

    own = tensorflow.cast(count, tensorflow.float64)
    total = allreduce(own, name="batch weight", comm=comm)
    weight = tensorflow.math.divide_no_nan(own * comm.size, total)
    return tensorflow.cast(weight, tensorflow.float32)
