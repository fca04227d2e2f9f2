"""What the optimizer wrappers share: options, what they pass on, and the reduction for Keras's backend."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.model_check import check_same
from multiring.gradients.options import ReducerOptions
from multiring.tensorflow.kept import KeptReductions

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Delegating", "LazyReduction", "WrapperOptions"]


@dataclass(frozen=True)
class WrapperOptions:
    """How a wrapped optimizer reduces its gradients.

    Attributes:
        reduction: How gradients are reduced.
        backward_passes_per_step: Steps whose gradients are averaged on each rank before they are reduced and
            applied.
        sparse_as_dense: Reduce sparse gradients as dense tensors.
    """

    reduction: ReducerOptions
    backward_passes_per_step: int
    sparse_as_dense: bool

    def __post_init__(self) -> None:
        if self.backward_passes_per_step < 1:
            raise UsageError(
                f"{self.backward_passes_per_step} backward passes per step; at least 1 is needed"
            )


class Delegating:
    """A wrapper whose attributes are those of the optimizer that it holds, whether they are read, set or
    deleted.

    The wrapper's own are special methods, what its class defines, and what its constructor puts into
    `__dict__`. That class comes before the framework's in the order of bases, whose constructor is not
    called: there is one state, that of the optimizer inside.
    """

    _own: ClassVar[frozenset[str]]
    _wrapped: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._own = frozenset([*vars(Delegating), *vars(cls)])

    def _holder(self, name: str) -> Any:
        """Whose attribute it is."""
        return self._wrapped

    def __getattribute__(self, name: str) -> Any:
        """`__class__` is that of the optimizer inside, too: the one as which Keras saves an object."""
        if _is_own(self, name):
            return object.__getattribute__(self, name)
        return getattr(self._holder(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_own(self, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._holder(name), name, value)

    def __delattr__(self, name: str) -> None:
        if _is_own(self, name):
            object.__delattr__(self, name)
        else:
            delattr(self._holder(name), name)

    def __dir__(self) -> Iterable[str]:
        """Where Keras looks for what is to be saved."""
        return dir(self._wrapped)


def _is_own(wrapper: Delegating, name: str) -> bool:
    special = name.startswith("__") and name != "__class__"
    return special or name in type(wrapper)._own or name in object.__getattribute__(wrapper, "__dict__")


class LazyReduction:
    """Made when the first gradients come, which is when all ranks are known to train; and again for other
    variables, when layers were frozen, or another world.
    """

    def __init__(self, comm: Communicator | None, options: WrapperOptions, backend: str) -> None:
        self.comm, self._options, self._backend = comm, options, backend
        self._made = KeptReductions()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> list[Any]:
        """The gradients reduced over ranks. Collective.

        Args:
            gradients: This rank's.
            variables: What they are gradients of.
            optimizer: Whose variables and settings have to be the same on all ranks.

        Raises:
            MismatchError: The ranks have different variables or options (at the first call with these).
        """
        comm = resolve(self.comm)
        if comm.size == 1 and self._options.reduction.scale == 1.0:
            return list(gradients)
        if self._backend == "tensorflow":
            from multiring.tensorflow.reduced import refuse_reduced
            from multiring.tensorflow.sparse import as_dense

            refuse_reduced(gradients, variables, comm.rank)
            gradients = as_dense(gradients) if self._options.sparse_as_dense else gradients
        reduction = self._made.get(
            comm, variables, None, lambda: self._make(gradients, variables, comm, optimizer)
        )
        reduced: list[Any] = reduction.reduce(gradients)
        return reduced

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
            from multiring.tensorflow.gradient_reduction import GradientReduction, kinds_of

            return GradientReduction(
                variables, comm, self._options.reduction, kinds=kinds_of(gradients), state=state
            )
        from multiring.tensorflow.optimizers.host_gradients import HostReduction

        return HostReduction(variables, comm, self._options.reduction, state)


def _text(value: Any) -> str:
    """What is compared of a setting: without addresses and the order of sets, which differ by process."""
    if isinstance(value, set | frozenset):
        return f"set {sorted(map(_text, value))}"
    if isinstance(value, Mapping):
        # Names say how many of a kind the process has made.
        pairs = (f"{key!r}: {_text(found)}" for key, found in value.items() if key != "name")
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
