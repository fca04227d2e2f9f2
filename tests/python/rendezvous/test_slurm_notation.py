"""Slurm's lists of hosts and tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiring.errors import UsageError
from multiring.rendezvous import slurm
from tests.support import executable


def test_tasks_per_node() -> None:
    expected = {"4": [4], "2(x3),1": [2, 2, 2, 1], "": [], "two": [], "2(x3": []}
    assert {text: slurm.tasks_per_node(text) for text in expected} == expected


def test_first_host() -> None:
    expected = {"node1,node2": "node1", "node[08-11,14],big1": "node08", "node[3,5]": "node3"}
    expected |= {"rack[2-3]node[01-16]": "rack2node01", "a[1-2]-ib,b": "a1-ib", "": ""}
    assert {text: slurm.first_host(text) for text in expected} == expected


@pytest.fixture
def scontrol(tmp_path: Path) -> dict[str, str]:
    """An environment with a `scontrol` that gives two hosts."""
    executable(tmp_path / "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_the_hosts_of_an_allocation(scontrol: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", scontrol["PATH"])
    assert slurm.allocated_hosts(scontrol | {"SLURM_TASKS_PER_NODE": "4,1"}) == [("n1", 4), ("n2", 1)]
    assert slurm.allocated_hosts(scontrol) == [("n1", 1), ("n2", 1)]
    assert slurm.allocated_hosts({"PATH": scontrol["PATH"]}) is None
    task = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert slurm.allocated_hosts(scontrol | task) is None
    shell = task | {"SLURM_STEP_ID": "4294967290"}
    assert slurm.allocated_hosts(scontrol | shell) is not None
    with pytest.raises(UsageError, match="2 hosts, and tasks for 3; name them by -H"):
        slurm.allocated_hosts(scontrol | {"SLURM_TASKS_PER_NODE": "4(x3)"})
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match=r"n\[1-2\], are not known: .*scontrol.*name them by -H"):
        slurm.allocated_hosts(scontrol | {"PATH": "/nonexistent"})
