"""Places of ranks that torchrun, an MPI, or a scheduler has started, from the variables that they set."""

from __future__ import annotations

import dataclasses
import json
import os
import urllib.parse
from collections.abc import Callable, Mapping

from multiring.errors import UsageError
from multiring.rendezvous import slurm
from multiring.rendezvous.placement import Job, Placement, host_count, meeting_at

__all__ = ["FOREIGN", "TORCHRUN_SCHEME"]

# Ranks meet at torchrun's store at that host and port, in the run of that name.
TORCHRUN_SCHEME = "torchrun://"

# Tasks of TF_CONFIG that train, in the order of the ranks; the pools are what Vertex AI calls them.
_TRAINING = ("chief", "master", "workerpool0", "worker", "workerpool1")


def _torchrun(job: Job) -> Placement:
    environ, number = job.environ, job.number
    size = number("WORLD_SIZE")
    local_size = number("LOCAL_WORLD_SIZE", size)
    # The error file lies in a directory with a random name, per attempt, per local rank:
    # /tmp/torchelastic_x1b2/<run id>_a3c4/attempt_0/<local rank>/error.json
    attempt = os.path.dirname(os.path.dirname(environ.get("TORCHELASTIC_ERROR_FILE", "")))
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    placement = job.placement(
        *(number("RANK"), size),
        (number("LOCAL_RANK"), local_size),
        (number("GROUP_RANK", 0), number("GROUP_WORLD_SIZE", host_count(size, local_size))),
        [*job.texts(*names), attempt],
        " ".join(filter(None, job.texts("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))),
    )
    # Else rank 0 of torch.distributed would have to serve that store, and there may be none.
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in environ
    if job.settings.store or not placement.is_spread or not has_store:
        return placement
    host = environ["MASTER_ADDR"]
    address = f"{f'[{host}]' if ':' in host else host}:{number('MASTER_PORT')}"
    run = urllib.parse.quote(environ["TORCHELASTIC_RUN_ID"], safe="")
    return dataclasses.replace(placement, store_url=f"{TORCHRUN_SCHEME}{address}/{run}")


def _openmpi(job: Job) -> Placement:
    rank, size = job.number("OMPI_COMM_WORLD_RANK"), job.number("OMPI_COMM_WORLD_SIZE")
    local_size = job.number("OMPI_COMM_WORLD_LOCAL_SIZE", size)
    local = job.number("OMPI_COMM_WORLD_LOCAL_RANK", rank), local_size
    # The namespace names host, process and job of mpirun, the URI the port that it listens on.
    names = ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_TMPDIR", "OMPI_MCA_ess_base_jobid")
    key = job.texts(*names)
    if not any(key):
        key = [job.launcher_process("OMPI_COMM_WORLD_RANK")]
    return job.placement(
        rank, size, local, (0, host_count(size, local_size)), key, job.environ.get("PMIX_NAMESPACE", "")
    )


def _mpich(job: Job) -> Placement:
    rank, size = job.number("PMI_RANK"), job.number("PMI_SIZE")
    local = job.number("MPI_LOCALRANKID"), job.number("MPI_LOCALNRANKS", size)
    key = [job.launcher_process("MPI_LOCALRANKID")]  # Hydra gives a job no name
    return job.placement(rank, size, local, (0, host_count(size, local[1])), key)


def _slurm(job: Job) -> Placement:
    environ, number = job.environ, job.number
    size = number("SLURM_STEP_NUM_TASKS")
    hosts = number("SLURM_STEP_NUM_NODES", number("SLURM_NNODES", 1))
    host = number("SLURM_NODEID", 0)
    tasks = slurm.tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    key = job.texts(*names)
    rank = number("SLURM_PROCID")
    local = number("SLURM_LOCALID", rank), tasks[host] if host < len(tasks) else size // hosts
    name = ".".join(filter(None, job.texts("SLURM_JOB_ID", "SLURM_STEP_ID")))
    first_host = slurm.first_host(environ.get("SLURM_STEP_NODELIST", ""))
    placement = job.placement(rank, size, local, (host, hosts), key, name)
    return meeting_at(placement, job.settings, first_host, key) if placement.is_spread else placement


def _mvapich(job: Job) -> Placement:
    number = job.number
    rank, size = number("MV2_COMM_WORLD_RANK"), number("MV2_COMM_WORLD_SIZE")
    local = number("MV2_COMM_WORLD_LOCAL_RANK", rank), number("MV2_COMM_WORLD_LOCAL_SIZE", size)
    key = [*job.texts("MPIRUN_ID", "MPIRUN_HOST"), job.launcher_process("MV2_COMM_WORLD_RANK")]
    return job.placement(rank, size, local, (0, host_count(size, local[1])), key)


def _jsrun(job: Job) -> Placement:
    number = job.number
    rank, size = number("JSM_NAMESPACE_RANK"), number("JSM_NAMESPACE_SIZE")
    local = number("JSM_NAMESPACE_LOCAL_RANK", rank), number("JSM_NAMESPACE_LOCAL_SIZE", size)
    key = job.texts("LSB_JOBID", "PMIX_NAMESPACE", "JSM_NAMESPACE_ID")
    name = ".".join(filter(None, job.texts("LSB_JOBID", "PMIX_NAMESPACE")))
    return job.placement(rank, size, local, (0, host_count(size, local[1])), key, name)


def _pals(job: Job) -> Placement:
    number = job.number
    rank, size = number("PALS_RANKID"), number("PALS_SIZE" if "PALS_SIZE" in job.environ else "PMI_SIZE")
    local_size = number("PALS_LOCAL_SIZE", number("PMI_LOCAL_SIZE", size))
    hosts = host_count(size, local_size)
    local, host = number("PALS_LOCAL_RANKID", rank), min(number("PALS_NODEID", 0), hosts - 1)
    key = job.texts("PALS_APID")
    return job.placement(rank, size, (local, local_size), (host, hosts), key, "".join(key))


def _flux(job: Job) -> Placement:
    number = job.number
    rank, size, hosts = number("FLUX_TASK_RANK"), number("FLUX_JOB_SIZE"), number("FLUX_JOB_NNODES", 1)
    local = number("FLUX_TASK_LOCAL_ID", rank), host_count(size, hosts)
    key = job.texts("FLUX_JOB_ID", "FLUX_URI")
    return job.placement(rank, size, local, (0, hosts), key, key[0])


def _horovodrun(job: Job) -> Placement:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    rank, size, *rest = (job.number(f"HOROVOD_{name}") for name in names)
    key = job.texts("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return job.placement(rank, size, (rest[0], rest[1]), (rest[2], rest[3]), key, ":".join(key))


def _tf_config(job: Job) -> Placement:
    """Chief and workers are the ranks, in this order; each has an address of its own."""
    workers, index = _workers(job.environ)
    key = sorted(workers)
    hosts = [address.rpartition(":")[0] for address in workers]
    # Also on one host by the address: the next run has the same one, and would find what this one has left.
    port = int(workers[0].rpartition(":")[2])
    return meeting_at(_of_hosts(job, hosts, index, key), job.settings, hosts[0].strip("[]"), key, port)


def _workers(environ: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the addresses of the ranks in TF_CONFIG, and the place of this process among them.

    Raises:
        UsageError: It is not one of them, or TF_CONFIG makes no sense.
    """
    text = environ["TF_CONFIG"]
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        kind, index = task["type"], int(task["index"])
        kinds = [kind for kind in _TRAINING if cluster.get(kind)]
        workers = [str(address) for each in kinds for address in cluster[each]]
        before = sum(len(cluster[each]) for each in kinds[: kinds.index(kind)]) if kind in kinds else -1
        is_complete = all(address.rpartition(":")[2].isdecimal() for address in workers)
    except (ValueError, TypeError, KeyError, AttributeError):
        is_complete = False
    if not is_complete:
        raise UsageError(
            f"TF_CONFIG is {text!r}; expected a cluster of addresses, and a task (docs/launching.md)"
        )
    if before < 0:
        raise UsageError(
            f"TF_CONFIG says that this process is {kind} {index}: only chief and workers train with "
            "multiring; unset TF_CONFIG in the others"
        )
    return workers, before + index


def _sagemaker(job: Job) -> Placement:
    """One process on each host."""
    hosts = sorted(json.loads(job.environ["SM_HOSTS"]))
    key = [*hosts, *job.texts("TRAINING_JOB_NAME", "SM_TRAINING_ENV")[:1]]
    placement = _of_hosts(job, hosts, hosts.index(job.environ["SM_CURRENT_HOST"]), key)
    return meeting_at(placement, job.settings, hosts[0], key)


def _of_hosts(job: Job, hosts: list[str], rank: int, key: list[str]) -> Placement:
    """Return the place of a rank where each rank's host is known."""
    if not 0 <= rank < len(hosts):
        raise UsageError(f"launcher {job.launcher}: rank {rank} of {len(hosts)} cannot be")
    names = list(dict.fromkeys(hosts))
    local = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return job.placement(rank, len(hosts), local, (names.index(hosts[rank]), len(names)), key)


def _is_several_hosts(environ: Mapping[str, str]) -> bool:
    """Whether SageMaker has started this process, one of several."""
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "[]"))
    except ValueError:
        return False
    return isinstance(hosts, list) and len(hosts) > 1 and environ.get("SM_CURRENT_HOST") in hosts


def _is_cluster(environ: Mapping[str, str]) -> bool:
    """Whether TF_CONFIG has a cluster of several; services that train models set it for one process, too."""
    text = environ.get("TF_CONFIG", "")
    try:
        if sum(map(len, json.loads(text)["cluster"].values())) < 2:
            return False
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # told by what reads it, if it is meant to have a cluster
    return '"cluster"' in text and '"task"' in text and '"evaluator"' not in text.partition('"task"')[2]


def _has(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: set(names) <= environ.keys()


FOREIGN: dict[str, tuple[Callable[[Mapping[str, str]], bool], Callable[[Job], Placement]]] = {
    "torchrun": (_has("TORCHELASTIC_RUN_ID", "RANK"), _torchrun),
    "openmpi": (_has("OMPI_COMM_WORLD_RANK"), _openmpi),
    # PMI_RANK alone can be Slurm's; Hydra, which starts MPICH's and Intel's ranks, adds the local ones.
    "mpich": (_has("PMI_RANK", "MPI_LOCALRANKID"), _mpich),
    "mvapich": (_has("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), _mvapich),
    "jsrun": (_has("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), _jsrun),
    "pals": (_has("PALS_RANKID"), _pals),
    "flux": (_has("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), _flux),
    "slurm": (slurm.in_step, _slurm),
    "horovodrun": (_has("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_PORT"), _horovodrun),
    "TF_CONFIG": (_is_cluster, _tf_config),
    "SageMaker": (_is_several_hosts, _sagemaker),
}
"""How ranks are recognised that a launcher of others has started, and how their place is read: the first that
fits."""
