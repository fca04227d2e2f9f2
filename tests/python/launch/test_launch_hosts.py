"""Which hosts ranks are put on: -H, hostfiles, slots."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from multiring import _core, cli
from multiring.commands.launcher import options
from multiring.commands.launcher.hosts import (
    HostSlots,
    RankSlot,
    address_towards,
    assign_slots,
    is_here,
    parse_hostfile,
    parse_hosts,
)
from multiring.errors import UsageError
from multiring.store import address_to_listen_on
from tests.support import Job, executable, parsed, refused, run_multiring

HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1,b:2,a:3", [("a", 4), ("b", 2)]),
        ("user@a:2, [fe80::1]:3", [("user@a", 2), ("fe80::1", 3)]),
        (f"localhost:2,{HERE}:3,127.0.0.1,a:1", [("", 6), ("a", 1)]),
    ],
)
def test_hosts_are_read_and_this_one_is_known_by_any_name(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == [HostSlots(*host) for host in expected]


def test_this_host_is_known_by_all_addresses_unless_somebody_else_is_to_log_in() -> None:
    addresses = [address for _, address, _ in _core.interface_addresses([])]
    assert all(map(is_here, ["127.0.0.1", "127.0.1.1", HERE, *addresses]))
    assert not any(map(is_here, ["127.0.0.9", "192.0.2.77", "2001:db8::77", "no-such-host.invalid"]))
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert all(map(is_here, [f"{me}@localhost", f"{me}@{HERE}", f"{me}@127.0.0.1"]))
    assert not any(map(is_here, ["nobody-we-know@localhost", f"nobody-we-know@{HERE}"]))
    hosts = parse_hosts(f"nobody-we-know@localhost:2,localhost:1,{me}@localhost:3")
    assert hosts == [HostSlots("nobody-we-know@localhost", 2), HostSlots("", 4)]


@pytest.mark.parametrize(
    ("name", "addresses", "expected"),
    [
        ("plain", ["192.0.2.7"], "192.0.2.7"),
        ("debian", ["127.0.1.1"], "0.0.0.0"),
        ("both", ["2001:db8::7", "192.0.2.7"], "192.0.2.7"),
        ("six", ["2001:db8::7"], "2001:db8::7"),
        ("looped", ["::1", "127.0.1.1"], "0.0.0.0"),
        ("six-looped", ["::1"], "::"),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("2001:db8::9", None, "2001:db8::9"),
        ("no-such-host.invalid", None, "no-such-host.invalid"),
    ],
)
def test_where_the_launcher_listens(
    monkeypatch: pytest.MonkeyPatch, name: str, addresses: list[str] | None, expected: str
) -> None:
    if addresses is not None:
        families = {each: socket.AF_INET6 if ":" in each else socket.AF_INET for each in addresses}
        known = [(family, 1, 6, "", (each, 0)) for each, family in families.items()]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    assert address_to_listen_on(name) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # As Open MPI and as MPICH have them.
        (
            b"# ours\nnode0 slots=4 max_slots=8\nnode1:2  # small\n\nnode2\nnode0 slots = 1\n",
            [("node0", 5), ("node1", 2), ("node2", 1)],
        ),
        # Of any editor.
        (b"\xef\xbb\xbfnode0 max-slots=2 slots=2\r\n\t node1:1 # of ours: x=y", [("node0", 2), ("node1", 1)]),
        (
            b"[2001:db8::1] slots=2\n[2001:db8::2]:3\n[fe80::1%eth7]\nbob@10.0.0.1:2\n",
            [("2001:db8::1", 2), ("2001:db8::2", 3), ("fe80::1%eth7", 1), ("bob@10.0.0.1", 2)],
        ),
    ],
)
def test_a_hostfile_is_read(tmp_path: Path, data: bytes, expected: list[tuple[str, int]]) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(data)
    assert parse_hostfile(path) == [HostSlots(*host) for host in expected]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("node1 slots=0", "it has no slots, so leave it out"),
        ("node1 slots=\uff14", "not '\uff14'"),
        ("node1 slots=" + "9" * 5000, f"not '{'9' * 20}'"),
        ("node1 max_slots=many", "max_slots are a number from 1 to 999999 and not 'many'"),
        ("node1 slots=4 max_slots=2", "max_slots=2 are fewer than its slots"),
        ("node1 slots=4 slots=8", "slots are given twice"),
        ("node1 slots=4 user=bob", "'user=bob' is neither slots=N nor max_slots=N"),
        ("$(reboot)", "is no name"),
        ("2001:db8::1", "not 'db8::1'"),
        ("[2001:db8::x]:4", "2001:db8::x"),
    ],
)
def test_what_a_hostfile_cannot_have_is_told_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"node0 slots=4  # \u2028 \x0b \x85\n\n{line}\nnode2\n")
    with pytest.raises(UsageError) as caught:
        parse_hostfile(path)
    told = str(caught.value)
    assert told.startswith(f"--hostfile {path}, line 3: {line[:100]!r} is no host: ")
    assert reason in told
    assert told.endswith("; give host, host:4, [address]:4 or `host slots=4`")


def test_a_hostfile_without_hosts_is_told(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(UsageError, match=f"--hostfile {path}.*No such file"):
        parse_hostfile(path)
    for data, words in ((b"# nobody\n", "names no host"), (b"n\xf6de1\n", "'utf-8' codec can't decode")):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=f"--hostfile {path}.*{words}"):
            parse_hostfile(path)


def test_the_first_host_is_filled_first() -> None:
    hosts = [HostSlots("", 2), HostSlots("b", 3), HostSlots("c", 1)]
    places = [RankSlot("", 0, 2, 0, 2), RankSlot("", 1, 2, 0, 2), RankSlot("b", 0, 1, 1, 2)]
    assert assign_slots(hosts, 3) == places
    assert [slot.host for slot in assign_slots(hosts, None)] == ["", "", "b", "b", "b", "c"]
    with pytest.raises(UsageError, match="-np 7 needs more slots than the 6 that the hosts have"):
        assign_slots(hosts, 7)


def test_the_address_is_one_of_the_way_to_the_host() -> None:
    assert address_towards(["somebody@127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"cannot be reached .* --address"):
        address_towards(["no-such-host.invalid"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "say how many ranks to start, as in: multiring run -np 2 train.py"),
        (["-H", "a:0", "train.py"], "-H a:0: 'a:0' is no host: it has no slots, so leave it out"),
        (["-H", "", "train.py"], "-H "),
        (["-H", "a,,b", "train.py"], "-H a,,b: "),
        (["-H", ":4", "train.py"], "-H :4: "),
        (["-H-oProxyCommand=x", "train.py"], "-H -oProxyCommand=x: "),
        (["-np", "3", "-H", "a:2", "train.py"], "-np 3 needs more slots than the 2"),
        (["-H", "a:2", "--ssh", "ssh -o 'x", "t.py"], "--ssh ssh -o 'x: No closing quotation"),
        (["-H", "a:2", "--ssh", "", "t.py"], "--ssh needs a command"),
        (["-H", "a:2"], "name the program that the ranks run"),
        (["-np", "-3", "true"], "at least 1"),
        (["-np", "2", "--timeout", "0", "true"], "more than 0"),
        (["-np", "2", "--env", "X", "true"], "NAME=VALUE"),
        (["-np", "2", "--env", "MULTIRING_TIMEOUT=soon", "true"], "MULTIRING_TIMEOUT"),
        (["-np", "4", "--mode", "4x2q", "true"], "MULTIRING_MODE: mode '4x2q': 'q' is not a letter of an"),
        (["-np", "4", "--env", "MULTIRING_MODE=auto", "true"], "MULTIRING_MODE: mode 'auto': "),
        (["-np", "4", "--mode", "allreduce:2x2", "true"], "MULTIRING_MODE: 'allreduce:2x2' is for reduce_sc"),
        (["-np", "2", "--order", "Random", "true"], "--order"),
        (["-np", "2", "--nccl", "some", "true"], "--nccl: some is not one of off, host, hierarchical, all"),
    ],
)
def test_wrong_options_are_told(words: list[str], message: str) -> None:
    assert message in refused("run", *words)


def test_words_of_options_are_read_as_those_of_their_variables() -> None:
    found = parsed(options.add_arguments, "--order", "Any", "--host-links", "Ring", "--nccl", "ALL", "true")
    assert (found.order, found.host_links) == ("any", "ring")
    assert options._variables(found)["MULTIRING_NCCL"] == "all"


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """In place of ssh: greets as a login shell may, and stays on this host."""
    script = 'echo welcome\n[ "$1" = 127.0.0.3 ] && exit 255\nshift\nexec sh -c "$*"'
    return str(executable(tmp_path / "ssh", script))


def test_hosts_that_are_named_need_no_word_of_slurm(
    capfd: pytest.CaptureFixture[str], ssh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr("multiring.rendezvous.slurm.subprocess.run", _refuse)
    assert cli.main(["run", "-H", "127.0.0.2:1", "--ssh", ssh, "true"]) == 0
    capfd.readouterr()
    assert cli.main(["run", "-np", "2", "true"]) == 2
    assert "n[1-2], are not known: no scontrol; name them by -H" in capfd.readouterr().err


def test_ranks_of_each_host_see_its_devices(capfd: pytest.CaptureFixture[str], ssh: str) -> None:
    words = ["run", "-H", "127.0.0.2:2,localhost:1", "--ssh", ssh, "--devices", "5,6", "--"]
    assert cli.main([*words, "sh", "-c", "echo $MULTIRING_RANK sees $CUDA_VISIBLE_DEVICES"]) == 0
    shown = capfd.readouterr().out
    for line in ("0 sees 5", "1 sees 6", "2 sees 5"):
        assert line in shown
    # No host is connected to.
    assert cli.main(["run", "-H", "127.0.0.2:2", "--ssh", "false", "--devices", "5", "true"]) == 2
    assert "2 ranks on a host and 1 device (--devices 5)" in capfd.readouterr().err


def _refuse(*_: object, **__: object) -> None:
    raise OSError("no scontrol")


def test_a_python_or_ssh_that_is_not_there_is_told(capfd: pytest.CaptureFixture[str], ssh: str) -> None:
    words = ["run", "-H", "127.0.0.2:2", "--remote-python", "/nowhere/python", "--ssh"]
    assert cli.main([*words, ssh, "train.py"]) == 127
    told = capfd.readouterr().err
    assert "multiring: rank 0 (on 127.0.0.2) failed with exit code 127" in told
    assert "/nowhere/python" in told
    assert cli.main([*words, "/nowhere/ssh", "train.py"]) == 127
    told = capfd.readouterr().err
    assert "rank 0 cannot be started: No such file or directory: /nowhere/ssh" in told


def limited(limits: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`multiring run` with limits for descriptors, as `ulimit` takes them; ranks tell theirs."""
    run = [sys.executable, "-m", "multiring", "run", *words, "--", "sh", "-c", "ulimit -Sn"]
    return Job(["sh", "-c", f'ulimit {limits} && exec "$@"', "sh", *run]).run()


def test_there_are_descriptors_enough_for_many_ranks(ssh: str, tmp_path: Path) -> None:
    """Here and elsewhere; the ranks do not hear of it. What a login shell says does no harm."""
    words = ["-H", "127.0.0.2:10,localhost:10", "--ssh", ssh]
    done = limited("-Sn 40", *words, "--output-dir", str(tmp_path / "output"))
    assert done.returncode == 0, done.stderr
    told = ["[0] welcome", *(f"[{rank}] 40" for rank in range(20))]
    assert sorted(done.stdout.splitlines()) == sorted(told)


def test_too_low_a_hard_limit_is_told() -> None:
    done = limited("-n 40", "-np", "20")
    assert done.returncode == 2
    words = r"multiring: 20 ranks need \d+ descriptors in this process, and its hard limit is 40: raise it \("
    assert re.search(words, done.stderr)


def test_a_host_without_ssh_is_told_and_ends_the_others(capfd: pytest.CaptureFixture[str], ssh: str) -> None:
    words = ["run", "-H", "127.0.0.2:2,127.0.0.3:2", "--ssh", ssh, "sleep", "3600"]
    assert cli.main(words) == 255
    told = capfd.readouterr().err
    assert "multiring: rank 2 (on 127.0.0.3) failed with exit code 255" in told
    assert "does `ssh -o BatchMode=yes 127.0.0.3 true` work?" in told
    assert "ranks 0, 1: ended by the launcher (signal SIGTERM)" in told


def test_an_ssh_that_starts_nothing_is_a_failure() -> None:
    """A forced command, a login shell that exits: ssh ends well, and no rank has run."""
    words = ["run", "-H", "192.0.2.1:2", "--ssh", "sh -c true", "--address", "127.0.0.1", "--", "true"]
    done = run_multiring(*words, code=255)
    assert "perhaps ssh itself: does `ssh -o BatchMode=yes 192.0.2.1 true` work?" in done.stderr
