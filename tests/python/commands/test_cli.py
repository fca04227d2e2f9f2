"""The command `multiring`: finding subcommands and loading nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import types

import pytest

from multiring import cli
from multiring.errors import InternalError, UsageError
from tests.support import refused, run_multiring, run_python


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "  run " in capsys.readouterr().out
    assert run_multiring("--version").stdout == f"multiring {importlib.metadata.version('multiring')}\n"


def test_the_command_line_imports_no_framework_and_little_else() -> None:
    code = (
        "import os, sys, multiring.cli, multiring.commands.launcher.options\n"
        "import multiring.commands.doctor.doctor, multiring.commands.plan.command\n"
        "from multiring.commands import env\n"
        "env.collect(os.environ)\n"
        "unwanted = ('torch', 'tensorflow', 'jax', 'mpi4py', 'rich', 'multiring.models')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    assert run_python(code).stdout == "[]\n"


def test_a_command_that_is_not_there_is_told_with_the_one_meant() -> None:
    assert "is 'doctor' meant?" in refused("docter")


def test_the_installed_command_is_this_one() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="multiring")
    assert entry.value == "multiring.cli:main"


def command_that(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, *, at_import: bool = False
) -> None:
    """Makes `multiring train` raise `error`."""

    def main(args: object) -> int:
        if error is not None:
            raise error
        return 5

    def load(name: str) -> types.SimpleNamespace:
        if at_import and error is not None:
            raise error
        return types.SimpleNamespace(add_arguments=lambda parser: None, main=main)

    monkeypatch.setattr(importlib, "import_module", load)


def test_the_exit_code_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(monkeypatch, None)
    assert cli.main(["train"]) == 5


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("bad value"), 2), (InternalError("broke"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_are_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    command_that(monkeypatch, error)
    assert cli.main(["train"]) == code
    assert str(error) in capsys.readouterr().err


def test_a_missing_extra_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(monkeypatch, ModuleNotFoundError("No module", name="torch.nn"), at_import=True)
    assert cli.main(["train"]) == 2
    shown = capsys.readouterr().err
    assert "needs torch" in shown
    assert "pip install 'multiring[torch,train]'" in shown


def test_a_missing_module_of_our_own_is_not_taken_for_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(monkeypatch, ModuleNotFoundError("No module", name="multiring.models.gone"), at_import=True)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = f'"{sys.executable}" -m multiring env | true; echo "${{PIPESTATUS[0]}}"'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert result.stdout.strip() in ("0", "141")  # 0 if all was written before the reader left
    assert result.stderr == ""
