"""A gradient tape whose gradients are reduced over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import tensorflow as tf
from multiring.derived import resolve
from multiring.gradients.options import BucketKeywords, ReducerOptions
from multiring.reductions import explain_arguments
from multiring.tensorflow.gradient_reduction import GradientReduction, kinds_of
from multiring.tensorflow.kept import KeptReductions
from multiring.tensorflow.sparse import as_dense

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedGradientTape"]

_reductions = KeptReductions()  # a tape lives for one step


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`: `gradient()` returns gradients reduced over ranks, all else is the tape's
    own.

    The first call for a list of sources compares these over the ranks (collective); the reduction is kept as
    long as the sources live, so that wrapping a new tape in each step costs nothing. A call with other
    sources, such as variables that were created late, makes another one, on all ranks alike. Tensors that
    are watched may be sources too; those that each step makes anew are compared in each step.
    """

    @explain_arguments
    def __init__(
        self,
        tape: tf.GradientTape,
        comm: Communicator | None = None,
        *,
        sparse_as_dense: bool = False,
        uneven: bool = False,
        check_every: int | None = None,
        **options: Unpack[BucketKeywords],
    ) -> None:
        """Wrap `tape`. Not collective.

        Args:
            tape: The tape; with `with DistributedGradientTape(tf.GradientTape()) as tape:` it is entered
                here.
            comm: Ranks that train together; the world by default.
            sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors.
            uneven: Ranks may run out of data at different times; see `GradientReduction.join`.
            check_every: Steps between two comparisons of the variables over ranks; see
                `multiring.ReducerOptions`.
            options: How to reduce: `op`, `average`, `bucket_bytes`, `prescale` and
                `postscale`, as in `multiring.ReducerOptions`.
        """
        self._tape = tape
        self._comm = resolve(comm)
        self._options = ReducerOptions.of(options, check_every=check_every)
        self._dense, self._uneven = sparse_as_dense, uneven

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the tape's: watch, stop_recording, jacobian..."""
        if name == "_tape":
            raise AttributeError(name)
        return getattr(self._tape, name)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Gradients of `target`, reduced over ranks; arguments and structure as in
        `tf.GradientTape.gradient`.

        Collective. A gradient that this rank lacks counts as zeros, see `GradientReduction`.

        Raises:
            MismatchError: The ranks have different sources.
            tf.errors.OpError: The communication failed.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        variables = tf.nest.flatten(sources)
        found = tf.nest.flatten(gradients)
        if self._dense:
            found = as_dense(found)
        reduced = self.reduction(variables, found).reduce(found)
        return tf.nest.pack_sequence_as(gradients, reduced)

    def reduction(
        self, variables: Sequence[Any], gradients: Sequence[Any] | None = None
    ) -> GradientReduction:
        """What reduces the gradients of these variables. Collective when it is asked for the first time.

        Args:
            variables: Sources of `gradient`.
            gradients: This rank's gradients, from which it learns which are sparse.
        """

        def make() -> GradientReduction:
            kinds = None if gradients is None else kinds_of(gradients)
            return GradientReduction(variables, self._comm, self._options, kinds=kinds, uneven=self._uneven)

        found: GradientReduction = _reductions.get(self._comm, variables, (self._options, self._uneven), make)
        return found
