"""Every code block of the README and of docs/ runs, or is checked as far as it can be."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from multiring import cli
from tests.docs.blocks import PAGES, code_of, commands_of, python_of
from tests.docs.given import GIVEN
from tests.support import REPOSITORY, run_job

# Blocks that other tests run, on more ranks and with more assertions: the test, and words of it that show it.
RUN_ELSEWHERE = {
    "docs/coming-from-ddp.md": ("adapters/test_coming_from.py", "coming-from-ddp"),
    "docs/coming-from-horovod.md": ("adapters/test_coming_from.py", "coming-from-horovod"),
    "docs/cookbook.md": ("docs/test_cookbook.py", "docs/cookbook.md"),
    "docs/cookbook-tensorflow.md": ("docs/test_cookbook.py", "docs/cookbook-tensorflow.md"),
    "docs/cookbook-chainer.md": ("docs/test_cookbook.py", "docs/cookbook-chainer.md"),
    "docs/cookbook-jax.md": ("docs/test_cookbook.py", "docs/cookbook-jax.md"),
    "docs/numpy.md": ("adapters/numpy/test_contract_numpy.py", '"numpy.md"'),
    "docs/reference/numpy.md": ("adapters/numpy/test_contract_numpy.py", "reference/numpy.md"),
    "docs/accelerate.md": ("adapters/test_trainer_failures.py", "Accelerator(cpu=True"),
    "docs/launching.md": ("python/launch/test_run_function.py", "docs/launching.md"),
    "docs/notebooks.md": ("python/launch/test_notebook.py", "docs/notebooks.md"),
    "docs/lightning.md": ("adapters/test_trainer_failures.py", 'backend="multiring"'),
    "docs/jax-sharding.md": ("adapters/jax_collectives/test_sharded_programs.py", "docs/jax-sharding.md"),
    "docs/tutorial.md": ("docs/test_tutorial.py", "docs/tutorial.md"),
    "docs/transformers.md": ("adapters/test_trainer_failures.py", 'group("multiring")'),
    "docs/keras.md": ("adapters/tensorflow/test_tensorflow_keras.py", "mt.callbacks.MetricAverage()"),
    "docs/reference/horovod.md": ("adapters/horovod/test_horovod_scripts.py", "multiring.horovod.install()"),
    "docs/torch-distributed.md": ("adapters/torch_distributed/test_dist_launchers.py", 'group("multiring")'),
}
# Blocks that need more than ranks on this host, by page, number and the reason.
COMPILED = {
    ("docs/clusters.md", 0): "needs ranks that mpirun has started",
    ("docs/clusters.md", 1): "needs a Ray cluster",
    ("docs/devices.md", 0): "needs a GPU",
}
FOLDERS = "adapters|benchmarks|ci|core|docs|examples|integrations|models|tests"
# Names that stand for the reader's own files.
PLACEHOLDERS = {"train.py", "script.py", "a.py", "b.py", "hosts", "solver.prototxt", "report", "results.json"}


@pytest.mark.parametrize("framework", GIVEN)
def test_blocks_run_on_two_ranks(framework: str, tmp_path: Path) -> None:
    parts = []
    for page, number, given in GIVEN[framework]:
        parts.append(f"{given}\n# {page}, block {number}\n{python_of(page)[number]}")
    script = tmp_path / "script.py"
    script.write_text("\n".join([*parts, "print('to the end')"]))
    env = {"PYTHONPATH": str(REPOSITORY), "PYTENSOR_FLAGS": "mode=FAST_COMPILE", "MULTIRING_TIMEOUT": "60"}
    done = run_job(2, script, env=env, timeout=240.0, code=0)
    assert done.stdout.count("to the end") == 2


def test_every_python_block_is_run_or_compiles() -> None:
    there = {(page, number) for page in PAGES for number in range(len(python_of(page)))}
    here = {(page, number) for blocks in GIVEN.values() for page, number, _ in blocks}
    assert not here & COMPILED.keys()
    left = {(page, number) for page, number in there - here - COMPILED.keys() if page not in RUN_ELSEWHERE}
    assert not left, f"say in tests/docs/given.py what these blocks take as given: {sorted(left)}"
    for page, (test, words) in RUN_ELSEWHERE.items():
        assert words in (REPOSITORY / "tests" / test).read_text(), page
    for page, number in COMPILED:
        compile(python_of(page)[number], f"{page}, block {number}", "exec")
    assert {language for page in PAGES for language, _ in code_of(page)} <= {
        "python",
        "diff",
        "sh",
        "text",
        "",
    }


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_commands_are_understood(page: str) -> None:
    for line in commands_of(page):
        words = shlex.split(line, comments=True)
        for word in words:
            check_file(word)
        while words:
            words = check_command(words)


def check_command(words: list[str]) -> list[str]:
    """Checks the first command of a line by its parser; the command that it starts, if any."""
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    program, arguments = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets), arguments
    if program == "sh":
        return []
    if program == "multiring":
        if not arguments or {"|", "[options]"} & set(arguments):
            return []  # a usage line
        name, *options = arguments
        understood = parsed(name, options)
        lists = [value for value in vars(understood).values() if isinstance(value, list)]
        arguments = [str(word) for words in lists for word in words] if name == "run" else []
    # A launcher, pip or python may start a command of multiring.
    return arguments[arguments.index("multiring") :] if "multiring" in arguments else []


def parsed(name: str, options: list[str]) -> argparse.Namespace:
    """The arguments of a command of multiring, as the command line itself parses them."""
    assert name in cli.COMMANDS, f"there is no command {name}"
    parser = argparse.ArgumentParser(prog=f"multiring {name}", allow_abbrev=False)
    importlib.import_module(cli.COMMANDS[name].module).add_arguments(parser)
    try:
        return parser.parse_args(options)
    except SystemExit:
        pytest.fail(f"`multiring {shlex.join([name, *options])}` is not understood")


def check_file(word: str) -> None:
    """Fails unless a file of this repository that a command names is there."""
    if re.match(r"(examples|docs|tests|ci|models|core)/[\w./-]+$", word):
        assert (REPOSITORY / word).exists(), word
    elif word.endswith(".py") and "/" not in word:
        assert word in PLACEHOLDERS, f"{word} is no file of the repository"


def test_links_lead_somewhere_and_files_that_are_named_are_there() -> None:
    wrong = []
    for page in [*PAGES, "CHANGELOG.md"]:
        whole = (REPOSITORY / page).read_text()
        text = re.sub(r"^ *```.*?^ *```$", "", whole, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            path = (REPOSITORY / page).parent / name if name else REPOSITORY / page
            if target.startswith(("http://", "https://")):
                continue
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append(f"{page}: {target}")
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", whole if page in PAGES else ""):
            there = (REPOSITORY / name).exists() or (REPOSITORY / f"{name}.h").exists()
            wrong += [] if there else [f"{page}: {name}"]
    assert not wrong, "\n".join(wrong)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}
