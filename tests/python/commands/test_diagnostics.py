"""`multiring env` and `multiring doctor`."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from multiring import config, machine
from multiring.commands import env as environment
from multiring.commands.doctor import checks, doctor
from multiring.commands.doctor.checks import Finding, Status
from tests.support import executable, run_multiring


def test_env_as_json_holds_everything() -> None:
    result = run_multiring("env", "--json", env={"MULTIRING_TIMEOUT": "17", "MULTIRING_TIMOUT": "1"})
    found = json.loads(result.stdout)
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["native library"].endswith(".so")
    assert found["machine"]["processors allowed"] == machine.allowed_cpus()
    assert found["launcher"]["name"] == "none"
    settings = {row["name"]: row for row in found["settings"]}
    assert list(settings) == [variable.name for variable in config.VARIABLES]
    timeout = settings["MULTIRING_TIMEOUT"]
    assert (timeout["value"], timeout["source"]) == ("17", "environment")
    assert settings["MULTIRING_LOG_LEVEL"]["source"] == "default"
    assert found["unknown_variables"] == {"MULTIRING_TIMOUT": "MULTIRING_TIMEOUT"}


def test_env_as_text_shows_what_is_wrong_and_no_secret() -> None:
    env = {"MULTIRING_SECRET": "ab" * 16, "MULTIRING_TIMOUT": "1", "MULTIRING_TIMEOUT": "soon"}
    shown = run_multiring("env", env=env, code=0).stdout
    assert "abab" not in shown
    for words in ("soon", "is MULTIRING_TIMEOUT meant?"):
        assert words in shown
    of_settings = shown.split("\nsettings\n")[1].splitlines()
    assert [line.split()[0] for line in of_settings] == [
        *("variable", "MULTIRING_SECRET", "MULTIRING_TIMEOUT", str(len(config.VARIABLES) - 2)),
        "MULTIRING_TIMOUT",
    ]
    everything = run_multiring("env", "--all", env=env, code=0).stdout.split("\nsettings\n")[1].splitlines()
    for line, first in zip(everything, of_settings[:3], strict=False):  # what is set comes first
        assert line.split() == first.split()
    assert {variable.name for variable in config.VARIABLES} <= {line.split()[0] for line in everything}
    all_but_one = {variable.name: "1" for variable in config.VARIABLES[1:]}
    shown = environment._as_text(environment.collect(all_but_one), is_all=False)
    assert "\n  1 other has its default; --all shows it\n" in f"{shown}\n"
    without = run_multiring("env", code=0).stdout
    assert without.endswith(f"\n  all {len(config.VARIABLES)} have their defaults; --all shows them\n")
    launcher = environment.collect({"OMPI_COMM_WORLD_RANK": "0"})["launcher"]
    assert "OMPI_COMM_WORLD_SIZE" in launcher["problem"], "which is missing"


def test_doctor_finds_this_machine_fit() -> None:
    result = run_multiring("doctor", code=0)
    for name in checks.CHECKS:
        assert name in result.stdout
    assert "2 ranks agree on a sum" in result.stdout
    assert "This machine can run a job" in result.stdout


def run_doctor(monkeypatch: pytest.MonkeyPatch, *found: Finding | Exception) -> int:
    table = {f"check {number}": Mock(side_effect=[one]) for number, one in enumerate(found)}
    monkeypatch.setattr(doctor, "CHECKS", table)
    return doctor.main(argparse.Namespace(hosts=None, hostfile=None))


def test_doctor_fails_if_one_check_does_and_says_what_to_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning, broken = Finding(Status.WARNING, "hm", "do so"), Finding(Status.FAILED, "bad", "fix it")
    assert run_doctor(monkeypatch, warning) == 0
    assert "1 warning" in capsys.readouterr().out
    assert run_doctor(monkeypatch, Finding(Status.OK, "fine"), broken, RuntimeError("odd")) == 1
    shown = capsys.readouterr().out
    for words in ("-> fix it", "RuntimeError: odd", "2 of 3 checks failed"):
        assert words in shown


def test_a_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for body, told in (("raise ImportError('no symbol')", "no symbol"), ("import os; os.abort()", "SIGABRT")):
        fake = tmp_path / told.replace(" ", "-")
        (fake / "multiring").mkdir(parents=True)
        (fake / "multiring" / "__init__.py").touch()
        (fake / "multiring" / "_core.py").write_text(body)
        # -S keeps an editable install of the real package from being found first.
        script = executable(fake / "python", f'PYTHONPATH="{fake}" exec "{sys.executable}" -S "$@"')
        monkeypatch.setattr(sys, "executable", str(script))
        found = checks.native_library()
        monkeypatch.undo()
        assert found.status is Status.FAILED
        assert told in found.detail
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
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert checks.temporary_directory().status is Status.FAILED


def test_what_this_machine_has_little_of_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(check: Callable[[], Finding], **found: object) -> Status:
        for name, value in found.items():
            monkeypatch.setattr(machine, name, lambda value=value: value)
        return check().status

    def files(soft: int) -> Status:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
        return checks.open_files().status

    ok, warning = Status.OK, Status.WARNING
    assert status(checks.processors, allowed_cpus=[0, 1], cpu_quota=None) is ok
    assert status(checks.processors, allowed_cpus=[0]) is warning
    assert status(checks.processors, allowed_cpus=[0, 1, 2, 3], cpu_quota=1.5) is warning
    assert status(checks.memory, memory_limit=None, memory_total=8 << 30) is ok
    assert status(checks.memory, memory_limit=512 << 20) is warning
    assert status(checks.memory, memory_limit=None, memory_total=None) is warning
    assert [status(checks.process_limit, process_limit=n) for n in (None, 5000, 100)] == [ok, ok, warning]
    assert [files(n) for n in (100, 512, 4096, resource.RLIM_INFINITY)] == [Status.FAILED, warning, ok, ok]


def test_variables_that_do_no_good_are_told() -> None:
    assert checks.threads({"OMP_NUM_THREADS": "1"}).status is Status.OK
    assert checks.threads({"OMP_NUM_THREADS": "100000"}).status is Status.WARNING
    assert checks.settings({}).status is Status.OK
    assert checks.settings({"MULTIRING_TIMEOUT": "soon"}).status is Status.FAILED
    unknown = checks.settings({"MULTIRING_TIMOUT": "1"})
    assert unknown.status is Status.WARNING
    assert "MULTIRING_TIMEOUT" in unknown.fix
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
