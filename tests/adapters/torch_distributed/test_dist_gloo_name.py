"""Programs that ask for "gloo" and get this backend, in all the ways in which torch makes a process group."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from multiring import Communicator, errors
from multiring.settings import Settings
from multiring.torch_distributed import ProcessGroup, as_gloo, gloo_name
from tests.adapters.torch_distributed.support import TIMEOUT, shared_store, world
from tests.on_ranks import on_ranks
from tests.support import Job, refused, run_job, run_python

ASKED = ["gloo", None, "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", dist.Backend.GLOO]


@contextmanager
def gloo_named() -> Iterator[None]:
    """Let "gloo" be ours within the block alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            distributed_c10d, "_new_process_group_helper", distributed_c10d._new_process_group_helper
        )
        patch.setenv("MULTIRING_AS_GLOO", "0")
        as_gloo()
        as_gloo()
        assert os.environ["MULTIRING_AS_GLOO"] == "1"  # for processes that this one starts
        yield


@contextmanager
def asked_for(comm: Communicator, backend: str | None) -> Iterator[None]:
    """The ranks as torch's default group, as a program asks for it."""
    with gloo_named(), shared_store(comm) as store:
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=TIMEOUT)
        try:
            yield
        finally:
            dist.destroy_process_group()


@on_ranks(2)
def test_every_spelling_makes_our_group(comm: Communicator) -> None:
    for asked in ASKED:
        with asked_for(comm, asked):
            tensor = torch.full((3,), comm.rank + 1.0)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [3.0] * 3
            assert isinstance(dist.group.WORLD, ProcessGroup)
            assert dist.get_backend() == (asked or "undefined")  # as torch says of its own Gloo
            assert dist.group.WORLD._get_backend_name() == "gloo"
            for named in ({"backend": "gloo"}, {}, {"backend": "cpu:gloo,cuda:nccl"}):
                group = dist.new_group([0, 1], **named)
                assert isinstance(group, ProcessGroup)
                assert dist.get_backend(group) == named.get("backend", asked or "undefined")
            assert (dist.new_group([1]) == dist.GroupMember.NON_GROUP_MEMBER) == (comm.rank == 0)


@on_ranks(2)
def test_what_torch_has_for_gloo_alone(comm: Communicator) -> None:
    with asked_for(comm, "gloo"):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        mesh = init_device_mesh("cpu", (2,))
        assert isinstance(mesh.get_group(), ProcessGroup)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
        assert model.module.weight.grad is not None
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]]


@on_ranks(2)
def test_other_backends_stay(comm: Communicator) -> None:
    with asked_for(comm, "multiring"):
        assert dist.get_backend() == dist.group.WORLD._get_backend_name() == "multiring"
        assert not isinstance(dist.new_group(backend="fake"), ProcessGroup)
    with gloo_named(), shared_store(comm), pytest.raises(ValueError, match="Invalid device:backend"):
        dist.init_process_group("cpu:gloo:nccl", store=dist.HashStore(), rank=0, world_size=1)


@on_ranks(2)
def test_too_late(comm: Communicator) -> None:
    with world(comm), pytest.raises(errors.UsageError, match="before torch.distributed.init_process_group"):
        as_gloo()
    assert not gloo_name.gloo_is_ours()


def test_a_torch_that_makes_groups_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", lambda *args: None)
    with pytest.raises(errors.UsageError, match="does not know: unset MULTIRING_AS_GLOO"):
        as_gloo()


def test_interfaces_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0, eth1")
    found = []
    for named in (False, True):
        settings = Settings()
        if named:
            with gloo_named():
                gloo_name.use_interfaces_of_gloo(settings)
        else:
            gloo_name.use_interfaces_of_gloo(settings)
        found.append(settings.interfaces)
    assert found == [[], ["eth0", "eth1"]]
    with gloo_named():
        settings = Settings(interfaces=["eth2"])
        gloo_name.use_interfaces_of_gloo(settings)
        assert settings.interfaces == ["eth2"]


def test_who_waits_for_ranks_of_gloo_says_what_they_lack(tmp_path: Path) -> None:
    ended = run_python(
        f"""
from datetime import timedelta
import torch.distributed as dist
place = {{"init_method": "file://{tmp_path}/meeting", "rank": 0, "world_size": 2}}
dist.init_process_group("gloo", **place, timeout=timedelta(seconds=1))
""",
        {"MULTIRING_AS_GLOO": "1"},
    )
    assert ended.returncode == 1
    assert "for rank 1: they have not called" in ended.stderr
    assert "new_group() with MULTIRING_AS_GLOO=1, cannot get there" in ended.stderr


SCRIPT = """
import sys
import torch, torch.distributed as dist

def main(rank=None, url=None):
    place = {} if url is None else {"init_method": url, "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **place)
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    made_by = type(dist.group.WORLD).__module__
    # One string: torchrun's ranks write into one pipe, and `print` writes each of its arguments by itself.
    print(f"made by {made_by} {dist.get_backend()} {tensor.tolist()}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[1:]:
        import multiring.torch_distributed, torch.multiprocessing as mp
        multiring.torch_distributed.as_gloo()  # spawned processes import torch anew
        mp.spawn(main, (sys.argv[1],), 2)
    else:
        main()
"""
MADE = "made by multiring.torch_distributed.group gloo [3.0, 3.0, 3.0]"


def test_launchers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours = run_job(2, script, launcher_args=["--as-gloo"], code=0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    theirs = Job([*torchrun, str(script)], {"MULTIRING_AS_GLOO": "1"}).run(60.0, 0)
    spawned = Job([sys.executable, str(script), f"file://{tmp_path}/meeting"]).run(60.0, 0)
    for done in (ours, theirs, spawned):
        assert done.stdout.count(MADE) == 2, done.stdout


def test_where_torch_loads_no_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    said = refused("run", "-np", "2", "--as-gloo", "train.py")
    assert "--as-gloo: with TORCH_DEVICE_BACKEND_AUTOLOAD=0 torch does not load multiring" in said


def test_a_value_that_is_not_accepted() -> None:
    ended = run_python("import torch", {"MULTIRING_AS_GLOO": "yes"})
    assert ended.returncode == 1
    assert "MULTIRING_AS_GLOO: 'yes' is not accepted; accepted: 0 or 1" in ended.stderr
