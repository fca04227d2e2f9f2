"""The process group: what torch.distributed calls, as operations of one communicator."""

# The stubs of torch have overloads, and other names of arguments in every version; torch passes by position.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from multiring.communicator import Communicator
from multiring.errors import MultiringError, UsageError
from multiring.torch_distributed import old_torch, operations
from multiring.torch_distributed.arguments import (
    Tensors,
    by_torch_names,
    only,
    only_list,
    op_of,
    root_of,
    seconds_of,
)
from multiring.torch_distributed.group_base import GroupBase, Outputs
from multiring.torch_distributed.streams import begin_copy_to_host
from multiring.torch_distributed.tensors import as_payload, is_copied_here, require_count
from multiring.torch_distributed.work import GroupWork, Part

__all__ = ["ProcessGroup"]

Tensor = torch.Tensor


class ProcessGroup(GroupBase):
    """A process group whose ranks communicate through multiring; made by torch.distributed.

    Its methods are those that torch calls, by the names of all its versions. Every one submits its operations
    and returns a `Work` at once; all but messages run in the order in which they were submitted, which has to
    be the same on all ranks. `opts` are torch's options, or what its overloads take in their place: an
    operation, a root, a timeout.
    """

    # Collectives.

    @by_torch_names
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduces a tensor over all ranks, in place."""
        return self._reduced("allreduce", lambda: [only(tensors, "allreduce")], opts, timeout)

    @by_torch_names
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduces several tensors; small ones travel together."""
        if len(tensors) > 1 and any(map(is_copied_here, tensors)):
            works = [self.allreduce_coalesced([tensor], opts) for tensor in tensors]
            return self._joined("allreduce_coalesced", works, tensors)
        return self._reduced("allreduce_coalesced", lambda: tensors, opts, None)

    def _reduced(self, what: str, tensors: Outputs, opts: Any, timeout: timedelta | None) -> Any:
        def start(comm: Communicator, outs: Tensors) -> list[Part]:
            return [operations.allreduce(comm, out, op_of(opts)) for out in outs]

        return self._start(what, tensors, start, timeout, opts)

    @by_torch_names
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduces a tensor to the root; costs as much as an allreduce."""
        how, root = op_of(getattr(opts, "reduceOp", op)), root_of(opts)
        return self._start(
            "reduce",
            lambda: [only(tensors, "reduce")],
            lambda comm, outs: [operations.reduce(comm, outs[0], how, root)],
            timeout,
            opts,
        )

    @by_torch_names
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Gives every rank the tensor of the root."""
        return self._start(
            "broadcast",
            lambda: [only(tensors, "broadcast")],
            lambda comm, outs: [operations.broadcast(comm, outs[0], root_of(opts))],
            timeout,
            opts,
        )

    @by_torch_names
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Gives every rank the tensors of all, in a list."""
        what = "allgather"
        return self._start(
            what,
            lambda: only_list(outputs, what),
            lambda comm, outs: [operations.allgather(comm, outs, only(inputs, what))],
            timeout,
            opts,
            inputs=[inputs],
        )

    @by_torch_names
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Several allgathers: `outputs[r][i]` is for tensor i of rank r."""
        what, count = "allgather_coalesced", len(inputs)
        flat = [out for row in outputs for out in row]
        if count > 1 and len(flat) == count * len(outputs) and any(map(is_copied_here, [*flat, *inputs])):
            columns = [[[row[i]] for row in outputs] for i in range(count)]
            works = [self.allgather_coalesced(columns[i], [inputs[i]], opts) for i in range(count)]
            return self._joined(what, works, flat)

        def start(comm: Communicator, outs: Tensors) -> list[Part]:
            for row in outputs:
                require_count(row, count, what)
            return [operations.allgather(comm, outs[i::count], inputs[i]) for i in range(count)]

        return self._start(what, lambda: flat, start, opts, inputs=[inputs])

    @by_torch_names
    def all_gather_single(self, outputs: Tensor, inputs: Tensor, opts: Any = None) -> Any:
        """Joins the tensors of all ranks in one."""
        return self.all_gather_single_coalesced([outputs], [inputs], opts)

    @by_torch_names
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Several at once."""
        return self._paired("all_gather_single", operations.allgather_single, outputs, inputs, opts)

    def _paired(
        self,
        what: str,
        operation: Callable[..., Part],
        outputs: Tensors,
        inputs: Tensors,
        opts: Any,
        *op: Any,
    ) -> Any:
        if len(outputs) == len(inputs) > 1 and any(map(is_copied_here, [*outputs, *inputs])):
            pairs = zip(outputs, inputs, strict=True)
            works = [self._paired(what, operation, [out], [given], opts, *op) for out, given in pairs]
            return self._joined(what, works, outputs)

        def start(comm: Communicator, outs: Tensors) -> list[Part]:
            require_count(inputs, len(outs), what)
            return [operation(comm, *pair, *op) for pair in zip(outs, inputs, strict=True)]

        return self._start(what, lambda: outputs, start, opts, inputs=[inputs])

    @by_torch_names
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Reduces a list of tensors; each rank gets the one with its number."""
        what, op = "reduce_scatter", op_of(opts)
        return self._start(
            what,
            lambda: [only(outputs, what)],
            lambda comm, outs: [operations.reduce_scatter(comm, outs[0], only_list(inputs, what), op)],
            timeout,
            opts,
            inputs=[inputs],
        )

    @by_torch_names
    def reduce_scatter_single(self, outputs: Tensor, inputs: Tensor, opts: Any = None) -> Any:
        """Reduces a tensor; each rank gets its block."""
        return self.reduce_scatter_single_coalesced([outputs], [inputs], opts)

    @by_torch_names
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Several at once."""
        what, operation = "reduce_scatter_single", operations.reduce_scatter_single
        return self._paired(what, operation, outputs, inputs, opts, op_of(opts))

    @by_torch_names
    def all_to_all_single(
        self,
        outputs: Tensor,
        inputs: Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        """Sends rows of a tensor to all ranks."""
        sizes = list(output_sizes or []), list(input_sizes or [])
        return self._start(
            "all_to_all_single",
            lambda: [outputs],
            lambda comm, outs: [operations.alltoall_single(comm, outs[0], inputs, *sizes)],
            timeout,
            opts,
            inputs=[inputs],
        )

    @by_torch_names
    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Sends a tensor to each rank."""
        return self._start(
            "all_to_all",
            lambda: outputs,
            lambda comm, outs: [operations.alltoall(comm, outs, inputs)],
            timeout,
            opts,
            inputs=[inputs],
        )

    @by_torch_names
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Brings the tensors of all ranks to the root."""
        what, root = "gather", root_of(opts)
        return self._start(
            what,
            lambda: only_list(outputs, what) if self.comm.rank == root else [],
            lambda comm, outs: [operations.gather(comm, outs, only(inputs, what), root)],
            timeout,
            opts,
            inputs=[inputs],
        )

    @by_torch_names
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Gives each rank its tensor of a list of the root."""
        what, root = "scatter", root_of(opts)

        given = inputs if self.comm.rank == root else []

        def start(comm: Communicator, outs: Tensors) -> list[Part]:
            sources = only_list(given, what) if self.comm.rank == root else []
            return [operations.scatter(comm, outs[0], sources, root)]

        return self._start(what, lambda: [only(outputs, what)], start, timeout, opts, inputs=[given])

    @by_torch_names
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Ends when all ranks have come."""
        if self._coalesced is not None or getattr(opts, "asyncOp", True):
            # A barrier ends after the operations before it, also after those that nobody waits for.
            ended = lambda _: self._late.settle_all()  # noqa: E731
            return self._start(
                "barrier", list, lambda comm, _: [Part(comm.barrier_async(), ended)], timeout, opts
            )
        # The core names who is late if it has the deadline itself.
        self._wait_for_all(seconds_of(timeout, opts))
        return GroupWork(self, [], [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that have not come; every barrier of this backend does."""
        self._wait_for_all(seconds_of(timeout))

    def _wait_for_all(self, seconds: float | None) -> None:
        try:
            self.comm.barrier(seconds)
        except MultiringError as error:
            raise self.explained(error) from error
        self._late.settle_all()

    # The names that other versions of torch have: up to 2.12, and of its C++ code.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    @by_torch_names
    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank, which may be this one."""

        def start(_: Communicator, __: Tensors) -> list[Part]:
            self._require_rank(destination, "send")
            payload = as_payload(only(tensors, "send"), "send")
            if payload.is_cuda:  # it leaves from a thread that does not know the caller's stream
                copied = begin_copy_to_host(payload.contiguous())
                return [Part(self._messenger.send(*copied, destination, tag))]
            return [Part(self._messenger.send(payload, None, destination, tag))]

        return self._start("send", list, start, inputs=[tensors])

    @by_torch_names
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receives a tensor from a rank, which may be this one."""
        return self._received(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receives a tensor from the first rank that sends one."""
        return self._received(tensors, None, tag)

    def _received(self, tensors: Any, source: int | None, tag: int) -> Any:
        def start(_: Communicator, outs: Tensors) -> list[Part]:
            if source is not None:
                self._require_rank(source, "recv")
            target = as_payload(outs[0], "recv")
            landing = target
            if target.is_cuda:
                landing = torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=True)
            finish = (lambda _: target.copy_(landing)) if target.is_cuda else None
            return [Part(self._messenger.receive(landing, source, tag), finish)]

        return self._start("recv", lambda: [only(tensors, "recv")], start, deadline=self.comm.timeout)

    def _require_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.comm.size:
            text = f"{what}: there is no rank {rank} in this group of {self.comm.size}"
            raise UsageError(text, rank=self.comm.rank, operation=what)


if old_torch.WORK_IS_COLLECTED:
    old_torch.shut_down_when_destroyed(ProcessGroup)
