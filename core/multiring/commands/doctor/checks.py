"""The checks of `multiring doctor`: each looks at one thing that a job needs."""

from __future__ import annotations

import array
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace

from multiring import config, machine
from multiring.commands import device_libraries
from multiring.commands.doctor import device_checks
from multiring.commands.doctor.finding import Finding, Status
from multiring.commands.launcher.process import signal_name
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment

__all__ = ["CHECKS", "Finding", "Status", "run_checks"]

_MIN_DESCRIPTORS = 256
_GOOD_DESCRIPTORS = 1024
_GOOD_MEMORY = 1 << 30
_MIN_TEMPORARY_BYTES = 1 << 20
_LONGEST_SOCKET_PATH = 107
_SELF_TEST_SECONDS = 60.0
# How the kernel shows that a machine, or a container, has GPUs of NVIDIA.
_NVIDIA_FILE = "/dev/nvidiactl"


def native_library() -> Finding:
    """Loads the native library in a process of its own, because what is wrong with it may end the process."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", "import multiring._core"], capture_output=True, text=True, check=False
    )
    if run.returncode == 0:
        return Finding(Status.OK, "loads")
    if run.returncode < 0:
        name = signal_name(-run.returncode)
        why = f"loading it ends the process with {name}"
        fix = "build it on this machine: pip install --force-reinstall --no-binary multiring multiring"
        return Finding(Status.FAILED, why, fix)
    why = (run.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(
        Status.FAILED, why, "install multiring again with `pip install .`; a C++20 compiler is needed"
    )


def shared_memory() -> Finding:
    """Makes an anonymous file and maps it, as every transport inside a host does."""
    size = 1 << 20
    try:
        descriptor = os.memfd_create("multiring-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as mapping:
                mapping[size - 1] = 1
        finally:
            os.close(descriptor)
    except OSError as error:
        fix = "allow the system calls memfd_create and mmap: look at the container's seccomp profile"
        return Finding(Status.FAILED, f"anonymous shared memory cannot be had: {error.strerror}", fix)
    return Finding(Status.OK, "anonymous files can be made and mapped; /dev/shm is not used")


def unix_sockets() -> Finding:
    """Hands a descriptor over a Unix socket in the temporary directory."""
    try:
        with tempfile.TemporaryDirectory(prefix="multiring-doctor-") as directory:
            path = os.path.join(directory, "socket")
            with (
                socket.socket(socket.AF_UNIX) as listener,
                socket.socket(socket.AF_UNIX) as client,
                open(os.devnull, "rb") as file,
            ):
                if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH - 30:
                    fix = "set TMPDIR to a directory with a shorter name, such as /tmp"
                    return Finding(Status.FAILED, f"{directory} is too long for Unix sockets", fix)
                listener.bind(path)
                listener.listen(1)
                client.connect(path)
                with listener.accept()[0] as server:
                    rights = array.array("i", [file.fileno()])
                    client.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    _, descriptors, _, _ = socket.recv_fds(server, 1, 1)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    if not descriptors:
                        raise OSError(0, "the descriptor did not arrive")
    except OSError as error:
        fix = "allow AF_UNIX sockets that pass descriptors: look at the container's seccomp profile"
        return Finding(Status.FAILED, f"Unix sockets do not work: {error.strerror}", fix)
    return Finding(Status.OK, "pass descriptors")


def temporary_directory() -> Finding:
    """Whether the ranks' meeting place can be made."""
    try:
        directory = tempfile.gettempdir()
        with tempfile.TemporaryDirectory(prefix="multiring-doctor-"):
            free = shutil.disk_usage(directory).free
    except OSError as error:
        return Finding(Status.FAILED, f"cannot be written: {error.strerror}", "set TMPDIR to one that can")
    if free < _MIN_TEMPORARY_BYTES:
        return Finding(
            Status.FAILED, f"{directory} is full", "free some space or set TMPDIR to another place"
        )
    return Finding(Status.OK, f"{directory} is writable")


def processors() -> Finding:
    """How many ranks can run at once."""
    allowed = len(machine.allowed_cpus())
    quota = machine.cpu_quota()
    detail = f"{allowed} of {os.cpu_count()} may be used"
    if quota is not None and quota < allowed:
        detail += f"; a quota allows {quota:g} at a time"
        fix = f"start at most {max(1, int(quota))} ranks, or raise the container's processor limit (--cpus)"
        return Finding(Status.WARNING, detail, fix)
    if allowed == 1:
        fix = "several ranks will take turns on it: fine for trying out, slow for training"
        return Finding(Status.WARNING, detail, fix)
    return Finding(Status.OK, detail)


def memory() -> Finding:
    """How much there is for all ranks together."""
    limit = machine.memory_limit()
    usable = limit or machine.memory_total()
    if usable is None:
        return Finding(Status.WARNING, "its size cannot be found out", "look at /proc/meminfo")
    detail = f"{usable / 2**30:.1f} GiB" + (" (limit of the container)" if limit else "")
    if usable < _GOOD_MEMORY:
        return Finding(
            Status.WARNING, detail, "each rank with a framework takes about 0.5 GiB; raise the limit"
        )
    return Finding(Status.OK, detail)


def process_limit() -> Finding:
    """Whether a control group allows enough processes and threads."""
    limit = machine.process_limit()
    if limit is not None and limit < 256:
        fix = "raise the container's limit on processes (--pids-limit)"
        return Finding(Status.WARNING, f"{limit} processes and threads are allowed", fix)
    return Finding(Status.OK, f"{limit} are allowed" if limit else "no limit")


def process_descriptors() -> Finding:
    """Whether the end of a process can be waited for without a race."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        fix = "use Linux 5.3 or newer and allow the system call pidfd_open in the container's seccomp profile"
        return Finding(Status.WARNING, f"pidfd_open does not work: {error.strerror}", fix)
    return Finding(Status.OK, "work")


def open_files() -> Finding:
    """Whether enough descriptors may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _GOOD_DESCRIPTORS:
        status = Status.FAILED if soft < _MIN_DESCRIPTORS else Status.WARNING
        highest = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return Finding(status, f"{soft} may be open", f"run `ulimit -n 4096` (at most {highest} here)")
    return Finding(Status.OK, f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open")


def threads(environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether a thread count in the environment outnumbers the processors."""
    cores = machine.core_allowance()
    text = environ.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) > cores:
        fix = "unset OMP_NUM_THREADS: `multiring run` gives each rank its share"
        return Finding(Status.WARNING, f"OMP_NUM_THREADS={text} with {cores} processors", fix)
    return Finding(Status.OK, f"OMP_NUM_THREADS={text}" if text else "chosen by `multiring run`")


def devices(environ: Mapping[str, str] = os.environ) -> Finding:
    """Which libraries for arrays on GPUs there are, and what GPUs reach; jobs on the host need none."""
    try:
        found = device_libraries.find()
    except device_libraries.LookError as error:
        fix = "see whether nvidia-smi, or rocm-smi, answers; jobs with arrays on the host run all the same"
        return Finding(Status.WARNING, str(error), fix)
    own = _libraries_for_devices(found, environ)
    for driver, collectives in (("CUDA driver", "NCCL"), ("HIP", "RCCL")):
        if found[driver].devices > 0:
            return replace(own, also=device_checks.look(found[driver], found[collectives], environ))
    return own


def _libraries_for_devices(
    found: Mapping[str, device_libraries.DeviceLibrary], environ: Mapping[str, str]
) -> Finding:
    driver, nccl, hip = found["CUDA driver"], found["NCCL"], found["HIP"]
    if driver.path:
        count = f"{driver.devices} device{'s' * (driver.devices != 1)}, CUDA driver {driver.version}"
        if nccl.cuda > int(driver.version.partition(".")[0]):
            fix = f"install a driver for CUDA {nccl.cuda}, or uninstall {' and '.join(nccl.wheels)}"
            return Finding(Status.WARNING, f"{count}; NCCL {nccl.version} is for CUDA {nccl.cuda}", fix)
        second = f"NCCL {nccl.version}" if nccl.path else "no NCCL, which nothing needs"
        return Finding(Status.OK, f"{count}; {second}")
    if os.path.exists(_NVIDIA_FILE) and "CUDA_VISIBLE_DEVICES" in environ and "cuInit failed" in driver.why:
        hidden = f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} may hide the GPUs: {driver.why}"
        return Finding(Status.WARNING, hidden, "unset it where arrays on GPUs are wanted")
    if os.path.exists(_NVIDIA_FILE):
        fix = "see whether nvidia-smi works; a container needs the driver of its host (docker run --gpus all)"
        return Finding(
            Status.WARNING, f"there are GPUs and no CUDA driver that can be used: {driver.why}", fix
        )
    if hip.devices > 0:
        count = f"{hip.devices} device{'s' * (hip.devices != 1)} of AMD, HIP {hip.version}"
        rccl = found["RCCL"]
        second = f"RCCL {rccl.version}" if rccl.path else "no RCCL, which nothing needs"
        return Finding(Status.OK, f"{count}; {second}")
    return Finding(Status.OK, "none: arrays lie in host memory")


def settings(environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether every variable of multiring is known and has a value that is accepted."""
    try:
        config.check(environ)
    except UsageError as error:
        return Finding(Status.FAILED, str(error), "correct or unset it")
    unknown = config.unknown_variables(environ)
    if unknown:
        meant = " ".join(sorted({name for name in unknown.values() if name}))
        fix = f"correct or unset it{f'; known is {meant}' if meant else ''}"
        return Finding(Status.WARNING, f"not known: {' '.join(unknown)}", fix)
    return Finding(Status.OK, "all values are accepted")


def launcher(environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether a launcher's variables are left over or contradict each other."""
    try:
        placement = launch_environment.detect(environ)
    except UsageError as error:
        return Finding(Status.WARNING, str(error), "start a new shell, or unset these variables")
    if placement.launcher == "none":
        return Finding(Status.OK, "none around this command")
    return Finding(Status.OK, f"{placement.launcher}: this is rank {placement.rank} of {placement.size}")


def self_test() -> Finding:
    """Runs an allreduce on two ranks through the launcher."""
    # Nowhere is what lies in the current directory taken for a module.
    command = [sys.executable, "-P", "-m", "multiring", "run", "-np", "2"]
    command += ["--timeout", str(_SELF_TEST_SECONDS), "--env", "PYTHONSAFEPATH=1"]
    command += ["-m", "multiring.commands.doctor.selftest"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _, stderr = process.communicate(timeout=_SELF_TEST_SECONDS + 30)
    except BaseException as error:
        process.send_signal(signal.SIGTERM)  # it ends its ranks first
        _, stderr = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    if process.returncode == 0:
        return Finding(Status.OK, "2 ranks agree on a sum")
    lines = [line for line in stderr.strip().splitlines() if line]
    fix = "fix what has failed above; if nothing has, report this: " + " / ".join(lines[-6:])
    return Finding(Status.FAILED, f"exit code {process.returncode}", fix)


CHECKS: dict[str, Callable[[], Finding]] = {
    "native library": native_library,
    "shared memory": shared_memory,
    "Unix sockets": unix_sockets,
    "temporary directory": temporary_directory,
    "processors": processors,
    "memory": memory,
    "processes": process_limit,
    "process descriptors": process_descriptors,
    "open files": open_files,
    "threads": threads,
    "devices": devices,
    "settings": settings,
    "launcher": launcher,
    "self-test": self_test,
}


def run_checks(without: Container[str] = ()) -> Iterator[tuple[str, Finding]]:
    """What the checks find, by name, but those that are left out."""
    for name, check in CHECKS.items():
        if name in without:
            continue
        found = _run(check)
        yield name, found
        yield from found.also.items()


def _run(check: Callable[[], Finding]) -> Finding:
    """What a check finds; that it fails in a way nobody thought of is a finding too."""
    try:
        return check()
    except ImportError as error:  # settings have the native library's defaults
        return Finding(Status.FAILED, str(error), "make the native library load first")
    except Exception as error:
        return Finding(Status.FAILED, f"{type(error).__name__}: {error}", "report this")
