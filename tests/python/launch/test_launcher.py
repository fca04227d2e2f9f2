"""`multiring run`: what ranks get, what comes out, and exit codes when all goes well or the start fails."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from multiring.commands.launcher import binding, foreign_variables, rank_starter
from multiring.commands.launcher.devices import device_environments
from multiring.errors import UsageError
from tests.support import REPOSITORY, Job, executable, run_job, run_multiring, start_job

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
        for name in ("MULTIRING_RANK", "MULTIRING_LOCAL_RANK", "RANK", "LOCAL_RANK"):
            assert environ[name] == str(rank)
        for name in ("MULTIRING_SIZE", "MULTIRING_LOCAL_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            assert environ[name] == "3"
        expected = {"MULTIRING_CROSS_RANK": "0", "MULTIRING_CROSS_SIZE": "1", "NODE_RANK": "0"}
        assert expected.items() <= environ.items()
        assert environ["MASTER_ADDR"] == "127.0.0.1"
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
    kept = {"MULTIRING_TIMEOUT": "12", "OMP_NUM_THREADS": "3"}
    env = kept | {"MULTIRING_RANK": "77", "MULTIRING_MODE": "2x1", "MULTIRING_INTERFACES": "eth9"}
    # Where Torch meets is what another job has told, such as that of a notebook.
    env |= {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29501"}
    words = ["--mode", "2", "--interfaces", "eth0,^docker0", "--bind", "none", "--env", "A=b=c"]
    words += ["--env", "PYTHONUNBUFFERED=", "--env", "MASTER_PORT=29502"]
    arguments = ["--timeout", "x", "-np", "9", "--", "-m", "--help", "", "a b", "☃"]
    (one,) = shown(1, *arguments, env=env, launcher_args=words)
    expected = kept | {"MULTIRING_RANK": "0", "MULTIRING_MODE": "2", "A": "b=c", "PYTHONUNBUFFERED": ""}
    expected |= {"MULTIRING_INTERFACES": "eth0,^docker0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29502"}
    assert expected.items() <= one["environ"].items()
    assert one["cpus"] == sorted(os.sched_getaffinity(0))
    assert one["argv"] == arguments, "options after the program belong to it"


@pytest.mark.parametrize(
    ("with_multiring", "program"),
    [(True, ["python"]), (False, ["python"]), (False, ["--", "sh", "-c", 'exec python "$0"'])],
)
def test_python_is_one_that_has_multiring(tmp_path: Path, with_multiring: bool, program: list[str]) -> None:
    (tmp_path / "multiring").mkdir()  # as a clone of the repository is called
    script = "import multiring, os\nmultiring.init()\nprint('another', os.environ.get('ANOTHER_PYTHON'))\n"
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "bin").mkdir()
    options = "" if with_multiring else "-S"  # without site-packages
    run = f'ANOTHER_PYTHON=1 exec "{sys.executable}" {options} "$@"'
    other = executable(tmp_path / "bin/python", run)
    path = {"PATH": f"{other.parent}:/usr/bin:/bin"}
    result = run_multiring("run", "-np", "2", *program, "train.py", cwd=tmp_path, env=path, code=0)
    taken = "1" if with_multiring else "None"
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] another {taken}" for rank in range(2)]
    told = f"python is {other}, which has no multiring: the ranks run {sys.executable}"
    assert (told in result.stderr) == (program == ["python"] and not with_multiring)


def test_a_module_is_run_and_its_streams_stay_apart(tmp_path: Path) -> None:
    """With a variable that is not known, of which is told."""
    text = "import sys; print(sys.argv[1:], __name__); print('err', file=sys.stderr)"
    (tmp_path / "some_module.py").write_text(text)
    words = ["run", "-np", "2", "--output-dir", "deep/down", "-m", "some_module", "-m", "x"]
    result = run_multiring(*words, cwd=tmp_path, env={"MULTIRING_TIMOUT": "1"}, code=0)
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
    result = run_multiring("run", *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_closed_standard_descriptors_do_no_harm() -> None:
    command = f'exec "{sys.executable}" -m multiring run -np 2 sh -c "echo x; echo y >&2" <&- >&- 2>&-'
    Job(["sh", "-c", command], cwd=REPOSITORY).run(code=0)


def test_a_job_that_no_rank_has_joined_is_told_at_its_end() -> None:
    told = "none of the 2 ranks called multiring.init() or made a process group of multiring: unless"
    script = "import multiring, sys\nif sys.argv[1:]:\n    multiring.init()\n    multiring.shutdown()\n"
    assert told in run_job(2, script, code=0).stderr
    quiet = {"MULTIRING_QUIET": "1"}
    assert run_job(2, script, "join", env=quiet, code=0).stderr == ""
    assert run_job(1, script, code=0).stderr == ""
    where = "os.environ['MULTIRING_STORE'].removeprefix('file://')"
    cleaned = f"import multiring, os, shutil\nmultiring.init().barrier()\nshutil.rmtree({where}, True)\n"
    assert run_job(2, cleaned, env=quiet, code=0).stderr == ""


@pytest.mark.parametrize(("end", "reported"), [("sys.exit(3)", False), ("os.kill(os.getpid(), 9)", True)])
def test_a_program_that_has_told_why_it_fails_is_not_reported(end: str, reported: bool) -> None:
    script = f"""
import os, sys
from multiring import config
from multiring.rendezvous import joined
if os.environ["MULTIRING_RANK"] == "1":
    joined.tell_launcher(config.load(), joined.EXPLAINED_KEY)
    {end}
"""
    result = run_job(2, script, code=137 if reported else 3)
    assert ("failed with" in result.stderr) == reported


# --- parts of the launcher: shares of processors, thread counts, blame


def test_torchs_rank_0_is_told_where_to_serve_its_store() -> None:
    for host, address in (("", "10.0.0.9"), ("ann@node3", "node3"), ("fd00::1", "fd00::1")):
        found = foreign_variables.torch_meeting(host, "10.0.0.9")
        assert found["MASTER_ADDR"] == address
        assert 16384 <= int(found["MASTER_PORT"]) < 32768


def test_a_port_that_is_taken_is_not_given_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        candidates = [taken.getsockname()[1], *range(20000, 20100)]
        monkeypatch.setattr(foreign_variables.random, "sample", lambda *_: candidates)
        assert int(foreign_variables.torch_meeting("", "127.0.0.1")["MASTER_PORT"]) in candidates[1:]


def test_this_python_has_multiring() -> None:
    """Nobody is asked."""
    assert rank_starter._has_multiring(sys.executable, {"PATH": "/nowhere"})


def test_shares_are_equal_contiguous_and_apart() -> None:
    cpus = [8, 9, 1, 2, 30, 31, 32]
    assert binding.shares(cpus, 1, None) == [set(cpus)]
    assert binding.shares(cpus, 3, None) == [{8, 9}, {1, 2}, {30, 31}]
    assert binding.shares([0, 1], 1, "none") is None
    assert binding.shares([0, 1], 3, None) is None, "they outnumber processors"
    with pytest.raises(UsageError, match="--bind none"):
        binding.shares([0, 1], 3, "core")


def given(root: Path, devices: str | None, ranks: int, **environ: str) -> list[dict[str, str]]:
    return device_environments(devices, ranks, environ, root)


def both(*names: str) -> list[dict[str, str]]:
    return [{"CUDA_VISIBLE_DEVICES": name, "HIP_VISIBLE_DEVICES": name} for name in names]


def make_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_each_rank_sees_the_device_that_is_named_for_it(tmp_path: Path) -> None:
    assert given(tmp_path, None, 2) == [{}, {}]
    make_files(
        tmp_path, "dev/kfd"
    )  # the maker is not known: NVIDIA's files come when the driver is first used
    assert given(tmp_path, "0,2", 2) == both("0", "2")
    assert given(tmp_path, "GPU-1, MIG-GPU-8f/1/0", 2) == both("GPU-1", "MIG-GPU-8f/1/0")
    assert given(tmp_path, "4, 4", 2, CUDA_VISIBLE_DEVICES="4,5") == both("4", "4")


@pytest.mark.parametrize("name", ["0-3", "cuda:1", "AUTO", "all", "-1", "", "NoDevFiles", "\u0663"])
def test_names_of_no_device_are_refused(tmp_path: Path, name: str) -> None:
    for devices in (name, f"0,{name}"):
        with pytest.raises(UsageError, match=f"{re.escape(repr(name))} is no device; give auto, or"):
            given(tmp_path, devices, 1)


def test_devices_that_the_user_has_hidden_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 is not in CUDA_VISIBLE_DEVICES=5"):
        given(tmp_path, "5,0", 2, CUDA_VISIBLE_DEVICES="5")
    with pytest.raises(UsageError, match="1 is not in HIP_VISIBLE_DEVICES=0,-1,1"):
        given(tmp_path, "1", 1, HIP_VISIBLE_DEVICES="0,-1,1")
    assert given(tmp_path, "0", 1, ROCR_VISIBLE_DEVICES="5") == both("0")  # as Slurm sets it everywhere
    make_files(tmp_path, "dev/kfd")
    with pytest.raises(UsageError, match="ROCR_VISIBLE_DEVICES, by which HIP numbers devices anew"):
        given(tmp_path, "0", 1, ROCR_VISIBLE_DEVICES="5")


def test_devices_of_nvidia_are_found(tmp_path: Path) -> None:
    def found(ranks: int, **environ: str) -> list[str]:
        return [one["CUDA_VISIBLE_DEVICES"] for one in given(tmp_path, "auto", ranks, **environ)]

    assert found(1, CUDA_VISIBLE_DEVICES="5,7") == ["5"]
    make_files(tmp_path, "dev/kfd", "dev/dri/renderD128")
    with pytest.raises(UsageError, match="auto knows NVIDIA's GPUs only: name those of AMD"):
        found(1, CUDA_VISIBLE_DEVICES="5")
    make_files(tmp_path, *(f"proc/driver/nvidia/gpus/000{number}/information" for number in range(3)))
    assert found(3) == ["0", "1", "2"]
    make_files(tmp_path, *(f"dev/{name}" for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm")))
    assert found(2) == ["0", "1"]
    with pytest.raises(UsageError, match=r"2 ranks .* 1 device \(CUDA_VISIBLE_DEVICES=5,-1,1\): start"):
        found(2, CUDA_VISIBLE_DEVICES="5,-1,1")


def test_only_devices_that_are_there_are_advised(tmp_path: Path) -> None:
    for devices, environ, advised in (
        ("auto", {"CUDA_VISIBLE_DEVICES": "5"}, "5,5,5"),
        ("4,6", {}, "4,4,6"),
        ("0", {}, "0,0,0"),
    ):
        with pytest.raises(
            UsageError, match=f"3 ranks on a host and . devices? .*, as in --devices {advised}$"
        ):
            given(tmp_path, devices, 3, **environ)
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}):
        with pytest.raises(UsageError, match=r"1 rank on a host and 0 devices .*: name devices$"):
            given(tmp_path, "auto", 1, **environ)


def test_devices_reach_the_ranks() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    found = shown(2, launcher_args=["--devices", "4,6"], env=env)
    assert [one["environ"]["CUDA_VISIBLE_DEVICES"] for one in found] == ["4", "6"]
    told = run_multiring("run", "-np", "3", "--devices", "4,6", "true", code=2).stderr
    assert "3 ranks on a host and 2 devices (--devices 4,6)" in told


def test_thread_counts_share_the_cores_unless_the_user_has_set_them() -> None:
    assert binding.thread_environment(8, 3, {}) == dict.fromkeys(binding.THREAD_VARIABLES, "2")
    assert binding.thread_environment(8, 2, {"OMP_NUM_THREADS": "3"}) == {}
    assert "MKL_NUM_THREADS" not in binding.thread_environment(8, 2, {"MKL_NUM_THREADS": "3"})
