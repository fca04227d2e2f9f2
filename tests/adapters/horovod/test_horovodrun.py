"""`multiring horovodrun` and `multiring.horovod.run`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import multiring.horovod
from multiring import RankError, UsageError, cli
from multiring.commands.launcher.foreign_variables import horovod_environment
from multiring.commands.launcher.options import add_arguments as add_run_arguments
from multiring.commands.launcher.remote_ranks import SSH
from multiring.horovod.runner import options
from tests.support import Job, parsed, refused, run_multiring

# Of horovodrun 0.28.1, with a value where it takes one.
_TEXT = """
    --disable-cache --start-timeout=30 --fusion-threshold-mb=64 --cycle-time-ms=1.5 --cache-capacity=9
    --hierarchical-allgather --no-hierarchical-allgather
    --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file=f
    --autotune-warmup-samples=1 --autotune-steps-per-sample=1 --autotune-bayes-opt-max-samples=1
    --autotune-gaussian-process-noise=0.1 --slots-per-host=2 --elastic-timeout=9 --reset-limit=1
    --mpi-threads-disable --no-mpi-threads-disable --mpi-args=--x --tcp --binding-args=--x --gloo --mpi
    --num-nccl-streams=1 --thread-affinity=1 --gloo-timeout-seconds=30 --log-with-timestamp --jsrun
    --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp --prefix-output-with-timestamp
    -prefix-timestamp
"""
WITHOUT_EFFECT = _TEXT.split()


def run_words(*words: str) -> list[str]:
    return options.run_arguments(parsed(options.add_arguments, *words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--num-proc", "4", "-H", "a:2,b:2"], ["-np", "4", "--hosts", "a:2,b:2"]),
        (["-np", "2", "-hostfile", "f"], ["-np", "2", "--hostfile", "f"]),
        (["--hostfile", "f", "-p", "22"], ["--hostfile", "f", "--ssh", f"{SSH} -p 22"]),
        (["-H", "a", "-p", "22", "-i", "a b"], ["--hosts", "a", "--ssh", f"{SSH} -p 22 -i 'a b'"]),
        (["--network-interfaces", "eth0,eth1"], ["--interfaces", "eth0,eth1"]),
        (["--network-interface", "a", "--network-interface", "b"], ["--interfaces", "a,b"]),
        (["--output-filename", "logs"], ["--output-dir", "logs"]),
        (["--verbose"], ["--env", "MULTIRING_LOG_LEVEL=info"]),
        (["--verbose", "--log-level", "FATAL"], ["--env", "MULTIRING_LOG_LEVEL=error"]),
        (["--stall-check"], []),
        (["--timeline-filename", "t", "--no-timeline-mark-cycles"], ["--env", "HOROVOD_TIMELINE=t"]),
        (["--timeline-mark-cycles"], ["--env", "HOROVOD_TIMELINE_MARK_CYCLES=1"]),
        (["--no-stall-check"], ["--env", "MULTIRING_STALL_WARNING=0"]),
        (["--hierarchical-allreduce"], ["--env", "MULTIRING_NCCL=hierarchical"]),
        (["--no-hierarchical-allreduce"], ["--env", "HOROVOD_HIERARCHICAL_ALLREDUCE=0"]),
        (
            ["--stall-check-warning-time-seconds", "9", "--stall-check-shutdown-time-seconds", "60"],
            ["--env", "MULTIRING_STALL_WARNING=9", "--env", "MULTIRING_TIMEOUT=60"],
        ),
        (["--stall-check-shutdown-time-seconds", "0"], []),
        ([*WITHOUT_EFFECT, "--blacklist-cooldown-range", "1", "2"], []),
    ],
)
def test_options_are_those_of_multiring_run(words: list[str], expected: list[str]) -> None:
    found = run_words(*words, "python", "train.py", "-np", "9")
    assert found == ["--horovod", *expected, "--", "python", "train.py", "-np", "9"]
    parsed(add_run_arguments, *found)  # understands it
    assert run_words(*words, "--", "a.sh")[-2:] == ["--", "a.sh"]


def test_options_without_effect_are_noted() -> None:
    names = [word.partition("=")[0] for word in WITHOUT_EFFECT]
    assert parsed(options.add_arguments, *WITHOUT_EFFECT, "true").without_effect == names


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *(
            (["-np", "2", name, "3", "true"], f"horovodrun {name}: elastic jobs")
            for name in ("--min-np", "--min-num-proc", "--max-np", "--host-discovery-script")
        ),
        (["-np", "2"], "name the program"),
        (["true"], "say how many ranks"),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    assert text in refused("horovodrun", *words)


def test_version_and_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["horovodrun", "-v"]) == 0
    assert capsys.readouterr().out == f"{multiring.horovod.__version__}\n"
    assert cli.main(["horovodrun", "--check-build"]) == 0
    assert "[X] PyTorch" in capsys.readouterr().out


def test_a_file_of_options(tmp_path: Path) -> None:
    """What the command line says goes before it."""
    path = tmp_path / "options.yaml"
    path.write_text(
        "params:\n  cycle_time_ms: 5\ntimeline:\n  filename: t\n  mark_cycles: true\n"
        "logging:\n  level: DEBUG\nstall_check:\n  enabled: false\n  shutdown_time_seconds: 9\n"
    )
    args = parsed(options.add_arguments, "--config-file", str(path), "--log-level", "ERROR", "true")
    words = options.run_arguments(args)
    variables = ["HOROVOD_TIMELINE=t", "HOROVOD_TIMELINE_MARK_CYCLES=1", "MULTIRING_LOG_LEVEL=error"]
    variables += ["MULTIRING_STALL_WARNING=0", "MULTIRING_TIMEOUT=9"]
    assert words == ["--horovod", *(word for each in variables for word in ("--env", each)), "--", "true"]
    assert args.without_effect == [f"params.cycle_time_ms in {path}"]
    args = parsed(
        *(options.add_arguments, "--config-file", str(path), "--verbose", "--stall-check"),
        *("--stall-check-shutdown-time-seconds", "0", "--no-timeline-mark-cycles", "true"),
    )
    variables = ["HOROVOD_TIMELINE=t", "MULTIRING_LOG_LEVEL=info"]
    words = ["--horovod", *(word for each in variables for word in ("--env", each)), "--", "true"]
    assert options.run_arguments(args) == words
    for bad in ("/none", str(tmp_path)):
        assert f"--config-file {bad}" in refused("horovodrun", "--config-file", bad, "true")


@pytest.mark.parametrize(
    ("value", "inherited", "given", "wanted"),
    [
        ("1", None, {}, "hierarchical"),
        ("0", None, {}, None),
        ("1", None, {"MULTIRING_NCCL": "all"}, "all"),
        ("1", "off", {}, None),  # ranks inherit it
        ("1", None, {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}, None),
    ],
    ids=["", "not", "given", "inherited", "not given"],
)
def test_the_variable_for_hierarchical_allreduces(
    value: str,
    inherited: str | None,
    given: dict[str, str],
    wanted: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sets multiring's own, unless that is set."""
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLREDUCE", value)
    monkeypatch.delenv("MULTIRING_NCCL", raising=False)
    if inherited is not None:
        monkeypatch.setenv("MULTIRING_NCCL", inherited)
    assert horovod_environment(given).get("MULTIRING_NCCL") == wanted


def test_a_job() -> None:
    words = ["-np", "2", "--gloo", "--autotune", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE; exit 3"]
    result = run_multiring("horovodrun", *words)
    assert result.returncode == 3
    assert sorted(result.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]
    assert "multiring: horovodrun: these have no effect here: --gloo, --autotune\n" in result.stderr
    shown = Job([sys.executable, "-m", "multiring.horovod.runner", "-v"]).run(code=0)
    assert shown.stdout == f"{multiring.horovod.__version__}\n"


def place(base: int, *, fails: bool = False) -> tuple[int, str, str | None]:
    """What a rank of `run` sees."""
    import horovod

    if fails:
        raise ValueError("an odd number")
    rank = base + int(os.environ["HOROVOD_RANK"])
    return rank, horovod.__name__, os.environ.get("MULTIRING_INTERFACES")


def test_results_by_rank(tmp_path: Path) -> None:
    given: dict[str, Any] = {"network_interface": "lo", "output_filename": tmp_path, "num_proc": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = multiring.horovod.run(place, (10,), hosts="localhost:1,127.0.0.1:1", **given)
    assert found == [(10, "horovod", "lo"), (11, "horovod", "lo")]
    assert {path.name for path in tmp_path.iterdir()} >= {"rank.0.stdout", "rank.1.stderr"}


def test_arguments_that_are_warned_of() -> None:
    """Those without effect are named once; `np` was the name of `num_proc`."""
    with pytest.warns(UserWarning, match="no effect here: ssh_port, verbose, use_gloo$") as seen:
        ((rank, *_),) = multiring.horovod.run(place, (0,), ssh_port=22, use_gloo=True, verbose=True)
    assert (rank, len(seen)) == (0, 1)
    failed = pytest.raises(RankError, match="raised ValueError: an odd number")
    with pytest.warns(DeprecationWarning, match="use num_proc instead"), failed as got:
        multiring.horovod.run(place, (0,), {"fails": True}, np=2)
    assert isinstance(got.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": "localhost:1,192.0.2.1:1"}, "192.0.2.1: a function runs on this host only"),
        ({"hosts": "localhost:1", "num_proc": 2}, "2 ranks, and 1 slots"),
        ({"hosts": "a", "hostfile": "b"}, "not both"),
        ({"hostfile": "/none"}, "/none"),
        ({"use_gloo": True, "use_mpi": True}, "not both"),
        ({"min_num_proc": 1}, "min_num_proc=1: elastic jobs"),
        ({"max_np": 1}, "max_np=1: elastic jobs"),
        ({"executable": "/usr/bin/none"}, "executable=/usr/bin/none: ranks run /"),
        ({"num_proc": 0}, "np=0"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        multiring.horovod.run(place, **given)
