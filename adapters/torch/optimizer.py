"""An optimizer that steps with gradients reduced over ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import torch
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.reductions import explain_arguments
from multiring.torch.copies import is_hooked
from multiring.torch.hooks import GradientHooks
from multiring.torch.registration import named_parameters
from multiring.torch.sparse import sparse_parameters
from multiring.torch.state_broadcast import NamedTensors
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["DistributedOptimizer"]

Closure = Callable[[], Any]

# The attributes of the wrapper; all others are the wrapped optimizer's.
_OWN = frozenset(
    f"_{name}"
    for name in (
        *(
            "comm",
            "guard",
            "held",
            "hooks",
            "options",
            "passes",
            "skip",
            "source",
            "sparse",
            "stepped_at",
            "wrapped",
        ),
        *("buffers", "is_stepping", "known"),
    )
)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: gradients are reduced during backward, and `step()` makes sure that they are.

    The wrapper holds the given optimizer and hands everything on to it: parameter groups, state and
    defaults are the wrapped optimizer's own. It is a `torch.optim.Optimizer` by type, because learning-rate
    schedulers insist on one; schedulers may be given the wrapper or the wrapped optimizer.
    """

    @explain_arguments
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model_or_named_parameters: NamedTensors | None = None,
        comm: Communicator | None = None,
        *,
        backward_passes_per_step: int = 1,
        sparse_parameters: Iterable[str] = (),
        buffers: BufferMode = "broadcast",
        **options: Unpack[ReducerKeywords],
    ) -> None:
        """Wrap `optimizer` and register hooks on the parameters that it updates. Collective.

        Args:
            optimizer: Any optimizer, built alike on every rank.
            model_or_named_parameters: Where the names in error messages come from: the model, or its
                `named_parameters()`. Without it parameters are called by group and position.
            comm: Ranks that train together; the world by default.
            backward_passes_per_step: Backward calls whose gradients are added up, as always in torch, and
                reduced after the last; divide the loss by it to get their mean.
            sparse_parameters: Names of parameters whose gradients are sparse; known already for
                `torch.nn.Embedding(sparse=True)` when the model is given.
            buffers: What happens to the buffers of the model, if it is given, after each reduction:
                "broadcast": all ranks take over those of the first rank that has data; "average":
                floating-point ones are averaged; "local": nothing.
            options: How to reduce: fields of `multiring.ReducerOptions`, or `average`. `check_every` compares
                parameters, hyperparameters and buffers.

        Raises:
            UsageError: Parameters of the optimizer are not among the named ones, or have hooks already.
            MismatchError: The ranks have different parameters or options.
        """
        self._wrapped = optimizer
        self._source = model_or_named_parameters
        self._comm = resolve(comm)
        self._options = ReducerOptions.of(options)
        self._buffers = buffers
        self._passes, self._sparse = backward_passes_per_step, frozenset(sparse_parameters)
        if not isinstance(self._source, torch.nn.Module | Mapping | None):
            self._source = dict(self._source)  # an iterator would be used up
        self._skip = False
        self._register()

    def step(self, closure: Closure | None = None) -> Any:
        """Update the parameters with reduced gradients.

        Args:
            closure: Re-evaluates the model, for optimizers such as LBFGS. The loss it returns is averaged
                over ranks, so that all ranks decide alike.

        Returns:
            What the wrapped optimizer returns.
        """
        self._is_stepping = True
        try:
            if closure is None:
                if not self._skip:
                    self.synchronize()
                result = self._wrapped.step()
            else:
                result = self._wrapped.step(self._synchronised(closure))
        finally:
            self._is_stepping = False
        self._stepped()
        self._hooks.note_step(is_common=not self._skip)
        return result

    def synchronize(self) -> None:
        """Reduce gradients unless that has happened since the last step, as it does in backward. Collective.

        Only needed before a step is prepared by other means (clipping, unscaling) in a place where backward
        has been called less than `backward_passes_per_step` times, or did not involve the parameters on
        this rank, or where the program has put gradients into `parameter.grad` itself.
        """
        if self._hooks.has_unreduced or self._hooks.rounds == self._stepped_at:
            self._hooks.synchronize()
        else:
            self._hooks.synchronize_replaced()

    def check_state(self) -> None:
        """Compare what all ranks should have alike, now; see `GradientHooks.check_state`. Collective."""
        self._hooks.check_state()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step()` takes gradients as they are."""
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of backward calls whose gradients stay local; see `GradientHooks.no_sync`."""
        return self._hooks.no_sync()

    def join(self) -> AbstractContextManager[None]:
        """Context of a loop with uneven data, see `GradientHooks.join`; hands over optimizer state too."""
        return self._hooks.join(self._wrapped)

    def remove(self) -> None:
        """Remove the hooks and release the buckets; the wrapped optimizer goes on with local gradients."""
        self._guard.remove()
        self._hooks.remove()
        self._skip = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; see `torch.optim.Optimizer.zero_grad`."""
        self._wrapped.zero_grad(set_to_none)
        self._hooks.begin_group()
        self._stepped()  # or a step that GradScaler has left out

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self._wrapped.load_state_dict(state_dict)

    def residuals(self) -> dict[str, torch.Tensor]:
        """What compression has kept back on this rank; see `GradientHooks.residuals`."""
        return self._hooks.residuals()

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `residuals` gave; see `GradientHooks.load_residuals`."""
        self._hooks.load_residuals(residuals)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer; buckets are planned anew. Collective."""
        self._wrapped.add_param_group(param_group)
        before, residuals = self._hooks, self._hooks.residuals()
        self._guard.remove()
        before.remove()
        self._register()
        self._hooks.load_residuals(residuals)
        self._hooks.transfer_from(before)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the wrapped optimizer, not a copy."""
        # GradScaler looks for overflows in the gradients of the groups, and asks for nothing else before it
        # decides whether to step: they have to be reduced by then, or ranks would decide on their own.
        if sys._getframe(1).f_code.co_name == "_unscale_grads_" and not self._skip:
            self.synchronize()
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._wrapped

    def __getattr__(self, name: str) -> Any:
        """Everything else is the wrapped optimizer's: state, defaults, hooks, attributes of its own."""
        if name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Likewise. Methods are the wrapper's: schedulers put others in the place of `step`."""
        target = self if name in _OWN or hasattr(type(self), name) else self._wrapped
        object.__setattr__(target, name, value)

    def __delattr__(self, name: str) -> None:
        target = self if name in self.__dict__ else self._wrapped
        object.__delattr__(target, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._wrapped!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a DistributedOptimizer cannot be copied or pickled; save its state_dict() instead")

    def _register(self) -> None:
        model = self._source if isinstance(self._source, torch.nn.Module) else None
        names = named_parameters(self._source, self._wrapped, self._comm.rank)
        marked = set() if model is None else sparse_parameters(model)
        sparse = {name for name, p in names.items() if id(p) in marked or name in self._sparse}
        self._known = set(map(id, names.values()))
        self._hooks = GradientHooks(
            *(names, self._comm, self._options),
            sparse=sparse,
            passes_per_round=self._passes,
            module=model,
            optimizer=self._wrapped,
            buffers=self._buffers,
        )
        self._held: object = self._hooks.hold()  # so that what is known by its id lives on
        self._stepped_at = 0
        self._is_stepping = False
        # Weak: the wrapped optimizer would keep the wrapper.
        wrapper = weakref.ref(self)
        self._guard = self._wrapped.register_step_pre_hook(
            lambda *_: None if (found := wrapper()) is None else found._check_step()
        )

    def _check_step(self) -> None:
        """Before a step of the wrapped optimizer: raise UsageError if it is to use gradients of this rank."""
        if not self._is_stepping and not self._skip and self._hooks.has_unreduced:
            raise UsageError(
                f"rank {self._comm.rank}: step() of the wrapped optimizer was called while gradients are not "
                "reduced, after less than backward_passes_per_step backward calls; call step() of the "
                "DistributedOptimizer, and give it to GradScaler"
            )
        for number, group in enumerate(self._wrapped.param_groups):
            for k, parameter in enumerate(group["params"]):
                if id(parameter) not in self._known and not is_hooked(parameter):
                    raise UsageError(
                        f"rank {self._comm.rank}: parameter {k} of group {number} of the optimizer, of shape "
                        f"{tuple(parameter.shape)}, was not there when the optimizer was wrapped, and its "
                        "gradient is not reduced; add parameters by add_param_group() of the "
                        "DistributedOptimizer, or remove() it and wrap the optimizer again"
                    )

    def _stepped(self) -> None:
        """What was reduced is used up."""
        self._stepped_at = self._hooks.rounds
        self._hooks.begin_step()

    def _synchronised(self, closure: Closure) -> Closure:
        """The closure, followed by what makes its result the same on every rank."""

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            if not self._skip:
                self.synchronize()
            self._stepped()
            if self._comm.size == 1 or loss is None:
                return loss
            value = torch.as_tensor(loss).detach().to("cpu", torch.float64).reshape(1)
            self._comm.allreduce(value, op="average", out=value, name="loss of the closure")
            return value[0].to(loss.dtype) if isinstance(loss, torch.Tensor) else float(value[0])

        return evaluate
