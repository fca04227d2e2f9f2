"""Importing Chainer with a current NumPy, and what is said when it cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_chainer_works_after_the_adapter() -> None:
    """And NumPy has got those two names back, and nothing else."""
    done = run(
        "import multiring, sys\n"
        "assert 'chainer' not in sys.modules\n"
        "import numpy, numpy as np\n"
        "import numpy.distutils.system_info, numpy.testing\n"  # what Chainer imports of NumPy itself
        "before = dict(vars(np))\n"
        "from multiring.chainer import compatibility\n"
        "import chainer, chainermn\n"
        "changed = {n for n, v in vars(np).items() if n not in before or before[n] is not v}\n"
        "modules = {n for n in changed if 'numpy.' + n in sys.modules}\n"
        "assert changed - modules == {'sctypes', 'float'}, changed\n"
        "assert np.float is float and np.float64 in np.sctypes['float']\n"
        "assert np.int64 in np.sctypes['int']\n"
        "compatibility.restore_numpy_names()\n"
        "x = chainer.Variable(np.ones((1, 1, 4, 4), 'f'))\n"
        "chainer.functions.sum(chainer.functions.resize_images(x, (2, 2))).backward()\n"
        "print('done')"
    )
    assert done.stdout == "done\n", done.stderr


def test_names_that_exist_are_left_alone() -> None:
    done = run(
        "import numpy as np\n"
        "np.sctypes, np.float = 'theirs', 'too'\n"
        "import importlib.util\n"
        "import multiring\n"
        "path = importlib.util.find_spec('multiring').submodule_search_locations\n"
        "spec = importlib.util.find_spec('multiring.chainer')\n"
        "module = importlib.util.spec_from_file_location(\n"
        "    'compatibility', spec.origin.replace('__init__', 'compatibility'))\n"
        "loaded = importlib.util.module_from_spec(module)\n"
        "module.loader.exec_module(loaded)\n"
        "loaded.restore_numpy_names()\n"
        "assert (np.sctypes, np.float) == ('theirs', 'too')\n"
        "print('done')"
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("chainer", "chainer is not installed"),
        ("numpy.distutils.system_info", "chainer cannot be imported"),
    ],
)
def test_what_is_missing_is_said(missing: str, text: str) -> None:
    done = run(
        f"import sys\nsys.modules[{missing!r}] = None\n"
        "try:\n"
        "    import multiring.chainer\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert text in done.stdout, done.stderr
    for word in ("--no-build-isolation", "setuptools<82", "numpy<2.4", "multiring[chainer]", "Python 3.11"):
        assert word in done.stdout


# It imports the adapter where a child process, which imports this module too, does not.
ITERATOR = """
import multiprocessing
import sys


def modules():
    assert "chainer" not in sys.modules
    print("child", flush=True)


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    import multiring.chainer
    import chainer
    import loader

    for child in (multiprocessing.Process(target=modules), loader.Loader()):
        child.start()
        child.join()
        assert child.exitcode == 0
    batches = chainer.iterators.MultiprocessIterator(range(6), 3, repeat=False, shuffle=False, n_processes=1)
    print(list(batches), flush=True)
    batches.finalize()
"""

LOADER = """
import multiprocessing
import chainer


class Loader(multiprocessing.Process):
    def run(self):
        print("loader", flush=True)
"""


def test_child_processes_have_the_names_of_numpy(tmp_path: Path) -> None:
    """Those of "forkserver" are prepared by the same function."""
    (tmp_path / "loader.py").write_text(LOADER)
    script = tmp_path / "script.py"
    script.write_text(ITERATOR)
    command = [sys.executable, "-W", "ignore", str(script), "spawn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child\nloader\n[[0, 1, 2], [3, 4, 5]]\n", done.stderr
