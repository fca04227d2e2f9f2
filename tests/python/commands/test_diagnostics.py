"""`multiring env` and `multiring doctor`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from multiring import config, machine
from multiring.commands import device_libraries
from multiring.commands import env as environment
from multiring.commands.device_libraries import DeviceLibrary
from multiring.commands.doctor import checks, device_checks, doctor
from multiring.commands.doctor.checks import Finding, Status
from tests.gpu import stand_in
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
    if "none: arrays lie in host memory" in result.stdout:
        lines = result.stdout.partition("\n\n")[0].splitlines()
        names = [line[9 : 9 + max(map(len, checks.CHECKS))].rstrip() for line in lines if line[:9].strip()]
        assert names == list(checks.CHECKS), "nothing else is said where there are no devices"
    assert "This machine can run a job" in result.stdout


def libraries(*found: DeviceLibrary) -> Callable[[], dict[str, DeviceLibrary]]:
    """What is found in place of what this machine has: the others are missing."""
    names = ("CUDA driver", "NCCL", "NVRTC", "HIP", "RCCL")
    return lambda: {
        each.name: each for each in (*(DeviceLibrary(name, why="none") for name in names), *found)
    }


DRIVER = DeviceLibrary("CUDA driver", "/lib/x", "of the system", "12.8", devices=2)
NCCL = DeviceLibrary("NCCL", "/lib/y", "of a wheel", "2.27.3", wheels=("nvidia-nccl-cu12",))
HIDDEN = DeviceLibrary("CUDA driver", why="/x: cuInit failed: CUDA_ERROR_NO_DEVICE")


@pytest.mark.parametrize(
    ("found", "file", "environ", "status", "told"),
    [
        ((DRIVER, NCCL), True, {}, Status.OK, "2 devices, CUDA driver 12.8; NCCL 2.27.3"),
        ((DRIVER,), True, {}, Status.OK, "2 devices, CUDA driver 12.8; no NCCL, which nothing needs"),
        (
            (DRIVER, replace(NCCL, wheels=("nvidia-nccl-cu13",))),
            True,
            {},
            Status.WARNING,
            "2 devices, CUDA driver 12.8; NCCL 2.27.3 is for CUDA 13",
        ),
        ((), False, {}, Status.OK, "none: arrays lie in host memory"),
        ((), True, {}, Status.WARNING, "there are GPUs and no CUDA driver that can be used: none"),
        (
            (HIDDEN,),
            True,
            {},
            Status.WARNING,
            f"there are GPUs and no CUDA driver that can be used: {HIDDEN.why}",
        ),
        (
            (HIDDEN,),
            True,
            {"CUDA_VISIBLE_DEVICES": "-1"},
            Status.WARNING,
            f"CUDA_VISIBLE_DEVICES=-1 may hide the GPUs: {HIDDEN.why}",
        ),
        ((DeviceLibrary("HIP", "/z", devices=0),), False, {}, Status.OK, "none: arrays lie in host memory"),
        (
            (DeviceLibrary("HIP", "/z", version="6.4", devices=1),),
            False,
            {},
            Status.OK,
            "1 device of AMD, HIP 6.4; no RCCL, which nothing needs",
        ),
    ],
)
def test_devices_are_told_by_doctor(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: tuple[DeviceLibrary, ...],
    file: bool,
    environ: dict[str, str],
    status: Status,
    told: str,
) -> None:
    monkeypatch.setattr(device_libraries, "find", libraries(*found))
    monkeypatch.setattr(checks, "_NVIDIA_FILE", str(tmp_path / ("" if file else "none")))
    look = Mock(return_value={"peer access": Finding(Status.OK, "all")})
    monkeypatch.setattr(device_checks, "look", look)
    finding = checks.devices(environ)
    assert (finding.status, finding.detail) == (status, told)
    assert bool(finding.also) == any(each.devices > 0 for each in found), "where devices are seen"


def test_libraries_for_devices_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_libraries, "find", libraries(DRIVER, NCCL))
    found = environment.collect({})["devices"]
    assert found["CUDA driver"]["devices"] == 2
    assert json.loads(json.dumps(found))["NCCL"]["version"] == "2.27.3"
    assert device_libraries.shown(DRIVER) == "12.8, 2 devices, of the system: /lib/x"
    assert device_libraries.shown(NCCL) == "2.27.3, of nvidia-nccl-cu12: /lib/y"
    missing = ": cannot open shared object file: No such file or directory"
    why = f"/x/liba.so.2: version 1.0 has no function f; liba.so.2{missing}; liba.so.1{missing}"
    shown = device_libraries.shown(DeviceLibrary("A", why=why))
    assert shown == "none: /x/liba.so.2: version 1.0 has no function f; no file liba.so.2, liba.so.1"


@pytest.mark.parametrize(
    ("code", "seconds", "told"),
    [("for (;;) pause()", 3, "did not answer within 3 s"), ("abort()", 60, "ends the process with SIGABRT")],
)
def test_a_driver_that_does_not_answer_or_ends_its_process_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, seconds: float, told: str
) -> None:
    source = [f"int {name}() {{ {code}; return 0; }}" for name in stand_in.HIP_NAMES]
    made = compiled(tmp_path / "libamdhip64.so.7", "#include <stdlib.h>", "#include <unistd.h>", *source)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made.parent))
    find = device_libraries.find
    monkeypatch.setattr(device_libraries, "find", lambda: find(seconds))
    assert told in environment.collect({})["devices"]["problem"]
    finding = checks.devices()
    assert finding.status is Status.WARNING
    assert told in finding.detail


def compiled(library: Path, *source: str) -> Path:
    """A library that has its file's name as its SONAME, as those of NVIDIA and AMD have."""
    library.parent.mkdir(parents=True, exist_ok=True)
    (library.parent / "source.c").write_text("\n".join(source))
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library]
    subprocess.run([*command, library.parent / "source.c"], check=True)
    return library


def nccl_in(folder: Path, without: str = "", version: int = 22703) -> Path:
    """NCCL in a folder, which lacks a function, or none."""
    names = "GetErrorString GetUniqueId CommInitRankConfig CommSplit CommFinalize CommDestroy CommAbort Send "
    names += "CommGetAsyncError GroupStart GroupEnd AllReduce ReduceScatter AllGather Broadcast Reduce Recv"
    code = [f"int nccl{name}() {{ return 0; }}" for name in names.split() if name != without]
    get_version = f"int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}"
    return compiled(folder / "libnccl.so.2", get_version, *code)


FIND_NCCL = """
import sys
from multiring import _core
found = _core.find_device_libraries(sys.argv[1:])[1]
print(found.version, found.origin, found.path, found.why, sep="|")
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libnccl" in line})
"""


def find_nccl(*sites: Path, **variables: str) -> tuple[list[str], list[str]]:
    """Version, origin, path and reasons; and what the process has loaded in the end."""
    command = [sys.executable, "-c", FIND_NCCL, *map(str, sites)]
    env = os.environ | variables
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    first, loaded = shown.splitlines()
    return first.split("|"), loaded.split()


_IN_SITE = "nvidia/nccl/lib"


def test_the_first_library_that_has_every_function_is_taken(tmp_path: Path) -> None:
    nccl_in(tmp_path / "old" / _IN_SITE, "CommSplit", 21403)
    new = nccl_in(tmp_path / "new" / _IN_SITE)
    found, loaded = find_nccl(tmp_path / "none", tmp_path / "old", tmp_path / "new")
    assert found == ["2.27.3", "of a wheel", str(new), ""]
    assert loaded == [str(new)]


def test_a_refused_library_does_not_hide_the_next_of_its_name(tmp_path: Path) -> None:
    old = nccl_in(tmp_path / "old" / _IN_SITE, "CommSplit", 21403)
    new = nccl_in(tmp_path / "system")
    found, loaded = find_nccl(tmp_path / "old", LD_LIBRARY_PATH=str(new.parent))
    assert found == ["2.27.3", "of the system", str(new), ""]
    assert loaded == [str(new)]
    worse = nccl_in(tmp_path / "worse", "Send")
    found, loaded = find_nccl(tmp_path / "old", LD_LIBRARY_PATH=str(worse.parent))
    lacks = "has no function ncclCommSplit: a newer one is needed"
    assert found[3].startswith(
        f"{old}: version 2.14.3 {lacks}; {worse}: version 2.27.3 has no function ncclSend"
    )
    assert loaded == []


def test_no_library_is_opened_beside_a_refused_one_that_the_process_has(tmp_path: Path) -> None:
    old = nccl_in(tmp_path / "loaded", "CommSplit", 21403)
    nccl_in(tmp_path / "new" / _IN_SITE)
    found, loaded = find_nccl(tmp_path / "new", LD_PRELOAD=str(old))
    assert found[0] == ""
    assert found[3].startswith(f"{old}: version 2.14.3 has no function")
    assert found[3].endswith("; others are not looked for, as the process has this one")
    assert loaded == [str(old)]


def test_wheels_are_not_looked_for_in_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder, name in (("a", "cu12"), ("a", "cu13"), ("b", "cu13"), ("b", "cu12")):
        metadata = tmp_path / folder / f"nvidia_nccl_{name}-9.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-{name}\nVersion: 9\n")
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path / "b"), str(tmp_path / "b")])
    assert device_libraries._sites() == {str(tmp_path / "b"): ["nvidia-nccl-cu13", "nvidia-nccl-cu12"]}


def run_doctor(monkeypatch: pytest.MonkeyPatch, *found: Finding | Exception) -> int:
    table = {f"check {number}": Mock(side_effect=[one]) for number, one in enumerate(found)}
    monkeypatch.setattr(checks, "CHECKS", table)
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
