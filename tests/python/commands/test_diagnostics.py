"""`multiring env` and `multiring doctor`."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from multiring import config, machine
from multiring.commands import device_libraries
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
    launcher = environment.collect({"OMPI_COMM_WORLD_RANK": "0"})["launcher"]
    assert "OMPI_COMM_WORLD_SIZE" in launcher["problem"], "which is missing"


def test_doctor_finds_this_machine_fit() -> None:
    result = run_multiring("doctor", code=0)
    for name in checks.CHECKS:
        assert name in result.stdout
    assert "2 ranks agree on a sum" in result.stdout
    assert "This machine can run a job" in result.stdout


def libraries(*found: tuple[str, str, str, int]) -> dict[str, SimpleNamespace]:
    """Of name, version (empty: it is missing), reason and devices."""
    return {
        name: SimpleNamespace(
            path=version and "/lib/x", version=version, why=why, devices=devices, origin="here"
        )
        for name, version, why, devices in found
    }


def test_libraries_for_devices_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = libraries(("CUDA driver", "", "libcuda.so.1: no such file", -1), ("NCCL", "", "none", -1))
    there = libraries(("CUDA driver", "13.0", "", 2), ("NCCL", "2.27.3", "", -1))
    shown = {}
    for name, found in (("missing", missing), ("there", there)):
        monkeypatch.setattr(device_libraries, "find", lambda found=found: found)
        for files in ((), (tmp_path,)):
            monkeypatch.setattr(checks, "_DEVICE_FILES", (str(files[0]) if files else "/none", "/none"))
            shown[name, len(files)] = checks.devices()
        assert (
            environment.collect({})["devices"]["CUDA driver"]
            == {
                "missing": "none: libcuda.so.1: no such file",
                "there": "13.0, 2 devices, here: /lib/x",
            }[name]
        )
    for files in (0, 1):
        assert shown["there", files] == Finding(Status.OK, "2 devices, CUDA driver 13.0; NCCL 2.27.3")
    assert shown["missing", 0] == Finding(Status.OK, "none: arrays lie in host memory")
    assert shown["missing", 1].status is Status.WARNING
    assert "libcuda.so.1: no such file" in shown["missing", 1].detail


def test_reasons_of_the_loader_are_short() -> None:
    missing = ": cannot open shared object file: No such file or directory"
    why = f"/x/liba.so.2: version 1.0 has no function f; liba.so.2{missing}; liba.so.1{missing}"
    shown = device_libraries.shown(libraries(("A", "", why, -1))["A"])
    assert shown == "none: /x/liba.so.2: version 1.0 has no function f; no file liba.so.2, liba.so.1"


def nccl_in(site: Path, without: str = "") -> Path:
    """A folder with a wheel of NCCL, which lacks a function, or none."""
    names = "GetErrorString GetUniqueId CommInitRankConfig CommSplit CommFinalize CommDestroy CommAbort Send "
    names += "CommGetAsyncError GroupStart GroupEnd AllReduce ReduceScatter AllGather Broadcast Reduce Recv"
    code = [f"int nccl{name}() {{ return 0; }}" for name in names.split() if name != without]
    source = site / "nccl.c"
    library = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    source.write_text("int ncclGetVersion(int* v) { *v = 22703; return 0; }\n" + "\n".join(code))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return site


def test_the_first_library_that_has_every_function_is_taken(tmp_path: Path) -> None:
    sites = [nccl_in(tmp_path / "old", "CommSplit"), nccl_in(tmp_path / "new"), tmp_path / "none"]
    code = "import sys; from multiring import _core; found = _core.find_device_libraries(sys.argv[1:])[1]\n"
    code += "print(found.name, found.version, found.origin, found.path, found.why, sep='|')"

    def found(*sites: Path) -> list[str]:
        command = [sys.executable, "-c", code, *map(str, sites)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return shown.strip().split("|")

    library = "nvidia/nccl/lib/libnccl.so.2"
    assert found(*sites) == ["NCCL", "2.27.3", "of a wheel", str(sites[1] / library), ""]
    _, version, origin, _, why = found(sites[0], sites[2])
    assert origin != "of a wheel"
    if version:  # this system has NCCL
        return
    lacks = f"{sites[0] / library}: version 2.27.3 has no function ncclCommSplit: a newer one is needed"
    missing = [f"{sites[2] / library}: cannot open shared object file", "libnccl.so.2: cannot open"]
    assert [each in part for each, part in zip([lacks, *missing], why.split("; "), strict=True)] == [True] * 3


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
