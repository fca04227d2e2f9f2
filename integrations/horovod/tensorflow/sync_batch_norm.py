"""Batch normalisation over the batches of all ranks, as a layer of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import tensorflow as tf

from multiring.horovod.basics import process_set_of_ranks
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Sum
from multiring.horovod.tensorflow.collectives import allreduce
from multiring.horovod.tensorflow.keras_kind import is_tf_keras

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """`tf.keras.layers.BatchNormalization` that normalises with the moments of the batches of all ranks."""

    def __init__(
        self, *args: Any, process_set: ProcessSet | Sequence[int] = global_process_set, **options: Any
    ) -> None:
        """As that layer; of the ranks of a process set, or of the registered one of these ranks.

        Raises:
            ValueError: Options that there are for one process only.
        """
        if options.get("fused") or options.get("renorm") or options.get("virtual_batch_size"):
            raise ValueError("SyncBatchNormalization does not support fused, renorm and virtual_batch_size")
        if not hasattr(tf.keras.layers.BatchNormalization, "synchronized") and is_tf_keras():
            options["fused"] = False
        super().__init__(*args, **options)
        self._process_set = process_set

    def get_config(self) -> dict[str, Any]:
        """Return what makes such a layer again; a process set by its ranks."""
        config: dict[str, Any] = super().get_config()
        if self._process_set != global_process_set:
            config["process_set"] = list(_ranks_of(self._process_set))
        return config

    def _moments(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Mean and variance over all ranks, made of those that Keras computes of this rank's values. A rank
        counts by the number of its values, or of those that a mask leaves."""
        mean, variance = super()._moments(inputs, *args, **options)
        wide = tf.float64 if mean.dtype == tf.float64 else tf.float32
        share = tf.cast(tf.size(inputs) / tf.maximum(tf.size(mean), 1), wide)
        # Keras 3 has the mask second, tf_keras has axes there.
        mask = signature(super()._moments).bind(inputs, *args, **options).arguments.get("mask")
        if mask is not None:
            share *= tf.reduce_mean(tf.cast(mask, wide))
        shape = tf.shape(mean)
        first = tf.cast(tf.reshape(mean, [-1]), wide)
        second = tf.cast(tf.reshape(variance, [-1]), wide)
        # The moments of no elements are NaN, which no share of zero takes away.
        first, second = (tf.where(share > 0, each, tf.zeros_like(each)) for each in (first, second))
        sums = self._summed(tf.concat([share[None], share * first], 0))
        total = tf.maximum(sums[0], 1)
        whole = sums[1:] / total
        # Squares of deviations from the mean of all, which lose no digits where the mean is large.
        squares = self._summed(share * (second + tf.math.squared_difference(first, whole))) / total
        return (
            tf.cast(tf.reshape(whole, shape), mean.dtype),
            tf.cast(tf.reshape(squares, shape), variance.dtype),
        )

    def _summed(self, values: Any) -> Any:
        if not isinstance(self._process_set, ProcessSet):
            self._process_set = process_set_of_ranks(self._process_set)
        return allreduce(values, op=Sum, process_set=self._process_set)


def _ranks_of(process_set: ProcessSet | Sequence[int]) -> Sequence[int]:
    return process_set.ranks or () if isinstance(process_set, ProcessSet) else process_set
