"""`multiring run`: what ranks get, what comes out, and exit codes when all goes well or the start fails."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import REPOSITORY, Job, executable, run_job, start_job

# Scripts here use the standard library only: what is tested is the launcher.
SHOW_ENVIRONMENT = """
import json, os, sys
print(json.dumps({
    "environ": dict(os.environ), "argv": sys.argv[1:], "cpus": sorted(os.sched_getaffinity(0)),
    "executable": sys.executable, "unbuffered": sys.stdout.write_through, "session": os.getsid(0) ==
    os.getpid(),
}))
"""


def shown(n: int, *args: object, **options: Any) -> list[dict[str, Any]]:
    """What each rank has shown."""
    result = run_job(n, SHOW_ENVIRONMENT, *args, **options, code=0)
    found = [json.loads(line[line.index("{") :]) for line in result.stdout.splitlines()]
    return sorted(found, key=lambda one: int(one["environ"]["MULTIRING_RANK"]))


# What each rank has shown of a job without options, which tests share.
plain = functools.cache(shown)


def test_each_rank_gets_the_documented_environment() -> None:
    found = plain(3)
    assert len(found) == 3
    for rank, one in enumerate(found):
        environ = one["environ"]
        expected = {
            "MULTIRING_RANK": rank,
            "MULTIRING_LOCAL_RANK": rank,
            "MULTIRING_CROSS_RANK": 0,
            "MULTIRING_SIZE": 3,
            "MULTIRING_LOCAL_SIZE": 3,
            "MULTIRING_CROSS_SIZE": 1,
            "RANK": rank,
            "WORLD_SIZE": 3,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": 3,
            "NODE_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
        }
        assert {name: environ[name] for name in expected} == {k: str(v) for k, v in expected.items()}
        assert environ["MULTIRING_STORE"].startswith("file:///")
        assert len(bytes.fromhex(environ["MULTIRING_SECRET"])) == 32
        assert one["session"]
        assert one["unbuffered"]
        assert one["executable"] == sys.executable
    (other,) = plain(1)
    for name in ("MULTIRING_STORE", "MULTIRING_SECRET", "MULTIRING_JOB_ID"):
        (shared,) = {one["environ"][name] for one in found}
        assert shared != other["environ"][name], "two jobs share nothing"
    assert len({one["environ"]["MASTER_PORT"] for one in found}) == 1


def test_ranks_are_bound_to_equal_shares_unless_they_outnumber_processors() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    n = min(2, len(cpus))
    found = plain(n)
    shares = [one["cpus"] for one in found]
    assert {len(share) for share in shares} == {len(cpus) // n}
    assert len({cpu for share in shares for cpu in share}) == len(cpus) // n * n
    for one in found:
        assert one["environ"]["OMP_NUM_THREADS"] == str(max(1, len(cpus) // n))
    many = plain(len(cpus) + 1)
    assert all(one["cpus"] == cpus for one in many)
    assert many[0]["environ"]["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_stays_and_options_come_first() -> None:
    env = {"MULTIRING_RANK": "77", "MULTIRING_TIMEOUT": "12", "MULTIRING_MODE": "2x1"}
    env |= {"MULTIRING_INTERFACES": "eth9", "OMP_NUM_THREADS": "3"}
    # Where Torch meets is what another job has told, such as that of a notebook.
    env |= {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29501"}
    words = ["--mode", "2", "--interfaces", "eth0,^docker0", "--bind", "none", "--env", "A=b=c"]
    words += ["--env", "PYTHONUNBUFFERED=", "--env", "MASTER_PORT=29502"]
    arguments = ["--timeout", "x", "-np", "9", "--", "-m", "--help", "", "a b", "☃"]
    (one,) = shown(1, *arguments, env=env, launcher_args=words)
    expected = {
        "MULTIRING_RANK": "0",
        "MULTIRING_TIMEOUT": "12",
        "MULTIRING_MODE": "2",
        "A": "b=c",
        "MULTIRING_INTERFACES": "eth0,^docker0",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29502",
    }
    assert {name: one["environ"][name] for name in expected} == expected
    assert one["cpus"] == sorted(os.sched_getaffinity(0))
    assert one["argv"] == arguments, "options after the program belong to it"


def launch(*arguments: str, **popen: Any) -> Job:
    return Job(lambda root: [sys.executable, "-m", "multiring", "run", *arguments], **popen)


def a_python(directory: Path, *, with_multiring: bool) -> Path:
    """Another `python`, which finds multiring or does not."""
    directory.mkdir()
    isolated = "" if with_multiring else "-S"  # without site-packages
    return executable(directory / "python", f'ANOTHER_PYTHON=1 exec "{sys.executable}" {isolated} "$@"')


@pytest.mark.parametrize(
    ("with_multiring", "program"),
    [
        (True, ["python"]),
        (False, ["python"]),
        (False, ["--", "sh", "-c", 'exec python "$0"']),
    ],
)
def test_python_is_one_that_has_multiring(tmp_path: Path, with_multiring: bool, program: list[str]) -> None:
    (tmp_path / "multiring").mkdir()  # as a clone of the repository is called
    script = "import multiring, os\nmultiring.init()\nprint('another', os.environ.get('ANOTHER_PYTHON'))\n"
    (tmp_path / "train.py").write_text(script)
    other = a_python(tmp_path / "bin", with_multiring=with_multiring)
    path = {"PATH": f"{other.parent}:/usr/bin:/bin"}
    with launch("-np", "2", *program, "train.py", cwd=tmp_path, env=path) as job:
        result = job.finish()
    taken = "1" if with_multiring else "None"
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] another {taken}" for rank in range(2)]
    told = f"python is {other}, which has no multiring: the ranks run {sys.executable}"
    assert (told in result.stderr) == (program == ["python"] and not with_multiring)


def test_a_module_is_run_and_its_streams_stay_apart(tmp_path: Path) -> None:
    """With a variable that is not known, of which is told."""
    text = "import sys; print(sys.argv[1:], __name__); print('err', file=sys.stderr)"
    (tmp_path / "some_module.py").write_text(text)
    words = ["-np", "2", "--output-dir", "deep/down", "-m", "some_module", "-m", "x"]
    result = launch(*words, cwd=tmp_path, env={"MULTIRING_TIMOUT": "1"}).run(code=0)
    shown = "['-m', 'x'] __main__"
    assert sorted(result.stdout.splitlines()) == [f"[0] {shown}", f"[1] {shown}"]
    assert {"[0] err", "[1] err"} < set(result.stderr.splitlines())
    assert "is MULTIRING_TIMEOUT meant?" in result.stderr
    for rank in range(2):
        assert (tmp_path / f"deep/down/rank.{rank}.stdout").read_text() == f"{shown}\n"
        assert (tmp_path / f"deep/down/rank.{rank}.stderr").read_text() == "err\n"


@pytest.mark.parametrize(("n", "option"), [(1, "--tag-output"), (2, "--no-tag-output")])
def test_stdin_goes_to_rank_0_and_output_does_not_wait_for_the_end(n: int, option: str) -> None:
    script = """
import os, sys
rank = os.environ["MULTIRING_RANK"]
print(rank, "question" if rank == "0" else repr(sys.stdin.read()))
sys.exit(rank == "0" and sys.stdin.readline() != "answer\\n")
"""
    tag = "[0] " if option == "--tag-output" else ""
    with start_job(n, script, stdin=-1, launcher_args=[option]) as job:
        lines = sorted(job.process.stdout.readline() for _ in range(n))
        assert lines == [f"{tag}0 question\n", "1 ''\n"][:n]
        job.process.stdin.write("answer\n")
        job.process.stdin.close()
        assert job.process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-np", "2", "--frobnicate", "true"], 2, "--frobnicate"),
        (["-np", "2", "no-such-program"], 127, "no-such-program"),
        (["-np", "2", "python", "no-such-script.py"], 127, "there is no script no-such-script.py in"),
        (["-np", "2", "./plain-file"], 126, "chmod +x"),
        (["-np", "2", "./no-format"], 126, "cannot be started"),
        (["-np", "2", "--output-dir", "plain-file/x", "true"], 2, "--output-dir"),
    ],
)
def test_what_cannot_be_started_is_told(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    (tmp_path / "plain-file").write_text("text")
    (tmp_path / "no-format").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "no-format").chmod(0o755)
    result = launch(*arguments, cwd=tmp_path).run()
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_closed_standard_descriptors_do_no_harm() -> None:
    command = f'exec "{sys.executable}" -m multiring run -np 2 sh -c "echo x; echo y >&2" <&- >&- 2>&-'
    with Job(lambda root: ["sh", "-c", command], cwd=REPOSITORY) as job:
        assert job.finish().returncode == 0
        job.assert_nothing_left()


def test_a_job_that_no_rank_has_joined_is_told_at_its_end() -> None:
    told = "none of the 2 ranks called multiring.init() or made a process group of multiring: unless"
    script = "import multiring, sys\nif sys.argv[1:]:\n    multiring.init()\n    multiring.shutdown()\n"
    assert told in run_job(2, script, code=0).stderr
    assert run_job(2, script, "join", code=0).stderr == ""
    assert run_job(1, script, code=0).stderr == ""


@pytest.mark.parametrize(("end", "reported"), [("sys.exit(3)", False), ("os.kill(os.getpid(), 9)", True)])
def test_a_program_that_has_told_why_it_fails_is_not_reported(end: str, reported: bool) -> None:
    script = f"""
import os, sys
from multiring import config
from multiring.rendezvous import joined
if os.environ["MULTIRING_RANK"] == "1":
    joined.tell_launcher(config.load(), joined.TOLD_KEY)
    {end}
"""
    result = run_job(2, script, code=137 if reported else 3)
    assert ("failed with" in result.stderr) == reported


WITHOUT_PROC = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take /proc away from a job")
def test_a_machine_without_proc_runs_jobs(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import sys, numpy, multiring\n"
        "comm = multiring.init()\n"
        "assert comm.allreduce(numpy.ones(3)).tolist() == [2.0] * 3\n"
        "sys.exit(3 * comm.rank)\n"
    )
    command = [*WITHOUT_PROC, sys.executable, "-m", "multiring", "run", "-np", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    assert "rank 1 " in result.stderr
