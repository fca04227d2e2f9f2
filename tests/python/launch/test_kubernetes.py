"""The manifests of examples/kubernetes: valid without a cluster, and what they start works on emulated hosts.

The models of `kubeflow-training`, which are generated from the schemas of the training operator and of
Kubernetes, say which fields there are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from multiring.commands.launcher import options
from tests.faults.remote import shell_of
from tests.support import REPOSITORY, Job, parsed

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with the dev extra")

FOLDER = REPOSITORY / "examples/kubernetes"
MPI_JOB = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())
PYTORCH_JOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
# What the training operator tells a pod; the kubelet replaces $(NAME) by it.
POD = {"RANK": "1", "MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456"}


def by_the_models(value: Any, kind: str) -> Any:
    """A value as a generated model writes it again: without unknown fields, and with its own types. One that
    lacks a field is an error."""
    reason = "needs kubeflow-training, which comes with the dev extra"
    client = pytest.importorskip("kubeflow.training.api_client", reason=reason).ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(value)), kind)
    return client.sanitize_for_serialization(read)


def container(job: Mapping[str, Any], replicas: str) -> dict[str, Any]:
    spec = job["spec"]
    template = (spec.get("mpiReplicaSpecs") or spec.get("pytorchReplicaSpecs"))[replicas]["template"]
    (found,) = template["spec"]["containers"]
    return dict(found)


def test_the_jobs_fit_the_schema() -> None:
    assert (PYTORCH_JOB["apiVersion"], PYTORCH_JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert by_the_models(PYTORCH_JOB, "KubeflowOrgV1PyTorchJob") == PYTORCH_JOB
    for name, replicas in MPI_JOB["spec"]["mpiReplicaSpecs"].items():
        assert name in ("Launcher", "Worker")
        assert by_the_models(replicas, "KubeflowOrgV1ReplicaSpec") == replicas


def test_no_variable_of_multiring_has_to_be_set() -> None:
    replicas = [(MPI_JOB, "Launcher"), (MPI_JOB, "Worker"), (PYTORCH_JOB, "Master"), (PYTORCH_JOB, "Worker")]
    set_there = [entry for job, name in replicas for entry in container(job, name).get("env", [])]
    assert {entry["name"] for entry in set_there} == {"OMP_NUM_THREADS"}


def test_every_command_is_understood() -> None:
    launcher = container(MPI_JOB, "Launcher")
    program, name, *words = [*launcher["command"], *launcher["args"]]
    assert (program, name) == ("multiring", "run")
    understood = parsed(options.add_arguments, *words)
    assert understood.hostfile == Path("/etc/mpi/hostfile")
    assert understood.program == ["examples/torch_digits.py"]
    torchrun = pytest.importorskip("torch.distributed.run", reason="needs PyTorch")
    for name in ("Master", "Worker"):
        pod = container(PYTORCH_JOB, name)
        assert pod["command"][0] == "torchrun"
        words = [*pod["command"][1:], *pod["args"]]
        words = [re.sub(r"\$\((\w+)\)", lambda match: POD[match[1]], word) for word in words]
        arguments = torchrun.get_args_parser().parse_args(words)
        assert arguments.training_script == "examples/torch_digits.py"
        replicas = PYTORCH_JOB["spec"]["pytorchReplicaSpecs"]
        assert arguments.nnodes == str(sum(entry["replicas"] for entry in replicas.values()))
    assert (REPOSITORY / "examples/torch_digits.py").is_file()


SCRIPT = """
import os
import numpy as np
import multiring
comm = multiring.init()
assert comm.allreduce(np.ones(3)).tolist() == [4.0] * 3
place = comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size
os.write(1, ("\\nrank " + " ".join(map(str, place)) + "\\n").encode())  # at once: ranks share a pipe
"""
ALL_RANKS = ["0 4 0 2 0 2", "1 4 1 2 0 2", "2 4 0 2 1 2", "3 4 1 2 1 2"]


def test_what_the_mpi_job_starts_works(emulate: Callable[..., EmulatedHosts], tmp_path: Path) -> None:
    """In two pods, and a third one for the launcher."""
    pods = emulate(3)
    (tmp_path / "script.py").write_text(SCRIPT)
    slots = MPI_JOB["spec"]["slotsPerWorker"]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{pods.address(pod)} slots={slots}\n" for pod in range(2)))
    launcher = container(MPI_JOB, "Launcher")
    words = [*launcher["command"], *launcher["args"]]
    words = [{"/etc/mpi/hostfile": str(hostfile), words[-1]: "script.py"}.get(word, word) for word in words]
    command = [sys.executable, "-m", *words[:2], "--ssh", shell_of(pods), *words[2:]]
    environ = {"PYTHONPATH": str(REPOSITORY)}
    done = Job(lambda root: pods.command(2, command), environ, cwd=tmp_path).run(code=0)
    lines = done.stdout.splitlines()
    assert sorted(line.partition("rank ")[2] for line in lines if "rank " in line) == ALL_RANKS
