"""Ranks that launchers start, as docs/torch-distributed.md says: the entry point makes the backend known."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import REPOSITORY, Job

SCRIPT = """
import sys
if "launched" in sys.argv:
    import multiring.torch_distributed  # before torch, which registers the backend while it is imported
import torch, torch.distributed as dist

def main(rank=None, size=None, url=None):
    if "launched" in sys.argv:
        dist.init_process_group("multiring", init_method="multiring://")
    elif url is None:
        dist.init_process_group("multiring")
    else:
        dist.init_process_group("multiring", init_method=url, rank=rank, world_size=size)
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3, tensor
    assert dist.get_backend() == "multiring"
    if dist.get_rank() == 0:
        print("reduced over", dist.get_world_size(), flush=True)
    if "destroy" in sys.argv:
        dist.destroy_process_group()

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("file:"):
        import torch.multiprocessing as mp
        mp.spawn(main, (2, sys.argv[1]), 2)
    else:
        main()
"""


COMPILED = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("multiring")
step = lambda tensor: functional.all_reduce(tensor * 2, "sum", dist.group.WORLD).exp() + 1
tensor = torch.arange(4.0) + dist.get_rank()
torch.testing.assert_close(torch.compile(step, fullgraph=True)(tensor), step(tensor))
print("compiled", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the entry points of pyproject.toml are those of an installed package."""
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    about = tmp_path / "entry" / "multiring_entry_points-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: multiring-entry-points\nVersion: 0\n")
    lines = [
        f"[{group}]\n{name} = {value}\n" for group, named in points.items() for name, value in named.items()
    ]
    (about / "entry_points.txt").write_text("".join(lines))
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = [str(about.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    ("launcher", "destroy"),
    [("multiring", "leave"), ("multiring://", "leave"), ("torchrun", "destroy"), ("spawn", "leave")],
)
def test_any_launcher_starts_the_ranks(
    installed: dict[str, str], tmp_path: Path, launcher: str, destroy: str
) -> None:
    script = str(tmp_path / "script.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    run = [sys.executable, "-m", "multiring", "run", "-np", "2", script]
    commands = {
        "multiring": run,
        "multiring://": [*run, "launched"],
        "torchrun": [*torchrun, "--standalone", "--nproc-per-node=2", script],
        "spawn": [sys.executable, script, f"file://{tmp_path}/meeting"],
    }
    result = Job([*commands[launcher], destroy], installed).run(60.0, 0)
    assert "reduced over 2" in result.stdout
    assert "none of the 2 ranks" not in result.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_compiles_a_collective(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    # Compiling takes long on a machine that has much to do.
    environment = {
        **installed,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "multiring", "run", "-np", "2", str(tmp_path / "compiled.py")]
    assert Job(command, environment).run(300.0, 0).stdout.count("compiled") == 2
