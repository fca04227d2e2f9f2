"""The solver callback: weights from one rank at the start, gradients averaged in every iteration.

A backward pass runs the layers from last to first and calls `after_backward` with the number of each. From
these calls the callback learns which blobs have a new gradient and how many passes an iteration has
(`iter_size`); with `overlap` the gradients of the last pass leave as soon as their layers are done. Passes
outside of an iteration (between `on_gradients_ready` and the next `on_start`) are the program's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from multiring._core import device_of
from multiring.arrays import address_of, checksum
from multiring.caffe.passes import BackwardPasses
from multiring.caffe.shape import Array, Blob, Parameter, Solver, learned_blobs
from multiring.caffe.solver_state import SolverState
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.gradients.bucketing import ParameterSpec
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.gradients.reducer import GradientReducer
from multiring.gradients.source import IN_SLOT, Gradient, GradientSource, RoundResult
from multiring.reductions import explain_arguments
from multiring.state.buffer_sync import check_mode
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["SolverCallback"]

_DEFAULT_STREAM = 1  # of CUDA, on which Caffe works

# The newest callback of each solver: Caffe has no way to take one off again.
_newest: weakref.WeakKeyDictionary[Any, weakref.ref[SolverCallback]] = weakref.WeakKeyDictionary()


class SolverCallback(GradientSource):
    """The two callables that `solver.add_callback` takes. Creation and `close` are collective.

        solver.add_callback(*SolverCallback(solver))

    In every iteration `on_start` comes before the first forward pass and `on_gradients_ready` between the
    last backward pass and the update. After it, every `.diff` is the sum of all ranks divided by their
    number, with the same bits on all of them.
    """

    @explain_arguments
    def __init__(
        self,
        solver: Solver,
        comm: Communicator | None = None,
        *,
        overlap: bool = False,
        iter_size: int | None = None,
        frozen: Collection[str] = (),
        root: int = 0,
        buffers: BufferMode = "broadcast",
        on_device: bool = False,
        **options: Unpack[ReducerKeywords],
    ) -> None:
        """Compare the net over ranks and allocate buckets.

        Args:
            solver: A solver of pycaffe's shape.
            comm: Ranks that train together; the world by default.
            overlap: Reduce layer by layer while the backward pass still runs.
            iter_size: Backward passes of an iteration, as the solver's prototxt has it. Without it the first
                iteration is counted, and only the following ones overlap.
            frozen: Names of layers whose blobs have `lr_mult: 0`; their gradients stay where they are.
                Those of BatchNorm layers are known.
            root: Rank whose weights all start from.
            buffers: What happens after each reduction to the statistics of BatchNorm layers: "broadcast":
                those of the first rank that has data; "average"; "local": nothing, ranks test differently.
            on_device: Reduce gradients where they lie on a GPU, by `gpu_diff_ptr` of the blobs, which some
                builds of pycaffe have and the Caffe-style solver. Without it they pass through `.diff`.
            options: How to reduce: fields of `multiring.ReducerOptions`, or `average`. `check_every` compares
                weights, settings and statistics.

        Raises:
            UsageError: Nothing to reduce, an unknown layer, a dtype that cannot be reduced, a net that does
                not call back while `overlap` needs it, or blobs without `gpu_diff_ptr` for `on_device`.
            MismatchError: The ranks have different nets or options.
        """
        self._comm = resolve(comm)
        self._solver, self._net, self._root = solver, solver.net, root
        if iter_size is not None and iter_size < 1:
            raise UsageError(f"rank {self._comm.rank}: iter_size is {iter_size}; pass 1 or more")
        earlier = _newest.get(solver, lambda: None)()
        if earlier is not None and not earlier._closed:
            raise UsageError(
                f"rank {self._comm.rank}: the solver has a SolverCallback already, and gradients would be "
                "reduced twice; close() that one before making another"
            )
        self._parameters = self._select(frozen)
        specs = [self._specification(parameter) for parameter in self._parameters]
        check_mode(self._comm.rank, buffers)
        reduction = ReducerOptions.of(options)
        self._reducer = GradientReducer(self._comm, specs, reduction, self)
        self._state = SolverState(solver, self._comm, self._reducer.comm, buffers, reduction.check_every)
        self._dtypes = [np.dtype(spec.dtype) for spec in specs]
        # With one rank and no scaling there is nothing to do: gradients stay where they are.
        self._is_local = self._comm.size == 1 and reduction.scale == 1.0
        self._on_device = on_device and self._check_on_device(overlap)
        self._overlap, self._passes = overlap, BackwardPasses(self._parameters, iter_size)
        self._is_started = self._in_iteration = False
        self._next_iteration, self._seen_iteration = 0, -2
        self._produced: frozenset[str] = frozenset()
        self._copied: dict[int, int] = {}  # gradients that are in their slots, and their checksums
        self._is_watching = self._watch()
        _newest[solver] = weakref.ref(self)

    def __iter__(self) -> Iterator[Callable[[], None]]:
        """Unpacks as `on_start, on_gradients_ready`."""
        return iter((self.on_start, self.on_gradients_ready))

    @property
    def produced(self) -> frozenset[str]:
        """Names of the blobs that the last reduction brought a gradient for: those that a backward pass of
        any rank had reached. All, where the net does not call back after each layer or has had no pass."""
        return self._produced

    def on_start(self) -> None:
        """Begin an iteration; collective the first time, when all weights are broadcast.

        Raises:
            MismatchError: Ranks are at different iterations.
        """
        if self._is_replaced:
            return
        self._check_open()
        with self._state.explaining():
            self._reducer.cancel()  # what an iteration that was aborted by an exception has left
            self._copied = {}
            self._passes.begin()
            self._start()
            if self._solver.iter != self._next_iteration:
                # A snapshot was restored, or an update failed: on all ranks?
                self._state.compare_iteration(self._next_iteration)
                self._next_iteration = self._solver.iter
        self._in_iteration = True

    def on_gradients_ready(self) -> None:
        """Reduce the gradients in place. Collective.

        Raises:
            MultiringError: The communication failed; the gradients are undefined.
            MismatchError: The ranks hold different weights, settings or statistics (see `check_every`).
            UsageError: `on_start` was not called, or a gradient was changed after it had left.
        """
        if self._is_replaced:
            return
        self._check_open()
        self._in_iteration = False
        if not self._is_started:
            raise UsageError(f"rank {self._comm.rank}: on_gradients_ready came before on_start; call both")
        self._next_iteration = self._solver.iter + 1
        self._check_untouched()
        if not self._is_watching or not self._passes.number:  # without a pass they were filled by hand
            for index in range(len(self._parameters)):
                self._reducer.mark_pending(index)
        self._passes.end()
        with self._state.explaining():
            result = self._reducer.finish()
        self._produced = frozenset(
            parameter.name
            for parameter, produced in zip(self._parameters, result.produced, strict=True)
            if produced
        )
        copied, self._copied = self._copied, {}
        for index in copied.keys() & set(np.flatnonzero(result.produced).tolist()):
            self._diff(index)[...] = self._reducer.views[index]
        self._state.keep_equal(result.active.tolist())

    def broadcast(self, root: int | None = None) -> None:
        """Overwrite the weights of all ranks with those of `root`. Collective.

        The first iteration does it by itself; call it where only one rank has loaded other weights since.
        The solver's history goes along if the solver shows it as `history`. pycaffe does not: where it
        differs over ranks, the next but one iteration raises MismatchError.

        Raises:
            MismatchError: The ranks are at different iterations, or have different settings.
        """
        self._state.check_settings()
        self._state.broadcast(self._root if root is None else root)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Context of a loop that may have fewer iterations on some ranks than on others.

        A rank that leaves it answers the reductions of the others with zeros until all have left; averages
        divide by the number of ranks that still have data. It updates as they do, by `solver.apply_update()`,
        so that weights, history and iteration stay the same on all ranks; where the solver has no such
        method, only the weights are handed over at the end, and an iteration after that is a MismatchError.
        Every rank has to enter it, and no other collectives may be used inside.
        """
        self._check_open()
        self._start()  # here, since a rank may have no iteration at all
        yield
        if self._comm.size > 1:
            with self._state.explaining():
                root = self._reducer.join(self._follow)
            self._state.broadcast(root)

    def close(self) -> None:
        """Release the buckets. May be called twice. A solver that goes on needs another SolverCallback,
        beside which the callables of this one, which Caffe keeps, do nothing."""
        self._is_watching = False
        self._reducer.close()
        self._closed = True

    def fetch(self, index: int) -> Gradient | None:
        """Part of `GradientSource`: in Caffe there is always a gradient, if only zeros. What is ready was
        copied while the backward pass ran."""
        if self._is_local or self._reducer.is_ready(index):
            return IN_SLOT
        if self._on_device:
            return self._on_gpu(index)
        diff = self._diff(index)
        if diff.flags.c_contiguous and diff.flags.writeable:
            return Gradient(address_of(diff), diff)
        self._copy(index)
        return IN_SLOT

    def publish(self, index: int) -> None:
        """Part of `GradientSource`: only where `fetch` has said that there is no gradient."""

    _closed = False

    @property
    def _is_replaced(self) -> bool:
        return self._closed and _newest[self._solver]() not in (None, self)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"rank {self._comm.rank}: this SolverCallback is closed; make another one")

    def _start(self) -> None:
        if self._is_started:
            return
        self.broadcast()
        self._next_iteration = self._solver.iter
        self._is_started = True

    def _follow(self, result: RoundResult) -> None:
        """On a rank that has joined: do what the others do in an iteration."""
        if not result.active.any():
            return
        for index, view in enumerate(self._reducer.views):
            self._diff(index)[...] = view if result.produced[index] else 0
        self._state.keep_equal(result.active.tolist())
        if hasattr(self._solver, "apply_update"):
            self._solver.apply_update()
        self._next_iteration = self._solver.iter

    def _select(self, frozen: Collection[str]) -> list[Parameter]:
        if unknown := sorted(set(frozen) - {str(name) for name in self._net.params}):
            raise UsageError(
                f"rank {self._comm.rank}: frozen names {unknown[0]!r}, but no layer with blobs has that name"
            )
        return [p for p in learned_blobs(self._net) if not p.is_statistic and p.layer not in frozen]

    def _specification(self, parameter: Parameter) -> ParameterSpec:
        diff = self._blob(parameter).diff
        return ParameterSpec(parameter.name, diff.shape, diff.dtype.name)

    def _watch(self) -> bool:
        """Have the net call back after each layer, if it can."""
        can = hasattr(self._net, "after_backward") and all(p.users for p in self._parameters)
        if not can:
            if self._overlap:
                raise UsageError(
                    f"rank {self._comm.rank}: overlap=True needs a net with after_backward and _layer_names, "
                    "which this one lacks; leave it out, or use a newer Caffe"
                )
            return False
        self._net.after_backward(self._after_backward)
        return True

    def _after_backward(self, layer: int) -> None:
        """A layer's part of a backward pass is done."""
        if not self._is_watching or not self._in_iteration:
            self._check_added()
            return
        complete, partial = self._passes.advance(layer)
        leaves = self._overlap and self._passes.is_last
        for index in (*partial, *complete):
            self._check_unsent(index)
            self._reducer.mark_pending(index)
        if not leaves or not complete:
            return
        with self._state.explaining():
            for index in complete:
                self._copy(index)
                self._reducer.mark_ready(index)

    def _check_added(self) -> None:
        """Two passes of the program's own with an update between them: the solver trains without this."""
        before, self._seen_iteration = self._seen_iteration, self._solver.iter
        if self._is_watching and not self._is_started and self._seen_iteration == before + 1:
            raise UsageError(
                f"rank {self._comm.rank}: the solver trains without its SolverCallback, on this rank alone; "
                "call solver.add_callback(*callback)"
            )

    def _check_unsent(self, index: int) -> None:
        if self._reducer.is_ready(index):
            raise UsageError(
                f"rank {self._comm.rank}: '{self._parameters[index].name}' received a gradient in backward "
                f"pass {self._passes.number} of an iteration, but was sent after pass "
                f"{self._passes.expected}; pass SolverCallback the iter_size of the solver",
                rank=self._comm.rank,
                tensor=self._parameters[index].name,
            )

    def _check_on_device(self, overlap: bool) -> bool:
        rank = self._comm.rank
        if overlap:
            raise UsageError(
                f"rank {rank}: overlap=True copies gradients to the host as layers make them; leave it or "
                "on_device=True out"
            )
        for parameter in self._parameters:
            if not hasattr(self._blob(parameter), "gpu_diff_ptr"):
                raise UsageError(
                    f"rank {rank}: blob '{parameter.name}' has no gpu_diff_ptr, so where it lies on a GPU is "
                    "not known; leave on_device=True out"
                )
        return True

    def _on_gpu(self, index: int) -> Gradient:
        parameter, spec = self._parameters[index], self._reducer.specs[index]
        blob: Any = self._blob(parameter)
        self._check_form(parameter.name, spec, blob.shape, spec.dtype)
        address, stream = int(blob.gpu_diff_ptr), getattr(self._net, "gpu_stream", _DEFAULT_STREAM)
        if not spec.nbytes:
            return IN_SLOT
        if stream is None:
            return Gradient(address, blob)
        return Gradient(address, blob, device_of(address), stream)

    def _copy(self, index: int) -> None:
        """Into its slot: where a blob shows no plain array, and what leaves during a backward pass. If that
        fails half-way, the next iteration clears the diffs before it asks what is still under way."""
        if not self._is_local:
            diff = self._diff(index)
            self._reducer.views[index][...] = diff
            self._copied[index] = checksum(diff)

    def _check_untouched(self) -> None:
        """What has left during the backward pass must not have been changed since: it would be lost."""
        for index, before in self._copied.items():
            if checksum(self._diff(index)) != before:
                name = self._parameters[index].name
                raise UsageError(
                    f"rank {self._comm.rank}: the gradient of '{name}' was changed after it had been sent, "
                    "between its layer's backward pass and on_gradients_ready; change gradients after "
                    "on_gradients_ready (in a callback that is added later), or leave overlap=True out",
                    rank=self._comm.rank,
                    tensor=name,
                )

    def _blob(self, parameter: Parameter) -> Blob:
        found: Blob = self._net.params[parameter.layer][parameter.number]
        return found

    def _diff(self, index: int) -> Array:
        """The gradient; asked for anew each time, since a GPU build copies it to the host then."""
        parameter, spec = self._parameters[index], self._reducer.specs[index]
        diff = self._blob(parameter).diff
        if diff.shape != spec.shape or diff.dtype != self._dtypes[index]:
            self._check_form(parameter.name, spec, diff.shape, diff.dtype.name)
        return diff

    def _check_form(self, name: str, spec: ParameterSpec, shape: Sequence[int], dtype: str) -> None:
        if (tuple(shape), dtype) != (tuple(spec.shape), spec.dtype):
            raise UsageError(
                f"rank {self._comm.rank}: blob '{name}' has become {dtype} {tuple(shape)}, it was "
                f"{spec.dtype} {spec.shape}; close() the callback before changing a net and make another",
                rank=self._comm.rank,
                tensor=name,
            )
