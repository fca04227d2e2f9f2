"""The command `multiring`: finding subcommands and loading nothing else; types of arguments."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from multiring import cli
from multiring.commands.argument_types import array_sizes, number_of, wall_seconds
from multiring.commands.completion import SHELLS, whole_parser
from multiring.commands.frameworks import FRAMEWORKS
from multiring.commands.launcher import options
from multiring.commands.table import COMMANDS
from multiring.errors import InternalError, UsageError
from tests.support import refused, run_multiring, run_python


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "  run " in capsys.readouterr().out
    assert run_multiring("--version").stdout == f"multiring {importlib.metadata.version('multiring')}\n"


LAUNCHER = "multiring.cli, multiring.commands.launcher.options, multiring.commands.plan.command"
ENVIRONMENT = "os, multiring.commands.env\nmultiring.commands.env.collect(os.environ)"


@pytest.mark.parametrize(
    ("imported", "left_out"),
    [
        (f"{LAUNCHER}, {ENVIRONMENT}", {*FRAMEWORKS, "mpi4py", "rich", "multiring.models"}),
        # The native library may be broken, or be missing where a job is started only.
        ("multiring.commands.doctor.doctor", {*FRAMEWORKS, "numpy", "multiring._core"}),
        ("multiring.cli, multiring.commands.launcher.options", {*FRAMEWORKS, "numpy", "multiring._core"}),
        ("multiring.models.regress.command", {*FRAMEWORKS}),
    ],
)
def test_commands_load_little(imported: str, left_out: set[str]) -> None:
    code = f"import sys, {imported}\nprint({left_out} & {{*sys.modules}})"
    assert run_python(code).stdout == "set()\n"


def test_env_shows_what_is_set_without_the_native_library() -> None:
    collect = "multiring.commands.env.collect({'MULTIRING_MODE': '1x4', 'MULTIRING_WIRE': 'x'})"
    found = run_python(
        "import sys; sys.modules['multiring._core'] = None\n"
        f"import multiring.commands.env\nfound = {collect}\n"
        "print([each['value'] for each in found['settings'] if each['source'] == 'environment'])\n"
        "print(found['launcher']['problem'], found['unknown_variables'])"
    ).stdout
    assert found.startswith("['1x4']\n"), found
    assert "multiring._core" in found
    assert found.endswith("{'MULTIRING_WIRE': ''}\n"), "none that a launcher sets is meant"


def test_a_command_that_is_not_there_is_told_with_the_one_meant() -> None:
    assert "is 'doctor' meant?" in refused("docter")
    assert "is `multiring run -np 4 a.py --lr 1` meant?" in refused("-np", "4", "a.py", "--lr", "1")
    assert "is `multiring run -np 2 a.py 'b c'` meant?" in refused("a.py", "b c")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    # A list of choices has no spaces, and an example of a command line cannot be broken without a change.
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert not [line for line in long if max(map(len, line.split())) < 40 and "multiring " not in line]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run --nproc-per-node 2 a.py", "run: there is no option --nproc-per-node; is -np meant?"),
        ("run --nproc_per_node=2 a.py", "run: there is no option --nproc_per_node; is -np meant?"),
        ("run --tag-ouput a.py", "run: there is no option --tag-ouput; is --tag-output meant?"),
        ("run --qqqq a.py", "run: there is no option --qqqq"),
        ("run --np 2 a.py", "run: there is no option --np; is -np meant?"),
        ("run --mpi a.py", "run: there is no option --mpi"),
        ("plan 4 x", "plan: not understood: 4 x"),
        (
            "train --framework pytorch",
            "train: argument --framework: pytorch is not one of torch, tensorflow, .*",
        ),
        ("train --depth 18", "train: argument --depth: 18 is not one of 8, 20, 50, 101; is 20 meant?"),
    ],
)
def test_what_is_not_understood_is_told_in_two_lines_with_what_is_meant(words: str, told: str) -> None:
    name = words.split()[0]
    first, second = refused(*words.split()).splitlines()
    assert re.fullmatch(told.replace("?", r"\?"), first.removeprefix("multiring "))
    assert second == f"`multiring {name} --help` lists the options."


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tr", "train"),
        ("train --frame", "--framework"),
        ("train --framework py", "pytensor"),
        ("plan --coll", "--collective"),
    ],
)
def test_bash_completes_commands_options_and_choices(words: str, completed: str, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = run_multiring("completion", "bash", code=0).stdout
    (tmp_path / "script").write_text(script)
    typed = ["multiring", *words.split()]
    shell = (
        f"source {tmp_path}/script; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; "
        "$(complete -p multiring | sed -E 's/.*-F ([^ ]+) .*/\\1/'); echo ${COMPREPLY[@]}"
    )
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == completed, result.stderr


def test_a_command_that_cannot_be_loaded_has_no_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    def load(name: str) -> types.ModuleType:
        warnings.warn("an old package", stacklevel=1)
        if name == COMMANDS["plan"].module:
            raise RuntimeError("broken")
        return found(name)

    found = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", load)
    text = whole_parser().format_help()
    assert all(name in text for name in COMMANDS)
    assert capsys.readouterr().err == "multiring completion: plan has no options: broken\n"
    assert not recwarn.list


def test_completion_needs_a_shell() -> None:
    assert refused("completion").splitlines()[-1].endswith("name the shell: bash, zsh or fish")


def test_contradicting_numbers_of_ranks_are_refused() -> None:
    told = refused("run", "-n", "2", "-np", "3", "train.py")
    assert "-np 3 contradicts 2, which was given before" in told
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    assert parser.parse_args(["-n", "2", "-np", "2", "train.py"]).ranks == 2


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)
    assert "progress" not in script, "what is hidden in --help is hidden here"


def test_the_installed_command_is_this_one() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="multiring")
    assert entry.value == "multiring.__main__:main"


def train_that(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, at_import: bool = False) -> None:
    """Makes `multiring train` raise `error`, or return 5."""

    def run(_: object) -> int:
        if error is not None:
            raise error
        return 5

    module = types.SimpleNamespace(add_arguments=lambda parser: None, main=run)
    monkeypatch.setattr(importlib, "import_module", run if at_import else lambda name: module)


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 5), (UsageError("bad value"), 2), (InternalError("broke"), 1), (KeyboardInterrupt(), 130)],
)
def test_exit_codes_and_errors_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    code: int,
) -> None:
    train_that(monkeypatch, error)
    assert cli.main(["train"]) == code
    told = "" if error is None or not str(error) else f"multiring: {error}\n"
    assert capsys.readouterr().err == told


def test_a_missing_extra_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    train_that(monkeypatch, ModuleNotFoundError("No module", name="torch.nn"), at_import=True)
    shown = refused("train")
    assert "needs torch" in shown
    assert "pip install 'multiring[torch,train]'" in shown
    ours = ModuleNotFoundError("No module", name="multiring.models.gone")
    train_that(monkeypatch, ours, at_import=True)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = f'"{sys.executable}" -m multiring env | true; echo "${{PIPESTATUS[0]}}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stdout.strip() in ("0", "141")  # 0 if all was written before the reader left
    assert result.stderr == ""


def test_numbers_times_and_sizes() -> None:
    assert [number_of("ranks")(text) for text in ("1", "12", "007")] == [1, 12, 7]
    assert [wall_seconds(text) for text in ("1", "0.5", "1e-9", "3600")] == [1, 0.5, 1e-9, 3600]
    assert array_sizes("1MiB,4, 64K ,4,8B") == [2**20, 4, 2**16, 8]
    for kind, texts, told in (
        (number_of("turns"), ("0", "", "1.0"), "is not a number of turns: give an integer of at least 1"),
        (wall_seconds, ("0", "nan", "s"), "is not a time: give seconds"),
        (array_sizes, ("6", "0K"), "multiple of 4 bytes, at least 4"),
        (array_sizes, ("4,", "1Q"), "is not a size: give bytes"),
    ):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError, match=told):
                kind(text)
