"""The ranks of a communicator as torch.distributed's default group."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from multiring import Communicator
from multiring.config import AS_GLOO
from multiring.errors import UsageError

__all__ = ["GlooGroup", "TorchGroup"]


class TorchGroup:
    """torch.distributed's default group. Made and closed collectively.

    Its ranks meet in a file, which stays until the group is closed: groups that are made of it need it too.

    Args:
        comm: The ranks.
        backend: Its backend; groups over Gloo may be made of it, whichever it is.
    """

    def __init__(self, comm: Communicator, backend: str) -> None:
        import torch
        from torch import distributed
        from torch._C._distributed_c10d import FileStore

        torch.set_num_threads(1)
        if comm.cross_size == 1 and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Removed when the process ends, too, should nobody close the group.
        self._directory = tempfile.TemporaryDirectory(prefix="multiring-bench-") if comm.rank == 0 else None
        directory = comm.broadcast_object(self._directory.name if self._directory else None)
        store = FileStore(str(Path(directory) / "store"), comm.size)
        distributed.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)

    def close(self) -> None:
        """Leaves the group."""
        from torch import distributed

        distributed.barrier()  # all have connected
        distributed.destroy_process_group()
        if self._directory is not None:
            self._directory.cleanup()


class GlooGroup(TorchGroup):
    """torch.distributed's default group, over Gloo.

    Raises:
        UsageError: "gloo" is a name of multiring in this process, which would be compared with itself.
    """

    def __init__(self, comm: Communicator) -> None:
        # Not at the top: that package imports torch, which commands do without until they train.
        from multiring.torch_distributed.gloo_name import gloo_is_ours

        if gloo_is_ours():
            raise UsageError(f"this compares with Gloo, and {AS_GLOO}=1 makes that multiring: unset it")
        super().__init__(comm, "gloo")
