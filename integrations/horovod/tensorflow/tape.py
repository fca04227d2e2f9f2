"""Gradient tapes whose gradients are reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average
from multiring.horovod.tensorflow.compression import Compression, Compressor
from multiring.horovod.tensorflow.gradients import GradientOptions, LocalVariables

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):
    """Goes before the wrapped class in the order of bases."""

    _options: GradientOptions
    _local: LocalVariables

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of a variable on this rank: it is not reduced."""
        self._local.add(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        use_generic: bool = False,
    ) -> Any:
        """As `tf.GradientTape.gradient`, reduced over ranks. `use_generic` is ignored."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        found = tf.nest.flatten(gradients)
        reduced = self._options.reduce(found, tf.nest.flatten(sources), self._local)
        return tf.nest.pack_sequence_as(gradients, reduced)


def DistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose `gradient` reduces over all ranks; of a subclass of the given one's class, with what that
    has recorded.

    Args:
        gradtape: The tape.
        device_dense: Ignored, as `device_sparse`.
        device_sparse: Ignored.
        compression: What gradients are made of on their way.
        sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: an average divides by f before the reduction, and by size / f after it.
        num_groups: The former name of `groups`.
        groups: Number of groups of gradients that are reduced together, or the variables of each group.
        process_set: Ranks that reduce; others keep their own gradients.
        scale_local_gradients: Divide gradients of local sources by the number of ranks.

    Raises:
        ValueError: Arguments make no sense together.
    """
    options = GradientOptions.of(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    wrapped = type(gradtape)
    made: Any = type(wrapped.__name__, (_Distributed, wrapped), {"__module__": wrapped.__module__})
    tape = made.__new__(made)
    tape.__dict__.update(gradtape.__dict__)
    tape._options, tape._local = options, LocalVariables()
    return tape


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape` that does not reduce the gradients of `local_layers`, a layer or several."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    if local_layers is None:
        local_layers = []
    for layer in local_layers if isinstance(local_layers, Iterable) else [local_layers]:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
