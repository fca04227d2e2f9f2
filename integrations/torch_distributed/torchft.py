"""The process group over which torchft's replicas exchange gradients, and which it configures anew when
replicas come and go.

    from multiring.torch_distributed.torchft import ProcessGroup

    manager = torchft.Manager(pg=ProcessGroup(timeout=timedelta(seconds=30)), ...)

See docs/torch-distributed.md.
"""

# Of what torchft overrides itself, its own signatures hold.
# mypy: disable-error-code="override"

from __future__ import annotations

from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import Store, _DistributedBackendOptions
from torchft.process_group import ProcessGroupWrapper

from multiring.errors import MultiringError
from multiring.torch_distributed.group import ProcessGroup as FixedGroup
from multiring.torch_distributed.meeting import connect_group

__all__ = ["ProcessGroup"]


class ProcessGroup(ProcessGroupWrapper):
    """A process group that torchft configures: each time it leaves the ranks of before, and meets those of
    the new quorum by the store that torchft names.

    Args:
        timeout: Of operations, and for ranks to meet.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> FixedGroup:
        given = _DistributedBackendOptions()
        given.store, given.group_rank, given.group_size = store, rank, world_size
        given.timeout, given.group_id = self._timeout, self.getBackendName()
        # Never empty, which is the whole job's group: other ranks may take part by the next step.
        given.global_ranks_in_group = list(self._global_ranks or range(world_size))
        return FixedGroup(connect_group(given), given)

    @property
    def _group(self) -> FixedGroup | None:
        return cast("FixedGroup | None", self._pg)

    def getBackendName(self) -> str:  # noqa: N802
        """What torchft calls it."""
        return "torchft-multiring"

    def abort(self, errored: bool = True) -> None:
        """Ends the group until it is configured again.

        Args:
            errored: What is pending on other ranks fails with an error that says so. False: others are only
                told that this rank has left, and finish what needs it no more.
        """
        if errored:
            super().abort()
        else:
            self.shutdown()

    def shutdown(self) -> None:
        """Leaves the group. Idempotent."""
        group, self._pg = self._group, None
        if group is not None:
            group.shutdown()

    def errored(self) -> Exception | None:
        """The error that has broken the group; None: it is whole. With one torchft gives up the step."""
        group = self._group
        if group is None or not group.comm.is_broken:
            return None
        try:
            group.barrier()  # raises it at once
        except MultiringError as error:
            return error
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that begin from now on, and of later groups."""
        super().set_timeout(timeout)
        if self._group is not None:
            self._group.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"ProcessGroup(multiring, {self._group!r})"
