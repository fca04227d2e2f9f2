"""The soak: jobs to which something happens at a moment drawn by chance, one after the other.

    ci/soak.sh MINUTES [--seed N] [--first N]

Each job runs the operations of soak_rank.py on one host or on three emulated ones, there every other time
with a ring for its allreduces. One of its ranks is killed, stopped, leaves, vanishes, raises or asks for
something else; its launcher is interrupted; or a host is cut off. A finding is a job that does not end in
time, ends well after a loss or badly without one, does not name the rank that it lost, has wrong results, or
leaves processes or files behind. Jobs are numbered: the same seed and number draw the same job, though not
the same moment to the microsecond. Prints counts by place and event; exit code 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from multiring.benchmarks.emulation.hosts import EmulatedHosts, why_not
from tests.faults.soak_rank import BY_TIME, WRONG
from tests.support import Job, start_job

RANK_PROGRAM = Path(__file__).with_name("soak_rank.py")
# How a job ends: 0, with what the rank ended with, or with what the others make of it.
EXIT_CODES = {"none": {0}, "kill": {137}, "vanish": {7}, "interrupt": {130}}
FAILED = {1}
VICTIM_CODES = {"kill": {-signal.SIGKILL, 137}, "leave": {0}, "vanish": {7}}
# After an event: a host is lost after five seconds, a stopped rank at the deadline, and the machine is slow.
DEADLINE_SECONDS = 4.0
LIMIT_SECONDS = 30.0
LAYOUT = (2, 1, 2)


@dataclass(frozen=True)
class Case:
    """One job: where, how many ranks, and what happens to which of them."""

    number: int
    seed: int
    place: str
    ranks: int
    event: str
    victim: int
    at: int  # milliseconds, or number of the operation
    ring: bool  # for allreduces; on several hosts

    @property
    def arguments(self) -> list[str]:
        return [str(self.seed), self.event, str(self.victim), str(self.at)]


def drawn(seed: int, number: int, places: list[str]) -> Case:
    choose = random.Random(f"{seed} {number}")
    place = choose.choice(places)
    ranks = choose.randint(2, 5) if place == "one host" else sum(LAYOUT)
    events = ["none", "kill", "kill", "kill", "stop", "leave", "vanish", "raise", "mismatch"]
    events += ["interrupt"] if place == "one host" else ["cut", "cut"]
    event = choose.choice(events)
    by_time = event in {*BY_TIME, "interrupt", "cut"}
    at = choose.randrange(100, 3000) if by_time else choose.randrange(40)
    rank_seed, victim = choose.randrange(2**30), choose.randrange(ranks)
    ring = place != "one host" and choose.random() < 0.5
    return Case(number, rank_seed, place, ranks, event, victim, at, ring)


def run(case: Case) -> str:
    """Runs one job; what was found, or nothing."""
    try:
        return on_one_host(case) if case.place == "one host" else on_emulated_hosts(case)
    except AssertionError as error:
        return str(error)


def on_one_host(case: Case) -> str:
    environment = {"MULTIRING_TIMEOUT": f"{DEADLINE_SECONDS}"}
    with start_job(case.ranks, RANK_PROGRAM, *case.arguments, env=environment) as job:
        if case.event == "interrupt":
            time.sleep(case.at / 1000)
            job.process.send_signal(signal.SIGINT)
        ended = job.ended(None, LIMIT_SECONDS)
    output = ended.stdout + ended.stderr
    if ended.returncode not in EXIT_CODES.get(case.event, FAILED):
        return f"exit code {ended.returncode}\n{output}"
    # The launcher does, also before ranks have met.
    if case.event in {"kill", "vanish"} and not re.search(
        rf"^multiring: rank {case.victim}\b.* failed with", output, re.MULTILINE
    ):
        return f"the launcher does not blame rank {case.victim}\n{output}"
    return judge(case, output, [case.victim])


def on_emulated_hosts(case: Case) -> str:
    with EmulatedHosts(len(LAYOUT)) as hosts:
        shared = {
            "OMPI_COMM_WORLD_SIZE": str(case.ranks),
            "PMIX_NAMESPACE": f"soak-{case.number}",
            "MULTIRING_STORE": f"tcp://{hosts.address(0)}:29400",
            "MULTIRING_SECRET": secrets.token_hex(32),
            "MULTIRING_TIMEOUT": f"{DEADLINE_SECONDS + 6}",  # later than the loss of a host
        }
        if case.ring:
            shared |= {"MULTIRING_MODE": f"{max(LAYOUT)}x{len(LAYOUT)}r", "MULTIRING_ORDER": "any"}
        jobs: list[Job] = []
        for host, count in enumerate(LAYOUT):
            for local in range(count):
                own = {
                    "OMPI_COMM_WORLD_RANK": str(len(jobs)),
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
                }
                command = hosts.command(host, [sys.executable, str(RANK_PROGRAM), *case.arguments])
                jobs.append(Job(command, {**shared, **own}))
        host_of = [host for host, count in enumerate(LAYOUT) for _ in range(count)]
        try:
            if case.event == "cut":
                time.sleep(case.at / 1000)
                hosts.cut(host_of[case.victim])
            outputs = [ended_rank(job, case, rank) for rank, job in enumerate(jobs)]
        finally:
            for job in jobs:
                job.destroy()
    all_said = "\n".join(f"--- rank {rank}\n{output}" for rank, output in enumerate(outputs))
    if case.event == "stop":  # who waits for others that wait for it does not know of it
        return judge(case, all_said, [case.victim])
    for rank, output in enumerate(outputs):
        if rank != case.victim or case.event == "cut":
            cut = {other for other, host in enumerate(host_of) if host == host_of[case.victim]}
            lost = set(range(case.ranks)) - cut if rank in cut else cut
            if found := judge(case, output, sorted(lost) if case.event == "cut" else [case.victim]):
                return f"rank {rank}: {found}\n{all_said}"
    return ""


def ended_rank(job: Job, case: Case, rank: int) -> str:
    """What a rank has said, which has ended as it should."""
    expected = {0} if case.event == "none" else FAILED
    if rank == case.victim:
        if case.event == "stop":  # it is stopped still
            return ""
        expected = VICTIM_CODES.get(case.event, expected)
    ended = job.ended(None, LIMIT_SECONDS)
    output = ended.stdout + ended.stderr
    assert ended.returncode in expected, f"rank {rank} ended with {ended.returncode}\n{output}"
    return output


def judge(case: Case, output: str, lost: list[int]) -> str:
    """What is wrong with what was said: a result, or an error that names none of the lost."""
    if WRONG in output:
        return output
    if case.event in {"none", "interrupt"}:
        return ""
    # While ranks meet they know of rank 0 and the store alone; and one's own network may be what is lost.
    joined = re.search(r"^(\[\d+\] )?joined$", output, re.MULTILINE)
    if not joined or (case.event == "cut" and "its network is gone" in output):
        return ""
    errors = [line for line in output.splitlines() if re.match(r"(\[\d+\] )?multiring\.\S*Error: ", line)]
    if case.place == "one host":  # the victim itself may say anything
        errors = [line for line in errors if not line.startswith(f"[{case.victim}] ")]
    elif not errors:
        return f"no error\n{output}"
    unnamed = [line for line in errors if not any(names(line, rank) for rank in lost)]
    if case.event == "stop" and len(unnamed) < len(errors):
        return ""
    return f"no word of {lost} in\n{unnamed[0]}" if unnamed else ""


def names(line: str, rank: int) -> bool:
    """Whether the rank is named, as "rank 3" or in "ranks 0-2, 5"; or that some rank is stopped."""
    for ranks in re.findall(r"ranks? (\d[\d, -]*)", line):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranks):
            if int(first) <= rank <= int(last or first):
                return True
    return "one of them is stopped" in line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(2**20), help="draws the jobs; default: by chance"
    )
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the job to begin with")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in a shell's background have it ignored
    places = ["one host"]
    if reason := why_not():
        print(f"no emulated hosts: {reason}", flush=True)
    else:
        places.append("three hosts")
    print(f"seed {options.seed}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    findings, number = 0, options.first
    end = time.monotonic() + options.minutes * 60
    while time.monotonic() < end:
        case = drawn(options.seed, number, places)
        number += 1
        counts[f"{case.place}{' in a ring' * case.ring}, {case.event}"] += 1
        try:
            found = run(case)
        except (OSError, subprocess.SubprocessError) as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            findings += 1
            print(f"FINDING in job {case.number}: {case}\n{found}\n", flush=True)
    for what, count in sorted(counts.items()):
        print(f"{count:5} {what}")
    print(f"{number - options.first} jobs with seed {options.seed}, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
