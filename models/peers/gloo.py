"""The ranks of a communicator as torch.distributed's default group over Gloo."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from multiring import Communicator

__all__ = ["join_gloo"]


def join_gloo(comm: Communicator) -> None:
    """Makes torch.distributed's default group of the ranks of `comm`, over Gloo."""
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    if comm.cross_size == 1 and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    directory = tempfile.mkdtemp(prefix="multiring-bench-") if comm.rank == 0 else None
    directory = comm.broadcast_object(directory)
    path = Path(directory) / "store"
    store = FileStore(str(path), comm.size)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    distributed.barrier()
    if comm.rank == 0:  # all have connected
        path.unlink(missing_ok=True)
        Path(directory).rmdir()
