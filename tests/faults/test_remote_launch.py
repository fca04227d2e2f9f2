"""`multiring run -H` over emulated hosts, by a real sshd where there is one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from tests.support import REPOSITORY, Job, wait_until

PORT = "2222"
CHECK = """
import json, os, socket, sys
import multiring
from tests.python.collectives.test_several_hosts import check_all
comm = multiring.init()
check_all(comm)
place = [comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size]
print(json.dumps([socket.gethostname(), place, os.environ.get("TOLD"), os.getcwd(), sys.argv[1:]]))
"""
WAIT = """
import os, signal, sys, time
import multiring
comm = multiring.init()
def end(number, frame):
    print("saved", comm.rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, end)
comm.barrier()
directory = os.environ["TEST_DIRECTORY"]
open(f"{directory}/ready{comm.rank}", "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.fixture(params=["nsenter", "sshd"])
def ssh(
    request: pytest.FixtureRequest,
    hosts: EmulatedHosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """What runs a command on a host."""
    if request.param == "nsenter":
        yield shell_of(hosts)
        return
    unpacked = REPOSITORY / "build/openssh"  # by ci/fetch_sshd.sh
    sshd = shutil.which("sshd", path=f"/usr/sbin:{unpacked / 'usr/sbin'}")
    if sshd is None or shutil.which("ssh", path=search_path(unpacked)) is None:
        pytest.skip("openssh is not installed, and apt-get could not fetch it")
    monkeypatch.setenv("PATH", search_path(unpacked))
    libraries = [*unpacked.glob("usr/lib/*-linux-gnu"), *unpacked.glob("lib/*-linux-gnu")]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(map(str, libraries)))
    with ExitStack() as daemons:
        yield serve_ssh(hosts, sshd, tmp_path / "ssh", daemons)


def shell_of(hosts: EmulatedHosts) -> str:
    """What runs a command on a host as ssh does it, without encryption and users."""
    ids = ",".join(map(str, hosts.process_ids))
    return f"env EMULATED_HOSTS={ids} {sys.executable} -m multiring.benchmarks.emulation.start shell"


def search_path(unpacked: Path) -> str:
    return f"{os.environ['PATH']}:{unpacked / 'usr/bin'}"


def with_user_for_sshd(directory: Path) -> list[str]:
    """The command that runs what follows with a user for sshd's unprivileged part, as packages make it."""
    users = Path("/etc/passwd").read_text()
    if "\nsshd:" not in users:
        users += "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    (directory / "passwd").write_text(users)
    mount = f'mount --bind {directory / "passwd"} /etc/passwd && exec "$0" "$@"'
    return ["unshare", "--mount", "sh", "-c", mount]


def serve_ssh(hosts: EmulatedHosts, sshd: str, directory: Path, daemons: ExitStack) -> str:
    directory.mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
    shutil.copy(directory / "user.pub", directory / "authorized")
    options = {
        "Port": PORT,
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "authorized",
        "PermitRootLogin": "yes",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    Path("/run/sshd").mkdir(exist_ok=True)
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    for host in range(hosts.count):
        command = hosts.command(
            host, [*with_user_for_sshd(directory), sshd, "-D", "-e", "-f", "/dev/null", *words]
        )
        with open(directory / f"log{host}", "wb") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        daemons.callback(daemon.wait)
        daemons.callback(daemon.terminate)
        wait_until(lambda host=host: "Server listening" in (directory / f"log{host}").read_text(), "sshd")
    return (
        f"ssh -F none -p {PORT} -i {directory / 'user'} -o StrictHostKeyChecking=no -o BatchMode=yes "
        "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )


def launch(hosts: EmulatedHosts, ssh: str, *words: str) -> Job:
    """The launcher and two ranks on the first host, one rank on the second by ssh."""
    places = ",".join(f"{hosts.address(host)}:{2 - host}" for host in range(2))
    return launch_on(places, hosts, ssh, *words)


def launch_on(places: str, hosts: EmulatedHosts, ssh: str, *words: str) -> Job:
    run = [sys.executable, "-m", "multiring", "run", "-H", places, "--ssh", ssh, *words]
    index = run.index("--ssh")
    return Job(
        lambda root: hosts.command(0, [*run[:index], "--env", f"TEST_DIRECTORY={root / 'd'}", *run[index:]]),
        cwd=REPOSITORY,
    )


def script(text: str, tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def remote_pids(marker: str) -> list[int]:
    """Processes with `marker` in their command line, the launcher's and ssh's own excepted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words and b"run" not in words:
            found.append(int(path.parent.name))
    return found


def test_ranks_start_on_both_hosts_and_see_all(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    words = ("--env", "TOLD=a b'c", script(CHECK, tmp_path), "--flag", "x y", "$HOME")
    with launch(hosts, ssh, *words) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 0, done.stderr
    lines = dict(line.removeprefix("[").split("] ", 1) for line in done.stdout.splitlines())
    found = [json.loads(lines[str(rank)]) for rank in range(3)]
    assert [place for _, place, *_ in found] == [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 2], [2, 3, 0, 1, 1, 2]]
    assert [name for name, *_ in found] == [hosts.name(0), hosts.name(0), hosts.name(1)]
    assert all(rest == ["a b'c", str(REPOSITORY), ["--flag", "x y", "$HOME"]] for _, _, *rest in found)


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("sys.exit(3)", 3, "exit code 3"), ("os.kill(os.getpid(), 9)", 128 + 9, "signal SIGKILL")],
)
def test_a_rank_that_fails_elsewhere_is_blamed(
    hosts: EmulatedHosts, ssh: str, tmp_path: Path, how: str, code: int, told: str
) -> None:
    text = f"import os, sys\nimport multiring\nc = multiring.init()\nif c.rank == 2: {how}\nc.barrier()\n"
    with launch(hosts, ssh, script(text, tmp_path)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == code, done.stderr
    assert f"multiring: rank 2 (on {hosts.address(1)}) failed with {told}" in done.stderr


def test_ctrl_c_reaches_all_ranks(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    with launch(hosts, ssh, script(WAIT, tmp_path)) as job:
        for rank in range(3):
            job.wait_for_file(f"ready{rank}")
        job.process.send_signal(signal.SIGINT)
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 130, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] saved {rank}" for rank in range(3)]


def test_a_second_ctrl_c_kills_ranks_everywhere(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    path = script(WAIT.replace("sys.exit(0)", "open(f'{directory}/told{comm.rank}', 'w').close()"), tmp_path)
    with launch(hosts, ssh, path) as job:
        for rank in range(3):
            job.wait_for_file(f"ready{rank}")
        job.process.send_signal(signal.SIGINT)
        for rank in range(3):
            job.wait_for_file(f"told{rank}")
        job.process.send_signal(signal.SIGINT)
        done = job.finish(timeout=5)
        assert not remote_pids(path)
        job.assert_nothing_left()
    assert done.returncode == 130, done.stderr
    assert "all ranks have ended" in done.stderr


def test_ranks_end_with_a_launcher_that_is_killed(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    path = script(WAIT, tmp_path)
    with launch(hosts, ssh, path) as job:
        for rank in range(3):
            job.wait_for_file(f"ready{rank}")
        assert len(remote_pids(path)) == 3
        job.process.kill()
        job.finish()
        wait_until(lambda: not remote_pids(path), "the end of the ranks")


def test_what_a_rank_leaves_running_ends_with_it(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    """Also what holds the output, for whose end ssh would wait."""
    helper = "import subprocess\nsubprocess.Popen(['sleep', '3600.25'], start_new_session=True)\n"
    with launch(hosts, ssh, script(helper, tmp_path)) as job:
        done = job.finish(timeout=20)
        job.assert_nothing_left()
    assert done.returncode == 0, done.stderr
    assert not remote_pids("3600.25")


def test_there_is_one_ssh_for_all_ranks_of_a_host(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    """And all that they write comes, however much, and in pieces without an end of line."""
    text = """
    import os, sys
    rank = int(os.environ["MULTIRING_RANK"])
    for line in range(20_000):
        sys.stdout.write(f"{line} {str(rank) * 60}\\n")
    os.write(2, b"no end")
    print(os.getppid())
    """
    places = f"{hosts.address(0)}:1,{hosts.address(1)}:12"
    with launch_on(places, hosts, ssh, script(textwrap.dedent(text), tmp_path)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 0, done.stderr
    by_rank: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        rank, rest = line.split(" ", 1)
        by_rank.setdefault(rank, []).append(rest)
    assert by_rank.keys() == {f"[{rank}]" for rank in range(13)}
    for rank in range(13):
        assert by_rank[f"[{rank}]"][:-1] == [f"{line} {str(rank) * 60}" for line in range(20_000)]
    parents = [lines[-1] for lines in by_rank.values()]
    assert sorted(parents.count(parent) for parent in set(parents)) == [1, 12]
    *pieces, message = done.stderr.splitlines()
    assert sorted(pieces) == sorted(f"[{rank}] no end" for rank in range(13))
    assert message.startswith("multiring: none of the 13 ranks called multiring.init()")


def test_more_arguments_than_fit_are_told(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    with launch(hosts, ssh, script("", tmp_path), *(["x" * 100_000] * 6)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 2
    assert "too many for ranks on other hosts: put them into a file" in done.stderr


def test_a_missing_program_and_a_typo_are_told(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    with launch_on(hosts.address(1), hosts, ssh, str(tmp_path / "trian.py")) as job:
        done = job.finish()
    assert done.returncode == 127
    assert f"multiring: on {hosts.name(1)}: there is no script {tmp_path / 'trian.py'} in " in done.stderr
    with launch(hosts, ssh, script("import multiring\nmultiring.init().allreduse(1)\n", tmp_path)) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 1
    assert "has no attribute 'allreduse'" in done.stderr


def test_a_host_that_ssh_cannot_reach_is_told(hosts: EmulatedHosts, ssh: str, tmp_path: Path) -> None:
    if not ssh.startswith("ssh"):
        pytest.skip("about ssh itself")
    places = f"{hosts.address(0)}:1,10.93.0.77:1"
    run = [sys.executable, "-m", "multiring", "run", "-H", places, "--ssh", f"{ssh} -o ConnectTimeout=2"]
    began = time.monotonic()
    with Job(lambda root: hosts.command(0, [*run, script(WAIT, tmp_path)])) as job:
        done = job.finish()
        job.assert_nothing_left()
    assert done.returncode == 255
    assert "multiring: rank 1 (on 10.93.0.77) failed with exit code 255" in done.stderr
    assert "ssh: connect to host 10.93.0.77" in done.stderr
    assert time.monotonic() - began < 30


def test_a_host_knows_itself_where_any_address_can_be_bound(hosts: EmulatedHosts) -> None:
    """As hosts of a service that moves from one to the other are set up."""

    def on_first(script: str) -> subprocess.CompletedProcess[str]:
        command = hosts.command(0, ["sh", "-c", script])
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    changed = on_first(
        "echo 1 >/proc/sys/net/ipv4/ip_nonlocal_bind && ip addr add 10.93.0.9/24 dev eth0 && "
        "ip -6 addr add fd00::9/64 dev eth0"
    )
    if changed.returncode != 0:
        pytest.skip(f"/proc/sys or IPv6 cannot be set here: {changed.stderr}")
    asked = ["127.0.0.1", hosts.address(0), "10.93.0.9", "fd00::9", hosts.address(1), "fd00::8", "127.0.0.9"]
    code = f"from multiring.commands.launcher.hosts import is_here; print(*map(is_here, {asked}))"
    told = on_first(f'exec "{sys.executable}" -c "{code}"')
    assert told.stdout.split() == ["True"] * 4 + ["False"] * 3, told.stderr
