"""Parts of `multiring doctor -H` that need no other host."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from multiring.commands.doctor import hosts_doctor
from multiring.commands.doctor.checks import Finding, Status
from multiring.commands.doctor.host_findings import host_findings, rate_findings
from multiring.commands.doctor.host_probe import MARK, HostProbe, Listener, call_seconds
from multiring.commands.doctor.host_session import RemoteSession, SessionError
from multiring.commands.doctor.host_tables import rates_table
from multiring.commands.doctor.links import rounds
from multiring.commands.launcher.hosts import HostSlots
from tests.support import Job, executable, held_port, wait_until

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


def test_equal_links_are_fine() -> None:
    (row,) = rate_findings(NAMES, measured({(0, 1): 80e6}))
    assert row.finding.status is Status.OK
    assert row.finding.detail == "640 Mbit/s to 800 Mbit/s, 0.10 ms of latency"
    many = rates_table([f"host{i}" for i in range(9)], measured({}))
    assert many.splitlines()[1].split()[:2] == ["host0", "host1"], "more hosts are a list"


def test_a_slow_host_is_told_from_a_slow_link() -> None:
    (row,) = rate_findings(NAMES, measured({(2, 0): 10e6, (2, 1): 11e6}))
    assert (row.about, row.finding.status) == ("c", Status.WARNING)
    assert row.finding.detail == "sends 88 Mbit/s at most; the median of the hosts is 800 Mbit/s"
    rows = rate_findings(["a", "b"], [(0, 1, 100e6, 1e-4), (1, 0, 10e6, 1e-4)])
    assert [(row.about, row.finding.detail.split()[0]) for row in rows] == [("b", "sends"), ("a", "receives")]
    (row,) = rate_findings(NAMES, measured({(2, 0): 10e6}))
    assert row.about == "links"
    assert row.finding.detail == "c -> a: 80 Mbit/s; with others both reach 800 Mbit/s"


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
    found = host_findings("b", 4, {**FACTS, **facts}, (offset, 0.01), here, {"a": here})
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


def test_a_probe_reaches_a_listener_and_nobody_else() -> None:
    probe = HostProbe()
    listener = Listener(["127.0.0.1"], bytes(16))
    right, wrong = [["", "127.0.0.1", listener.ports[0], token * 16] for token in ("00", "01")]
    assert probe.answer("call", targets=[right, wrong]) == ["", "somebody else answers there"]
    listener.close()
    with held_port() as port:
        assert probe.answer("call", targets=[["", "127.0.0.1", port, "00" * 16]]) == ["connection refused"]
    (port,) = probe.answer("listen", addresses=["127.0.0.1"], token="ab" * 16)
    assert probe.answer("call", targets=[["", "127.0.0.1", port, "ab" * 16]]) == [""]
    probe.close()


def answers(directory: Path, script: str) -> RemoteSession:
    """A host that answers as a script says."""
    return RemoteSession("b", [str(executable(directory / "ssh", script))], "")


def test_a_late_answer_is_not_taken_for_that_of_the_next_question(tmp_path: Path) -> None:
    """Both come when the second question has been asked, between things that a shell says."""
    late, right = (f'echo welcome; echo \'{MARK}{{"answer": "{word}"}}\'' for word in ("late", "right"))
    session = answers(tmp_path, f"read first; read second; {late}; {right}; read third; {right}\n")
    with contextlib.closing(session):
        with pytest.raises(SessionError, match="does not answer in time"):
            session.ask("call", 0.1)
        assert session.ask("call", 20.0) == "right"
        assert session.ask("call", 20.0) == "right"


def test_more_hosts_have_more_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[float] = []

    def ask(question: str, timeout: float, **_: object) -> None:
        given.append(timeout)
        raise SessionError(Finding(Status.FAILED, "nobody is there", "start it"))

    monkeypatch.setattr(hosts_doctor, "RemoteSession", lambda *_: Mock(ask=ask))
    times = []
    for count in (2, 128):
        given.clear()
        args = argparse.Namespace(ssh="ssh", remote_python="", address="")
        hosts = [HostSlots(f"h{number}.invalid", 1) for number in range(count)]
        found = hosts_doctor.main(args, hosts, lambda row: None)
        assert [finding.detail for finding in found] == ["nobody is there"] * count
        assert len(given) == count
        times.append(max(given))
    assert 90 <= times[0] < 100
    assert times[1] == pytest.approx(3 * 90)
    assert call_seconds(64) < 10 <= call_seconds(65)
    capsys.readouterr()


def test_ctrl_c_ends_those_who_wait_for_a_host(tmp_path: Path) -> None:
    hangs = executable(tmp_path / "ssh", f"touch {tmp_path}/$1\nexec sleep 300.5")
    command = [sys.executable, "-m", "multiring", "doctor", "-H", "a.invalid,b.invalid", "--ssh", str(hangs)]
    with Job(lambda root: command, start_new_session=True) as job:
        wait_until(lambda: all((tmp_path / f"{host}.invalid").exists() for host in "ab"), "ssh")
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        job.ended(130)
