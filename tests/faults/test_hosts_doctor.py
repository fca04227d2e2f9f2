"""`multiring doctor -H` over emulated hosts. What it says of facts: tests/python/commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from tests.faults.remote import shell_of, sshd_on
from tests.support import REPOSITORY, Job, executable

# Far below what the machine passes, so that the limit alone decides what is measured.
RATE = "100mbit"


def doctor(hosts: EmulatedHosts, *words: str, code: int, places: str = "", ssh: str = "", **env: str) -> str:
    """What it says on the first host, by default with one rank on each, and ends with that code."""
    places = places or ",".join(map(hosts.address, range(hosts.count)))
    command = [sys.executable, "-m", "multiring", "doctor", "-H", places, "--ssh", ssh or shell_of(hosts)]
    return Job(hosts.command(0, [*command, *words]), env, cwd=REPOSITORY).run(code=code).stdout


def lead_nowhere(hosts: EmulatedHosts, host: int, address: str, device: str) -> None:
    """What the host sends to that address does not arrive."""
    neighbour = ["ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev", device]
    subprocess.run(hosts.command(host, [*neighbour, "nud", "permanent"]), check=True)


def lines_about(output: str, status: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(status)]


def test_hosts_that_are_well(emulate: Callable[..., EmulatedHosts]) -> None:
    hosts = emulate(3, [RATE])
    said = doctor(hosts, code=0)
    assert not lines_about(said, "failed")
    assert "every host reaches every other one" in said
    rows = said.splitlines()
    assert all(f"eth0 {hosts.address(host)}" in row for host, row in enumerate(rows[:3]))
    rates = [row for row in rows if "sends to" in row]
    assert [row.count("bit/s ") for row in rates] == [2, 2, 2], said  # from each host to each other one
    assert "These hosts can run a job" in said


def test_a_host_that_ssh_cannot_reach_is_told(hosts: EmulatedHosts, tmp_path: Path) -> None:
    places = f"{hosts.address(0)},10.93.0.77,{hosts.address(1)}"
    with sshd_on(hosts, tmp_path / "ssh") as ssh:
        said = doctor(hosts, ssh=f"{ssh} -o ConnectTimeout=2", places=places, code=1)
    assert f"ok       {hosts.address(1)}   1 rank, " in said
    (failed,) = lines_about(said, "failed")
    assert "10.93.0.77" in failed
    assert "ssh fails: ssh: connect to host 10.93.0.77 port 2222: " in failed
    assert "-> make `ssh -o BatchMode=yes 10.93.0.77 true` work" in said
    assert "every host reaches every other one" in said


def test_no_multiring_there(hosts: EmulatedHosts, tmp_path: Path) -> None:
    script = executable(tmp_path / "bare", f'exec "{Path(sys.executable).resolve()}" -S -E "$@"')
    said = doctor(hosts, "--remote-python", str(script), code=1)
    assert f"{script} has no multiring there, or another version" in said
    said = doctor(hosts, "--remote-python", "/no/such/python", code=1)
    assert "there is no /no/such/python" in said
    assert "--remote-python" in said


def test_a_link_that_is_down(emulate: Callable[..., EmulatedHosts]) -> None:
    """Of those between the second and the third host nothing arrives."""
    three = emulate(3, [RATE])
    lead_nowhere(three, 2, three.address(1), "eth0")
    said = doctor(three, code=1)
    failed = lines_about(said, "failed")
    ends = [f"{three.address(host)} (eth0) of {three.address(host)}" for host in (1, 2)]
    assert len(failed) == 2, said
    assert f"{ends[0]} does not reach {ends[1]}: no answer within" in failed[0]
    assert f"{ends[1]} does not reach {ends[0]}: no answer within" in failed[1]
    assert "open all TCP ports between the two" in said
    assert "These hosts cannot run a job" in said


def test_no_interface_that_is_chosen(hosts: EmulatedHosts) -> None:
    failed = lines_about(doctor(hosts, MULTIRING_INTERFACES="^eth0", code=1), "failed")
    assert len(failed) == 2, failed
    assert all("no interface of this host is left" in line for line in failed)


def test_an_interface_that_leads_nowhere_is_named_and_can_be_left_out(
    emulate: Callable[..., EmulatedHosts],
) -> None:
    hosts = emulate(2, [RATE, RATE])
    lead_nowhere(hosts, 1, hosts.address(0, 1), "eth1")
    said = doctor(hosts, code=1)
    assert len(lines_about(said, "failed")) == 2, said
    ends = [f"{hosts.address(host, 1)} (eth1) of" for host in range(2)]
    assert f"{ends[0]} {hosts.name(0)} does not reach {ends[1]}" in said
    assert "as with MULTIRING_INTERFACES=^eth1" in said
    said = doctor(hosts, MULTIRING_INTERFACES="^eth1", code=0)


def test_a_name_that_only_ssh_knows_needs_an_address(hosts: EmulatedHosts, tmp_path: Path) -> None:
    # With names as in ~/.ssh/config.
    shell = executable(tmp_path / "ssh", f'shift\nexec {shell_of(hosts)} {hosts.address(1)} "$@"')
    said = doctor(hosts, places="node1", ssh=str(shell), code=1)
    assert "say by --address where the ranks reach this host" in said
    said = doctor(hosts, "--address", hosts.address(0), places="node1", ssh=str(shell), code=0)
