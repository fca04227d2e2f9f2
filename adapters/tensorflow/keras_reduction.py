"""What the optimizer wrappers share: options, accumulation's arithmetic, and the reduction for Keras's
backend.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import multiring
from multiring.errors import UsageError
from multiring.gradients.bucketing import BUCKET_BYTES, FIRST_BUCKET_BYTES
from multiring.gradients.model_check import check_same
from multiring.gradients.source import ReducerOptions
from multiring.tensorflow.kept import KeptReductions

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["LazyReduction", "WrapperOptions"]


@dataclass(frozen=True)
class WrapperOptions:
    """How a wrapped optimizer reduces its gradients; saved along with it.

    Attributes:
        op: "average" or "sum" of the gradients.
        prescale: Factor applied before the reduction.
        postscale: Factor applied after it.
        backward_passes_per_step: Steps whose gradients are averaged on each rank before they are reduced and
            applied.
        bucket_bytes: Limit of a bucket, in bytes.
        first_bucket_bytes: Limit of the first bucket of each dtype, in bytes.
        sparse_as_dense: Reduce sparse gradients as dense tensors.
        check_every: Steps between two comparisons of the training state over ranks; 0: never; None: as
            MULTIRING_CHECK_EVERY says.
    """

    op: Literal["average", "sum"] = "average"
    prescale: float = 1.0
    postscale: float = 1.0
    backward_passes_per_step: int = 1
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    sparse_as_dense: bool = False
    check_every: int | None = None

    def __post_init__(self) -> None:
        if self.backward_passes_per_step < 1:
            raise UsageError(
                f"{self.backward_passes_per_step} backward passes per step; at least 1 is needed"
            )

    @property
    def reducer(self) -> ReducerOptions:
        """The part that the reduction itself takes."""
        return ReducerOptions(
            self.op,
            self.bucket_bytes,
            self.first_bucket_bytes,
            self.prescale,
            self.postscale,
            check_every=self.check_every,
        )


class LazyReduction:
    """Made when the first gradients come, which is when all ranks are known to train; and again for other
    variables, when layers were frozen, or another world.
    """

    def __init__(self, comm: Communicator | None, options: WrapperOptions, backend: str) -> None:
        self._comm, self._options, self._backend = comm, options, backend
        self._made = KeptReductions()

    def __deepcopy__(self, memo: Any) -> LazyReduction:
        return LazyReduction(self._comm, self._options, self._backend)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> list[Any]:
        """The gradients reduced over ranks. Collective.

        Args:
            gradients: This rank's.
            variables: What they are gradients of.
            optimizer: Whose variables and settings have to be the same on all ranks.

        Raises:
            MismatchError: The ranks have different variables or options (at the first call with these).
        """
        comm = multiring.world() if self._comm is None else self._comm
        if comm.size == 1 and self._options.prescale * self._options.postscale == 1.0:
            return list(gradients)
        if self._backend == "tensorflow":
            from multiring.tensorflow.reduced import refuse_reduced

            refuse_reduced(gradients, variables, comm)
            gradients = self._as_dense(gradients)
        reduction = self._made.get(
            comm, variables, None, lambda: self._make(gradients, variables, comm, optimizer)
        )
        reduced: list[Any] = reduction.reduce(gradients)
        return reduced

    def _as_dense(self, gradients: Sequence[Any]) -> Sequence[Any]:
        import tensorflow as tf

        if not self._options.sparse_as_dense:
            return gradients
        return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]

    def _settings(self, optimizer: Any) -> list[tuple[str, str]]:
        """What ranks have to give the optimizer alike."""
        settings = {"kind": type(optimizer).__name__}
        try:
            if self._backend == "tensorflow":
                import tensorflow as tf

                with tf.init_scope():  # values of variables are wanted, also while a function is traced
                    settings |= optimizer.get_config()
            elif self._backend != "jax":  # where variables have no values in a step
                settings |= optimizer.get_config()
        except Exception as error:  # a schedule without get_config; nothing needs one but this check
            # Compared as well: a rank that raised here alone would leave the others waiting.
            settings["settings"] = f"cannot be read ({type(error).__name__})"
        return [(name, _text(value)) for name, value in settings.items() if name != "name"]

    def _make(
        self, gradients: Sequence[Any], variables: Sequence[Any], comm: Communicator, optimizer: Any
    ) -> Any:
        check_same(comm, self._settings(optimizer), "optimizer")
        known = weakref.ref(optimizer)

        def state() -> Any:
            held = known()
            return [] if held is None else held.variables

        if self._backend == "tensorflow":
            from multiring.tensorflow.gradients import GradientReduction, kinds_of

            return GradientReduction(
                variables, comm, self._options.reducer, kinds=kinds_of(gradients), state=state
            )
        from multiring.tensorflow.host_gradients import HostReduction

        return HostReduction(variables, comm, self._options.reducer, state)


def _text(value: Any) -> str:
    """What is compared of a setting: without addresses and the order of sets, which differ by process."""
    if isinstance(value, set | frozenset):
        return f"set {sorted(map(_text, value))}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(found)}' for key, found in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
