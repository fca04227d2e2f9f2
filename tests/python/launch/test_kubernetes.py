"""The manifests of examples/kubernetes: valid without a cluster, and what they start works on emulated hosts.

The models of `kubeflow-training` and of `kubernetes`, which are generated from the schemas of the training
operator and of Kubernetes, say which fields there are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts, why_not
from multiring.commands.launcher import options
from tests.support import REPOSITORY, Job, parsed

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with the dev extra")

FOLDER = REPOSITORY / "examples/kubernetes"
MPI_JOB = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())
PYTORCH_JOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
PLAIN = {"str": str, "int": int, "bool": bool, "float": float}
# What the training operator tells all pods.
MASTER = {"MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456", "PET_NPROC_PER_NODE": "auto"}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The generated models, by their names."""
    reason = "needs kubeflow-training, which comes with the dev extra"
    kubeflow = pytest.importorskip("kubeflow.training.models", reason=reason)
    kubernetes = pytest.importorskip("kubernetes.client.models", reason=reason)
    return {**vars(kubernetes), **vars(kubeflow)}


def wrong_by_model(value: Any, kind: str, models: Mapping[str, Any], where: str) -> Iterator[str]:
    """What of a value does not fit a type of the models: unknown fields, missing ones, other types."""
    if match := re.fullmatch(r"(?:dict\(str, |list\[)(.+)[\])]", kind):
        expected: type = dict if kind.startswith("dict") else list
        if not isinstance(value, expected):
            yield f"{where} is no {expected.__name__}"
            return
        for key, item in value.items() if expected is dict else enumerate(value):
            yield from wrong_by_model(item, match[1], models, f"{where}.{key}")
    elif kind in PLAIN:
        if type(value) is not PLAIN[kind]:
            yield f"{where} is no {kind}: {value!r}"
    elif kind != "object":
        yield from wrong_fields(value, models[kind], models, where)


def wrong_fields(value: Any, model: Any, models: Mapping[str, Any], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is no {model.__name__}"
        return
    names = {name: attribute for attribute, name in model.attribute_map.items()}
    yield from (f"{where}.{name} is not known" for name in value.keys() - names.keys())
    known = {names[name]: item for name, item in value.items() if name in names}
    for attribute, item in known.items():
        place = f"{where}.{model.attribute_map[attribute]}"
        yield from wrong_by_model(item, model.openapi_types[attribute], models, place)
    try:
        model(**known)
    except ValueError as error:  # something that has to be there is not
        yield f"{where}: {error}"


def container(job: Mapping[str, Any], replicas: str) -> dict[str, Any]:
    spec = job["spec"]
    template = (spec.get("mpiReplicaSpecs") or spec.get("pytorchReplicaSpecs"))[replicas]["template"]
    (found,) = template["spec"]["containers"]
    return dict(found)


def containers() -> list[dict[str, Any]]:
    return [
        *(container(MPI_JOB, name) for name in ("Launcher", "Worker")),
        *(container(PYTORCH_JOB, name) for name in ("Master", "Worker")),
    ]


def expanded(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """As the kubelet replaces $(NAME)."""
    return [re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in words]


def test_the_jobs_fit_the_schema(models: dict[str, Any]) -> None:
    assert (PYTORCH_JOB["apiVersion"], PYTORCH_JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert not list(wrong_by_model(PYTORCH_JOB, "KubeflowOrgV1PyTorchJob", models, "job"))
    for name, replicas in MPI_JOB["spec"]["mpiReplicaSpecs"].items():
        assert name in ("Launcher", "Worker")
        assert not list(wrong_by_model(replicas, "KubeflowOrgV1ReplicaSpec", models, name))


def test_no_variable_of_multiring_has_to_be_set() -> None:
    assert {entry["name"] for found in containers() for entry in found.get("env", [])} == {"OMP_NUM_THREADS"}


def test_every_command_is_understood() -> None:
    launcher, *_ = containers()
    program, name, *words = [*launcher["command"], *launcher["args"]]
    assert (program, name) == ("multiring", "run")
    understood = parsed(options.add_arguments, *words)
    assert understood.hostfile == Path("/etc/mpi/hostfile")
    assert understood.program == ["examples/torch_digits.py"]
    torchrun = pytest.importorskip("torch.distributed.run", reason="needs PyTorch")
    for name in ("Master", "Worker"):
        pod = container(PYTORCH_JOB, name)
        assert pod["command"][0] == "torchrun"
        words = expanded([*pod["command"][1:], *pod["args"]], {"RANK": "1", **MASTER})
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


@pytest.fixture
def pods() -> Iterator[EmulatedHosts]:
    """Two pods, and a third one for a launcher."""
    if reason := why_not():
        pytest.skip(reason)
    with EmulatedHosts(3) as hosts:
        yield hosts


def ranks(output: str) -> list[str]:
    return sorted(line.partition("rank ")[2] for line in output.splitlines() if "rank " in line)


def test_what_the_mpi_job_starts_works(pods: EmulatedHosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    slots = MPI_JOB["spec"]["slotsPerWorker"]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{pods.address(pod)} slots={slots}\n" for pod in range(2)))
    launcher = container(MPI_JOB, "Launcher")
    words = [*launcher["command"], *launcher["args"]]
    words = [{"/etc/mpi/hostfile": str(hostfile), words[-1]: "script.py"}.get(word, word) for word in words]
    ids = ",".join(map(str, pods.process_ids))
    ssh = f"env EMULATED_HOSTS={ids} {sys.executable} -m multiring.benchmarks.emulation.start shell"
    command = [sys.executable, "-m", *words[:2], "--ssh", ssh, *words[2:]]
    environ = {"PYTHONPATH": str(REPOSITORY)}
    done = Job(lambda root: pods.command(2, command), environ, cwd=tmp_path).run(code=0)
    assert ranks(done.stdout) == ALL_RANKS
