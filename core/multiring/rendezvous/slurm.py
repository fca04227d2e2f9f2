"""What Slurm says about a job in its own notation."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from multiring.errors import UsageError

__all__ = ["allocated_hosts", "first_host", "in_step", "is_own", "tasks_per_node"]

# Steps with such numbers are Slurm's own: the batch script, the shell of salloc, the external processes.
_FIRST_SPECIAL_STEP = 0xFFFF0000
_ASK_SECONDS = 30.0


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process or one above it.

    A batch script and a shell of salloc see the job's number of tasks and SLURM_PROCID=0 without being one of
    those tasks: only what srun has started is part of a numbered step.
    """
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return False
    step = environ["SLURM_STEP_ID"]
    return not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def tasks_per_node(text: str) -> list[int]:
    """The numbers of tasks of a job's hosts: "4" or "2(x3),1"; empty where the text is something else."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """The first host of a list such as "node[08-11,14],big1": node08."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def allocated_hosts(environ: Mapping[str, str]) -> list[tuple[str, int]] | None:
    """The hosts of the allocation that this process is in, and how many tasks each may get; None: it is in
    none, or is itself one of the tasks.

    Raises:
        UsageError: Slurm cannot tell them.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    if not nodelist or in_step(environ):
        return None
    if not set(nodelist) & set(",["):  # one, and no need to ask: in a container there may be nobody to
        tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
        return [(nodelist, tasks[0] if tasks else 1)]
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        asked = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unknown(nodelist, str(error)) from error
    names = asked.stdout.split()
    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")) or [1] * len(names)
    if asked.returncode != 0 or len(names) != len(tasks):
        why = asked.stderr.strip() or f"{len(names)} hosts, and tasks for {len(tasks)}"
        raise _unknown(nodelist, why)
    return list(zip(names, tasks, strict=True))


def is_own(node: str, environ: Mapping[str, str]) -> bool:
    """Whether Slurm calls this host so. A container may call itself something else."""
    return node == environ.get("SLURMD_NODENAME")


def _unknown(nodelist: str, why: str) -> UsageError:
    return UsageError(f"the hosts of Slurm's job, {nodelist}, are not known: {why}; name them by -H")
