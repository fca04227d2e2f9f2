"""An optimizer whose gradients are reduced during backward, of a subclass of the wrapped one's class."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Adasum, Average
from multiring.horovod.torch.adasum_optimizer import AdasumStep
from multiring.horovod.torch.compression import Compression, Compressor
from multiring.horovod.torch.drift import DriftCheck
from multiring.horovod.torch.handles import forget, result_of
from multiring.horovod.torch.options import NOT_PICKLED, OptimizerOptions, load_shared
from multiring.horovod.torch.reduces import allreduce_gradients, start_sparse_allreduce
from multiring.horovod.torch.submitted import Incoming, Submitted, check_unchanged, sharing
from multiring.torch.streams import used_here, wait_for_stream

__all__ = ["DistributedOptimizer"]

Parameter = torch.Tensor
Groups = int | Sequence[Sequence[Parameter]] | None
PartialGradients = dict[Parameter, tuple[torch.Tensor | None, int]]

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)
_ZEROED = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


class _Started(NamedTuple):
    """A reduction under way: its gradients, a function that waits and gives their results, and its handle."""

    submitted: list[Submitted]
    wait: Callable[[], list[torch.Tensor]]
    handle: int


class _Distributed(torch.optim.Optimizer):
    """Goes before the wrapped class in the order of bases."""

    _options: OptimizerOptions

    def _distribute(self, optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> None:
        # What the wrapped optimizer has, state and hooks included; a scheduler's `step` is bound to it.
        self.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "zero_grad")})
        self._options = options
        self.backward_passes_per_step = options.passes
        self._parameter_names = {parameter: name for name, parameter in options.named}
        self._group_of = {p: group for group in options.groups for p in group}
        self._passes: Counter[Parameter] = Counter()
        self._incoming = Incoming()
        self._drift = DriftCheck(self, options)
        self._streams: dict[Parameter, torch.cuda.Stream] = {}  # on which autograd has made gradients
        self._reductions: list[_Started] = []
        self._reduced: set[Parameter] = set()
        self._is_synchronized, self._synchronizes = False, True
        self._takes_part = options.process_set.included() and options.process_set.size() != 1
        self._hooks = []
        parameter: Any
        for parameter in self._required() if self._takes_part else ():
            self._hooks.append(parameter.register_hook(self._incoming.hook(parameter)))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._has_gradient))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduces gradients after so many backward calls from now on; between two steps."""
        self.backward_passes_per_step = passes
        self._passes.clear()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; those that did not arrive count as zeros.

        Raises:
            RuntimeError: The program has changed gradients since `backward()`. On all ranks.
            MismatchError: Parameters or hyperparameters differ over ranks. On all ranks.
        """
        if not self._takes_part:
            self._is_synchronized = True
            return
        submitted = [gradient for each in self._reductions for gradient in each.submitted]
        required = self._required()
        if late := [parameter for parameter in required if parameter not in self._reduced]:
            self._start_late(late, submitted)
        started, self._reductions = self._reductions, []
        self._reduced.clear()
        self._passes.clear()
        self._incoming.clear()
        check_unchanged(submitted, self._parameter_names, self._options.process_set)
        for each in started if required else ():
            if any(gradient.parameter is required[0] for gradient in each.submitted):
                self._drift.begin(each.handle)
        failure: Exception | None = None
        for each in started:
            try:
                for gradient, result in zip(each.submitted, each.wait(), strict=True):
                    gradient.publish(result)
            except (RuntimeError, ValueError) as error:
                failure = failure or error  # the others are waited for, or their names stay in flight
        if failure is not None:
            raise failure
        if started:
            self._drift.run()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step` does not synchronize, after `synchronize` was called."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Any = None) -> Any:
        """Synchronizes, after each call of `closure` if one is given, and steps as the wrapped class does."""
        synchronizes = self._synchronizes
        if synchronizes and self._is_synchronized:
            warnings.warn(_TWICE, stacklevel=2)
        if synchronizes and closure is None:
            self.synchronize()
        self._is_synchronized = False
        if closure is None or not synchronizes:
            loss = super().step(closure)
            self._drift.note()
            return loss

        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        loss = super().step(synchronized)
        self._drift.note()
        self._is_synchronized = False
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped class. Gradients that have not led to a step are forgotten."""
        for started in self._reductions:
            forget(started.handle)
        reduced = [each.parameter for started in self._reductions for each in started.submitted]
        for parameter in (*self._passes, *reduced):
            parameter.grad = None  # a reduction may still write to its memory
        self._reductions = []
        self._reduced.clear()
        self._passes.clear()
        self._is_synchronized, self._synchronizes = False, True
        load_shared(self, super().load_state_dict, state_dict)

    def partial_gradients(self) -> PartialGradients:
        """Return, of each parameter, copies of what backward passes have added up and no reduction has taken,
        and how many passes these were."""
        waiting = {p: passes for p, passes in self._passes.items() if p not in self._reduced}
        return {p: (None if p.grad is None else p.grad.clone(), passes) for p, passes in waiting.items()}

    def restore_partial_gradients(self, partial: PartialGradients) -> None:
        """Go on from what `partial_gradients` has returned, after `load_state_dict`."""
        for parameter, (gradient, passes) in partial.items():
            parameter.grad = None if gradient is None else gradient.clone()
            self._passes[parameter] = passes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NOT_PICKLED)

    def local_step(self) -> None:
        """The step of the wrapped class, with gradients as they are."""
        super().step()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped class; raises AssertionError between backward and step."""
        if self._passes:
            raise AssertionError(_ZEROED)
        super().zero_grad(*args, **kwargs)

    def _required(self) -> list[Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _has_gradient(self, parameter: Parameter) -> None:
        if self._passes[parameter] >= self.backward_passes_per_step:
            raise AssertionError(_TOO_MANY)
        self._passes[parameter] += 1
        self._incoming.note_accumulated(parameter)
        if parameter.is_cuda:
            self._streams[parameter] = torch.cuda.current_stream(parameter.device)
        if self._passes[parameter] == self.backward_passes_per_step:
            self._start(parameter)

    def _start_late(self, late: list[Parameter], submitted: list[Submitted]) -> None:
        """Reduces the gradients that the program has made itself, or that are missing.

        Raises:
            ValueError: One is in the memory of a gradient that is being reduced.
        """
        in_place = [each.parameter for each in submitted if each.is_reduced_in_place()]
        shared = sharing([*late, *in_place])
        if shared.intersection(in_place):
            names = sorted(self._parameter_names.get(each, "") for each in shared)
            raise ValueError(
                f"gradients of the parameters {', '.join(names)} have memory in common, in which one of them "
                "is being reduced: give each a gradient of its own (clone()) before backward()"
            )
        for parameter in late:
            if parameter not in self._reduced:  # with its group
                self._start(parameter, is_late=True, shared=shared)

    def _start(self, parameter: Parameter, is_late: bool = False, shared: Collection[Parameter] = ()) -> None:
        """Reduces a gradient, or those of its group if all are there; a copy of those that are shared."""
        parameters = list(self._group_of.get(parameter, [parameter]))
        if not is_late and any(self._passes[p] < self.backward_passes_per_step for p in parameters):
            return
        self._reduced.update(parameters)
        for each in parameters:
            if (made_on := self._streams.pop(each, None)) is not None:
                wait_for_stream(made_on)
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        self._reductions.append(self._reduce(parameters, shared))

    def _reduce(self, parameters: list[Parameter], shared: Collection[Parameter]) -> _Started:
        options = self._options
        is_dense = options.sparse_as_dense or len(parameters) > 1
        found = [
            Submitted.of(each, self._incoming.address(each), is_dense, each in shared) for each in parameters
        ]
        submitted = [each for each, _ in found]
        if found[0][1].is_sparse:
            name = self._parameter_names.get(parameters[0])
            handle, wait_sparse = start_sparse_allreduce(found[0][1], name, options.op, options.process_set)
            return _Started(submitted, lambda: [wait_sparse()], handle)
        pairs = [options.compression.compress(values) for _, values in found]
        tensors = [tensor for tensor, _ in pairs]
        names = [self._parameter_names.get(p, "") for p in parameters]
        scale = 1 / options.predivide, options.predivide
        handle = allreduce_gradients(tensors, names, options.op, scale, options.process_set)

        def wait() -> list[torch.Tensor]:
            result_of(handle)
            return [options.compression.decompress(used_here(tensor), ctx) for tensor, ctx in pairs]

        return _Started(submitted, wait, handle)


class _AdasumDistributed(AdasumStep):
    """Steps alone, and combines what the steps of all ranks have changed."""


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer that reduces gradients over all ranks: during backward, and at the latest in `step`.

    Args:
        optimizer: What makes the steps; the result is of a subclass of its class, with the same name, and
            shares its parameter groups and state.
        named_parameters: Pairs of name and parameter, as `model.named_parameters()`; gradients are matched by
            these names.
        compression: What gradients are made of on their way.
        backward_passes_per_step: Backward calls whose gradients are added up before they are reduced.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: f: an average divides by f before the reduction, and by size / f after it.
        num_groups: The former name of `groups`.
        groups: Number of groups of parameters that are reduced together, or the groups.
        sparse_as_dense: Reduce sparse gradients as dense ones.
        process_set: Ranks that reduce; others step with their own gradients.

    Raises:
        ValueError: Names are missing, no pairs, or not unique; other arguments make no sense.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        text = "Parameter `num_groups` has been replaced by `groups` and will be removed."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    options = OptimizerOptions.of(
        optimizer,
        named_parameters,
        groups,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    base: Any = _AdasumDistributed if op == Adasum and process_set.size() != 1 else _Distributed
    wrapped = type(optimizer)
    made: Any = type(wrapped.__name__, (base, wrapped), {"__module__": wrapped.__module__})
    distributed = made.__new__(made)
    distributed._distribute(optimizer, options)
    return distributed
