"""`multiring env` and `multiring doctor`."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from multiring import config, machine
from multiring.commands import env as environment
from multiring.commands.doctor import checks, doctor
from multiring.commands.doctor.checks import Finding, Status
from tests.support import executable, run_multiring, run_python


def test_env_as_json_holds_everything() -> None:
    result = run_multiring("env", "--json", env={"MULTIRING_TIMEOUT": "17", "MULTIRING_TIMOUT": "1"})
    found = json.loads(result.stdout)
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["native library"].endswith(".so")
    assert found["machine"]["processors allowed"] == machine.allowed_cpus()
    assert found["launcher"]["name"] == "none"
    settings = {row["name"]: row for row in found["settings"]}
    assert list(settings) == [variable.name for variable in config.VARIABLES]
    assert (settings["MULTIRING_TIMEOUT"]["value"], settings["MULTIRING_TIMEOUT"]["source"]) == (
        "17",
        "environment",
    )
    assert settings["MULTIRING_LOG_LEVEL"]["source"] == "default"
    assert found["unknown_variables"] == {"MULTIRING_TIMOUT": "MULTIRING_TIMEOUT"}


def test_env_as_text_shows_what_a_person_needs() -> None:
    env = {"MULTIRING_SECRET": "ab" * 16, "MULTIRING_TIMOUT": "1", "OMPI_COMM_WORLD_RANK": "0"}
    result = run_multiring("env", env=env, code=0)
    for words in ("multiring", "numpy", "vector extensions", "memory limit", "MULTIRING_TIMEOUT", "default"):
        assert words in result.stdout
    assert "abab" not in result.stdout
    assert "is MULTIRING_TIMEOUT meant?" in result.stdout
    assert "OMPI_COMM_WORLD_SIZE" in result.stdout  # the launcher's variables are incomplete, which is said


def test_env_does_not_stumble_over_a_bad_value() -> None:
    result = run_multiring("env", env={"MULTIRING_TIMEOUT": "soon"}, code=0)
    assert "soon" in result.stdout


def test_versions_are_found_without_importing_frameworks() -> None:
    code = (
        "import sys, os; from multiring.commands import env; env.collect(os.environ);"
        "print([name for name in ('torch', 'jax', 'tensorflow', 'mpi4py') if name in sys.modules])"
    )
    assert run_python(code).stdout == "[]\n"


def test_doctor_comes_without_what_may_be_broken() -> None:
    code = (
        "import sys, multiring.commands.doctor.doctor; print({'numpy', 'multiring._core'} & set(sys.modules))"
    )
    assert run_python(code).stdout == "set()\n"


def test_tables_line_up() -> None:
    assert environment._table([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc  d"]


def test_doctor_finds_this_machine_fit() -> None:
    result = run_multiring("doctor", code=0)
    for name in checks.CHECKS:
        assert name in result.stdout
    assert "2 ranks agree on a sum" in result.stdout
    assert "This machine can run a job" in result.stdout


def run_doctor(monkeypatch: pytest.MonkeyPatch, *found: Finding | Exception) -> int:
    def check(one: Finding | Exception) -> Finding:
        if isinstance(one, Exception):
            raise one
        return one

    table = {f"check {number}": lambda one=one: check(one) for number, one in enumerate(found)}
    monkeypatch.setattr(doctor, "CHECKS", table)
    return doctor.main(argparse.Namespace(hosts=None, hostfile=None))


def test_doctor_fails_if_one_check_does_and_says_what_to_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding(Status.FAILED, "is broken", "fix it so")
    assert run_doctor(monkeypatch, Finding(Status.OK, "fine"), broken) == 1
    shown = capsys.readouterr().out
    assert "-> fix it so" in shown
    assert "1 of 2 checks failed" in shown


def test_doctor_passes_with_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor(monkeypatch, Finding(Status.WARNING, "hm", "do this")) == 0
    assert "1 warning" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor(monkeypatch, RuntimeError("odd")) == 1
    assert "RuntimeError: odd" in capsys.readouterr().out


def test_a_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for body, words in (
        ("raise ImportError('no symbol')", "no symbol"),
        ("import os; os.abort()", "SIGABRT"),
    ):
        fake = tmp_path / words.replace(" ", "-")
        (fake / "multiring").mkdir(parents=True)
        (fake / "multiring" / "__init__.py").touch()
        (fake / "multiring" / "_core.py").write_text(body)
        # -S keeps an editable install of the real package from being found first.
        script = executable(fake / "python", f'PYTHONPATH="{fake}" exec "{sys.executable}" -S "$@"')
        monkeypatch.setattr(sys, "executable", str(script))
        found = checks.native_library()
        monkeypatch.undo()
        assert found.status is Status.FAILED
        assert words in found.detail
        assert found.fix


def test_a_temporary_directory_with_a_long_name_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert checks.temporary_directory().status is Status.OK
    found = checks.unix_sockets()
    assert found.status is Status.FAILED
    assert "TMPDIR" in found.fix


def test_a_temporary_directory_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert checks.temporary_directory().status is Status.FAILED


@pytest.mark.parametrize(
    ("allowed", "quota", "status"),
    [([0, 1], None, Status.OK), ([0], None, Status.WARNING), ([0, 1, 2, 3], 1.5, Status.WARNING)],
)
def test_few_processors_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, allowed: list[int], quota: float | None, status: Status
) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: allowed)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert checks.processors().status is status


@pytest.mark.parametrize(
    ("limit", "total", "status"),
    [(None, 8 << 30, Status.OK), (512 << 20, 8 << 30, Status.WARNING), (None, None, Status.WARNING)],
)
def test_little_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, total: int | None, status: Status
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: limit)
    monkeypatch.setattr(machine, "memory_total", lambda: total)
    assert checks.memory().status is status


@pytest.mark.parametrize(("limit", "status"), [(None, Status.OK), (5000, Status.OK), (100, Status.WARNING)])
def test_few_processes_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, status: Status
) -> None:
    monkeypatch.setattr(machine, "process_limit", lambda: limit)
    assert checks.process_limit().status is status


@pytest.mark.parametrize(
    ("soft", "status"),
    [(100, Status.FAILED), (512, Status.WARNING), (4096, Status.OK), (resource.RLIM_INFINITY, Status.OK)],
)
def test_few_descriptors_are_told(monkeypatch: pytest.MonkeyPatch, soft: int, status: Status) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    assert checks.open_files().status is status


def test_more_threads_than_processors_are_a_warning() -> None:
    assert checks.threads({}).status is Status.OK
    assert checks.threads({"OMP_NUM_THREADS": "1"}).status is Status.OK
    assert checks.threads({"OMP_NUM_THREADS": "100000"}).status is Status.WARNING


def test_settings_that_are_wrong_or_not_known_are_told() -> None:
    assert checks.settings({}).status is Status.OK
    assert checks.settings({"MULTIRING_TIMEOUT": "soon"}).status is Status.FAILED
    unknown = checks.settings({"MULTIRING_TIMOUT": "1"})
    assert unknown.status is Status.WARNING
    assert "MULTIRING_TIMEOUT" in unknown.fix


def test_left_over_variables_of_a_launcher_are_a_warning() -> None:
    assert checks.launcher({}).status is Status.OK
    assert checks.launcher({"OMPI_COMM_WORLD_RANK": "0"}).status is Status.WARNING


def test_doctor_runs_nothing_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "multiring").mkdir()
    for name in ("selectors.py", "json.py", "multiring/__init__.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'has-run')!r}, 'w'); raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    for check in (checks.native_library, checks.self_test):
        found = check()
        assert found.status is Status.OK, found
    assert not (tmp_path / "has-run").exists()


def test_a_self_test_that_fails_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = checks.self_test()
    assert found.status is Status.FAILED
    assert "exit code 1" in found.detail
