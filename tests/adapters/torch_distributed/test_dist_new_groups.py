"""Groups that cannot be made: a member has ended, or the ranks make different ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Ranks that no launcher ends when one of them dies.
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, multiring.torch_distributed

rank, size, lost = (int(word) for word in sys.argv[1:4])
dist.init_process_group("multiring", init_method="file://" + sys.argv[4], rank=rank, world_size=size,
                        timeout=timedelta(seconds=100))
dist.all_reduce(torch.ones(1))
if rank == lost:
    os.kill(os.getpid(), signal.SIGKILL)
members = list(range(size)) if lost >= 0 else [0, 1] if rank < 2 else [2, 3]
began = time.monotonic()
try:
    dist.new_group(members)
except Exception as error:
    print(f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}", flush=True)
else:
    print("made", flush=True)
if lost >= 0:
    rest = dist.new_group([each for each in members if each != lost], use_local_synchronization=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=rest)
    print("the rest:", total.item(), flush=True)
os._exit(0)
"""


def run_ranks(directory: Path, size: int, lost: int) -> list[str]:
    """Start so many ranks, of which `lost` ends itself before the group; return what each has said."""
    program = directory / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    store = str(directory / "store")
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(lost), store],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        return [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_member_has_died(tmp_path: Path, lost: int) -> None:
    told = run_ranks(tmp_path, 3, lost)
    for rank, text in enumerate(told):
        if rank != lost:
            assert text.startswith("PeerLostError after "), text
            assert int(text.split()[2]) < 30, "the default group has known of it"
            assert f"process group '1' cannot be made: rank {lost} on " in text
            assert text.endswith("the rest: 2.0\n")


def test_ranks_make_different_groups_in_one_place(tmp_path: Path) -> None:
    """Both groups are made, one after the other, or those that meet are told what to do."""
    told = run_ranks(tmp_path, 4, -1)
    for text in told:
        assert text == "made\n" or "cannot be made" in text or "use_local_synchronization=True" in text, told
