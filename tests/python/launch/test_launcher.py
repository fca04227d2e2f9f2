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

from multiring.commands.launcher.binding import THREAD_VARIABLES
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


@pytest.mark.parametrize("n", [1, 3])
def test_each_rank_gets_the_documented_environment(n: int) -> None:
    found = plain(n)
    assert len(found) == n
    for rank, one in enumerate(found):
        environ = one["environ"]
        for name, value in {
            "RANK": rank,
            "SIZE": n,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": n,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
        }.items():
            assert environ[f"MULTIRING_{name}"] == str(value)
        torchrun = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "NODE_RANK": 0}
        assert {name: environ[name] for name in torchrun} == {k: str(v) for k, v in torchrun.items()}
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["MULTIRING_STORE"].startswith("file:///")
        assert len(bytes.fromhex(environ["MULTIRING_SECRET"])) == 32
        assert one["session"]
        assert one["unbuffered"]
        assert one["executable"] == sys.executable
    for name in ("STORE", "SECRET", "JOB_ID"):
        assert len({one["environ"][f"MULTIRING_{name}"] for one in found}) == 1
    assert len({one["environ"]["MASTER_PORT"] for one in found}) == 1


def test_two_jobs_share_nothing() -> None:
    first, second = shown(1), plain(1)
    for name in ("STORE", "SECRET", "JOB_ID"):
        key = f"MULTIRING_{name}"
        assert first[0]["environ"][key] != second[0]["environ"][key]


def test_ranks_are_bound_to_equal_shares_and_their_threads_to_them() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    n = min(2, len(cpus))
    found = shown(n)
    shares = [one["cpus"] for one in found]
    assert {len(share) for share in shares} == {len(cpus) // n}
    assert len({cpu for share in shares for cpu in share}) == len(cpus) // n * n
    for one in found:
        assert one["environ"]["OMP_NUM_THREADS"] == str(max(1, len(cpus) // n))


def test_ranks_are_not_bound_when_asked_or_when_they_outnumber_processors() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert [one["cpus"] for one in shown(1, launcher_args=["--bind", "none"])] == [cpus]
    many = plain(len(cpus) + 1)
    assert all(one["cpus"] == cpus for one in many)
    assert many[0]["environ"]["OMP_NUM_THREADS"] == "1"
    failed = run_job(len(cpus) + 1, SHOW_ENVIRONMENT, launcher_args=["--bind", "core"], code=2)
    assert "--bind none" in failed.stderr


def test_variables_of_the_user_stay_and_can_be_set() -> None:
    env = dict.fromkeys(THREAD_VARIABLES, "3") | {"MULTIRING_RANK": "77", "MULTIRING_TIMEOUT": "12"}
    (one,) = shown(1, env=env, launcher_args=["--env", "A=b=c", "--env", "PYTHONUNBUFFERED="])
    environ = one["environ"]
    assert [environ[name] for name in THREAD_VARIABLES] == ["3"] * len(THREAD_VARIABLES)
    assert environ["A"] == "b=c"
    assert environ["PYTHONUNBUFFERED"] == ""
    assert environ["MULTIRING_RANK"] == "0"
    assert environ["MULTIRING_TIMEOUT"] == "12"


def test_the_user_chooses_where_torch_meets_by_option_only() -> None:
    chosen = ["--env", "MASTER_ADDR=10.0.0.9", "--env", "MASTER_PORT=29501"]
    (one,) = shown(1, launcher_args=chosen)
    assert (one["environ"]["MASTER_ADDR"], one["environ"]["MASTER_PORT"]) == ("10.0.0.9", "29501")
    # An inherited one is another job's, such as that of a notebook.
    (one,) = shown(1, env={"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29501"})
    assert one["environ"]["MASTER_ADDR"] == "127.0.0.1"
    assert one["environ"]["MASTER_PORT"] != "29501"


def test_options_say_what_variables_say() -> None:
    env = {"MULTIRING_MODE": "2x1", "MULTIRING_INTERFACES": "eth9"}
    for one in shown(2, env=env, launcher_args=["--mode", "2", "--interfaces", "eth0,^docker0"]):
        assert one["environ"]["MULTIRING_MODE"] == "2"
        assert one["environ"]["MULTIRING_INTERFACES"] == "eth0,^docker0"
    (one,) = shown(1, env=env)
    assert one["environ"]["MULTIRING_INTERFACES"] == "eth9"


def test_options_after_the_program_belong_to_the_program() -> None:
    arguments = ["--timeout", "x", "-np", "9", "--", "-m", "--help", "", "a b", "☃"]
    assert [one["argv"] for one in shown(2, *arguments)] == [arguments] * 2


def launch(*arguments: str, **popen: Any) -> Job:
    return Job(lambda root: [sys.executable, "-m", "multiring", "run", *arguments], **popen)


def test_a_module_is_run(tmp_path: Path) -> None:
    (tmp_path / "some_module.py").write_text("import sys; print(sys.argv[1:], __name__)")
    result = launch("-np", "2", "-m", "some_module", "-m", "x", cwd=tmp_path).run()
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] ['-m', 'x'] __main__" for rank in range(2)]


def test_any_program_is_run_also_after_two_dashes() -> None:
    for dashes in ([], ["--"]):
        with launch("-n", "2", *dashes, "sh", "-c", "echo $0 $MULTIRING_RANK", "x") as job:
            assert sorted(job.finish().stdout.splitlines()) == ["[0] x 0", "[1] x 1"]


def test_the_example_of_the_readme_works(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    python = str(Path(sys.executable).parent)
    path = {"PATH": f"{python}:{os.environ['PATH']}"}
    with launch("-np", "2", "python", "train.py", cwd=tmp_path, env=path) as job:
        assert sorted(job.finish().stdout.splitlines()) == ["[0] trained", "[1] trained"]


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
        (False, ["sh", "-c", 'exec python "$0"']),
        (False, ["env", "A=1", "python"]),
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


def test_output_streams_stay_apart() -> None:
    script = "import sys, multiring\nmultiring.init()\nprint('out')\nprint('err', file=sys.stderr)\n"
    result = run_job(2, script)
    assert sorted(result.stdout.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(result.stderr.splitlines()) == ["[0] err", "[1] err"]


def test_one_rank_alone_is_not_tagged_unless_asked() -> None:
    assert run_job(1, "print('x')\n").stdout == "x\n"
    assert run_job(1, "print('x')\n", launcher_args=["--tag-output"]).stdout == "[0] x\n"
    assert run_job(2, "print('x')\n", launcher_args=["--no-tag-output"]).stdout == "x\nx\n"


def test_output_is_written_to_files_as_well(tmp_path: Path) -> None:
    script = "import os, sys\nprint('out', os.environ['MULTIRING_RANK'])\nprint('err', file=sys.stderr)\n"
    for n in (1, 2):
        directory = tmp_path / f"deep/{n}"
        result = run_job(n, script, launcher_args=["--output-dir", str(directory)])
        assert len(result.stdout.splitlines()) == n
        for rank in range(n):
            assert (directory / f"rank.{rank}.stdout").read_text() == f"out {rank}\n"
            assert (directory / f"rank.{rank}.stderr").read_text() == "err\n"


@pytest.mark.parametrize("n", [1, 2])
def test_stdin_goes_to_rank_0_only(n: int) -> None:
    script = "import os, sys\nprint(os.environ['MULTIRING_RANK'], repr(sys.stdin.read()))\n"
    with start_job(n, script, stdin=-1, launcher_args=["--no-tag-output"]) as job:
        stdout, _ = job.process.communicate("typed\n", timeout=60)
    assert sorted(stdout.splitlines()) == ["0 'typed\\n'", "1 ''"][:n]


@pytest.mark.parametrize("n", [1, 2])
def test_output_does_not_wait_for_the_end_of_the_job(n: int) -> None:
    script = """
import os, sys
if os.environ["MULTIRING_RANK"] == "0":
    print("question")
    sys.exit(sys.stdin.readline() != "answer\\n")
"""
    with start_job(n, script, stdin=-1) as job:
        assert "question" in job.process.stdout.readline()
        job.process.stdin.write("answer\n")
        job.process.stdin.close()
        assert job.process.wait(60) == 0


def test_a_rank_that_ends_early_with_0_is_fine() -> None:
    script = """
import multiring, os, pathlib, time
multiring.init()
mark = pathlib.Path(os.environ["TEST_DIRECTORY"]) / "first-has-ended"
if os.environ["MULTIRING_RANK"] == "0":
    mark.touch()
else:
    while not mark.exists():
        time.sleep(0.01)
    print("later")
"""
    result = run_job(2, script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[1] later\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-np", "2", "--frobnicate", "true"], 2, "--frobnicate"),
        (["-np", "2", "no-such-program"], 127, "no-such-program"),
        (["-np", "2", "./no-such-script.py"], 127, "no-such-script.py"),
        (["-np", "2", "python", "no-such-script.py"], 127, "there is no script no-such-script.py in"),
        (["-np", "2", "/usr/bin/python3", "no-such-script.py"], 127, "there is no script"),
        (["-np", "2", "./plain-file"], 126, "chmod +x"),
        (["-np", "2", "./no-interpreter"], 127, "cannot be started"),
        (["-np", "2", "./no-format"], 126, "cannot be started"),
        (["-np", "2", "--output-dir", "plain-file/x", "true"], 2, "--output-dir"),
    ],
)
def test_what_cannot_be_started_is_told(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    (tmp_path / "plain-file").write_text("text")
    (tmp_path / "no-interpreter").write_text("#!/no/such/interpreter\n")
    (tmp_path / "no-format").write_bytes(b"\x7fELF nonsense")
    for name in ("no-interpreter", "no-format"):
        (tmp_path / name).chmod(0o755)
    result = launch(*arguments, cwd=tmp_path).run()
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_variable_that_is_not_known_is_told_and_ends_nothing() -> None:
    result = run_job(1, "print('x')\n", env={"MULTIRING_TIMOUT": "1"})
    assert (result.returncode, result.stdout) == (0, "x\n")
    assert "is MULTIRING_TIMEOUT meant?" in result.stderr


def test_help_shows_examples_and_exit_codes() -> None:
    with launch("--help") as job:
        result = job.finish()
    assert result.returncode == 0
    for words in ("multiring run -np 4 train.py", "124", "--bind", "--output-dir"):
        assert words in result.stdout


def test_closed_standard_descriptors_do_no_harm() -> None:
    command = f'exec "{sys.executable}" -m multiring run -np 2 sh -c "echo x; echo y >&2" <&- >&- 2>&-'
    with Job(lambda root: ["sh", "-c", command], cwd=REPOSITORY) as job:
        assert job.finish().returncode == 0
        job.assert_nothing_left()


def test_a_job_that_no_rank_has_joined_is_told_at_its_end() -> None:
    told = "none of the 2 ranks called multiring.init() or made a process group of multiring: unless"
    alone = run_job(2, "print('trained')\n", code=0)
    assert told in alone.stderr
    left = run_job(2, "import multiring\nmultiring.init()\nmultiring.shutdown()\n")
    assert (left.returncode, left.stderr) == (0, "")
    assert run_job(1, "print('a single process')\n").stderr == ""
    failed = run_job(2, "import sys\nsys.exit(3)\n", code=3)
    assert told not in failed.stderr


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
