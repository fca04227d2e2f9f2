"""Parts of `multiring doctor -H` that need no other host."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multiring.commands.doctor.checks import Status
from multiring.commands.doctor.host_probe import MARK
from multiring.commands.doctor.hosts_doctor import Host, _unreached, host_findings, look_at, rate_findings
from multiring.commands.doctor.links import Listener, reach, rounds
from multiring.commands.launcher.hosts import HostSlots
from tests.support import Job, executable, held_port, run_multiring, wait_until

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("count", [2, 3, 16, 17, 19])
def test_rounds_have_every_host_once_and_all_pairs_while_they_are_few(count: int) -> None:
    found = rounds(count)
    for pairs in found:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
    pairs = {tuple(sorted(pair)) for round_ in found for pair in round_}
    assert sum(map(len, found)) == len(pairs)
    if count <= 16:
        assert pairs == set(itertools.combinations(range(count), 2))
    else:
        assert len(found) <= 16
        assert {host for pair in pairs for host in pair} == set(range(count))


def measured(rates: dict[tuple[int, int], float]) -> list[tuple[int, int, float, float]]:
    return [(*pair, rates.get(pair, 100e6), 1e-4) for pair in itertools.permutations(range(3), 2)]


def slow(names: list[str], found: list[tuple[int, int, float, float]]) -> list[tuple[str, str]]:
    """Whom warnings are about, and what they say."""
    rows = rate_findings(names, found)
    return [(about, finding.detail) for about, finding in rows if finding.status is Status.WARNING]


def test_a_slow_host_is_told_from_a_slow_link() -> None:
    assert slow(NAMES, measured({(0, 1): 80e6})) == []
    told = "sends 88 Mbit/s at most; the median of the hosts is 800 Mbit/s"
    assert slow(NAMES, measured({(2, 0): 10e6, (2, 1): 11e6})) == [("c", told)]
    rows = slow(["a", "b"], [(0, 1, 100e6, 1e-4), (1, 0, 10e6, 1e-4)])
    assert [(about, detail.split()[0]) for about, detail in rows] == [("b", "sends"), ("a", "receives")]
    told = "c -> a: 80 Mbit/s; with others both reach 800 Mbit/s"
    assert slow(NAMES, measured({(2, 0): 10e6})) == [("links", told)]


def test_hosts_without_a_network_in_common_are_told() -> None:
    facts = {"addresses": [("eth0", "10.0.0.1", 8), ("eth1", "10.1.0.1", 8)]}
    hosts = [Host(name, HostSlots(name, 1), facts) for name in "ab"]
    about, finding = _unreached(hosts, 0, "", 1, "", "they have no address of one family (IPv4, IPv6)")
    assert (about, finding.fix.split()[:2]) == ("a", ["choose", "interfaces"])
    _, finding = _unreached(hosts, 0, ("eth0", "10.0.0.1"), 1, ("eth1", "10.1.0.2"), "no answer")
    assert "^eth1" in finding.fix
    assert "10.1.0.2 (eth1) of b" in finding.detail


def test_more_hosts_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(command: list[str], *, timeout: float, **_: object) -> None:
        given.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    args = argparse.Namespace(ssh="ssh", remote_python="", address="", interfaces=None)
    for count in (2, 128):
        rows = list(look_at(args, [HostSlots(f"h{number}.invalid", 1) for number in range(count)]))
        assert sum(finding.detail == "does not answer in time" for _, finding in rows) == count
    assert given[:2] == [given[0]] * 2
    assert given[2:] == [given[-1]] * 128
    assert given[-1] > 2 * given[0]


FACTS: dict[str, Any] = {
    "machine": "m1",
    "versions": {"multiring": "0.1.0", "python": "3.11.7", "numpy": "2.3.5"},
    "cores": 4,
    "NUMA nodes": 2,
    "directory": True,
    "addresses": [["eth0", "10.0.0.1", 24]],
    "no addresses": "",
    "findings": [],
}


def findings(facts: dict[str, Any], offset: float = 0.0) -> list[tuple[str, str]]:
    here = {**FACTS, "machine": "m0"}
    hosts = [Host("a", HostSlots("", 4), here), Host("b", HostSlots("b", 4), FACTS | facts)]
    hosts[1].offset = (offset, 0.01)
    found = host_findings(hosts[1], here, hosts)
    assert all(finding.fix for finding in found)
    return [(finding.status.value, finding.detail) for finding in found]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        (
            {"directory": False, "cores": 2, "machine": "m0", "no addresses": "none left"},
            [
                ("failed", "the directory that you are in is not there"),
                ("warning", "4 ranks share 2 cores"),
                ("failed", "none left"),
                ("warning", "is the same machine as a"),
            ],
        ),
        ({"findings": [["shared memory", "failed", "no", "do"]]}, [("failed", "shared memory: no")]),
        (
            {"versions": {"multiring": "0.2", "python": "3.11.9", "torch": "2.6"}},
            [
                ("failed", "has multiring 0.2; this host has multiring 0.1.0"),
                ("warning", "has python 3.11.9; this host has python 3.11.7"),
                ("warning", "has no numpy; this host has numpy 2.3.5"),
                ("warning", "has torch 2.6; this host has none"),
            ],
        ),
        (
            {"versions": {**FACTS["versions"], "python": "3.12.7"}},
            [("failed", "has python 3.12.7; this host has python 3.11.7")],
        ),
    ],
)
def test_what_differs_between_hosts_is_told(facts: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert findings({}, offset=1.005) == []
    told = "its clock is 1.5 s (+-0.010 s) behind that of this host"
    assert findings({}, offset=-1.5) == [("warning", told)]
    for (status, detail), (wanted, words) in zip(findings(facts), expected, strict=True):
        assert status == wanted
        assert detail.startswith(words)


def test_a_listener_is_reached_and_nobody_else() -> None:
    listener = Listener(["127.0.0.1"], bytes(16))
    assert reach("127.0.0.1", "127.0.0.1", listener.ports[0], bytes(16)) == ""
    assert (
        reach("127.0.0.1", "127.0.0.1", listener.ports[0], bytes(15) + b"1") == "somebody else answers there"
    )
    listener.close()
    with held_port() as port:
        assert reach("127.0.0.1", "127.0.0.1", port, bytes(16)) == "connection refused"


def test_a_host_that_answers_otherwise_is_told_and_the_shells_words_are_not_its_answer(
    tmp_path: Path,
) -> None:
    answer = json.dumps({"machine": "m", "clock": [0, 1]})
    shell = executable(tmp_path / "ssh", f"echo welcome; echo '{MARK}{answer}'")
    said = run_multiring("doctor", "-H", "a.invalid", "--ssh", str(shell), code=1).stdout
    assert "has no multiring there, or another version" in said
    assert "1 of 2 checks failed" in said


def test_ctrl_c_ends_those_who_wait_for_a_host(tmp_path: Path) -> None:
    hangs = executable(tmp_path / "ssh", f"touch {tmp_path}/$1\nexec sleep 300.5")
    command = [sys.executable, "-m", "multiring", "doctor", "-H", "a.invalid,b.invalid", "--ssh", str(hangs)]
    with Job(lambda root: command, start_new_session=True) as job:
        wait_until(lambda: all((tmp_path / f"{host}.invalid").exists() for host in "ab"), "ssh")
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        job.ended(130)
