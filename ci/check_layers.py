"""Checks that includes and imports go only in the directions of the design, that the map in CONTRIBUTING.md
names the folders that there are, and that no function of the package has more than 8 parameters.

    base <- topology            base <- transport            base <- device
    topology, transport.h, device <- collective <- engine <- capi, binding
    binding <- Python face <- adapters <- integrations <- models <- benchmarks <- models/regress

Run by hand: python ci/check_layers.py. Exit code 1 and one line for each finding if something is wrong.
"""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# For each folder of core/, the include paths that its files may use (prefixes). An entry for a folder inside
# it takes the place of the outer one.
INCLUDES = {
    "base": ("base/",),
    "device": ("base/", "device/"),
    "topology": ("base/", "topology/"),
    "transport": ("base/", "transport/"),
    "collective": (
        "base/",
        "device/",
        "topology/",
        "transport/transport.h",
        "transport/ranks.h",  # parts of it
        "transport/rounds.h",
        "transport/hierarchy.h",
        "transport/cluster/mirror_routes.h",  # what an exchange sends, for its predicted cost
        "collective/",
    ),
    # What ranks agree on knows nothing of how an operation runs.
    "collective/agreement": (
        "base/",
        "transport/transport.h",
        "collective/agreement/",
        "collective/descriptor.h",
        "collective/kinds.h",
        "collective/rank_list.h",
    ),
    "collective/plan": (
        "base/",
        "device/nccl.h",
        "topology/",
        "transport/",
        "collective/descriptor.h",
        "collective/plan/",
        "collective/cluster/message_segments.h",
        "collective/device/device_offers.h",  # staging memory that offers need
        "collective/staged/sections.h",
    ),
    "collective/staged": (
        "base/",
        "topology/",
        "transport/",
        "collective/agreement/",
        "collective/operation.h",
        "collective/staged/",
        "collective/sums/",
        "collective/device/device_arrays.h",  # arrays that come part by part
    ),
    "engine": ("base/", "device/", "topology/", "transport/transport.h", "collective/", "engine/"),
    # These two choose the transport, so they see all of them.
    "capi": ("base/", "device/", "topology/", "transport/", "collective/", "engine/", "capi/", "multiring.h"),
    # capi/: Python hands named queues and communicators on to native code.
    "binding": (
        "base/",
        "device/",
        "topology/",
        "transport/",
        "collective/",
        "engine/",
        "binding/",
        "capi/communicator.h",
        "capi/queue.h",
    ),
}

# The table of frameworks; read as a file, for nothing need be installed here.
TABLE = runpy.run_path(str(ROOT / "core/multiring/commands/frameworks.py"))["FRAMEWORKS"]
OWN_FRAMEWORK = {name: set(framework.imports) for name, framework in TABLE.items()} | {"numpy": {"numpy"}}
ADAPTERS = OWN_FRAMEWORK.keys()
FRAMEWORKS = set().union(*OWN_FRAMEWORK.values()) - {"numpy"}
# What sits around training: each folder of integrations/, and what it alone imports.
INTEGRATIONS = {
    "horovod": {"torch", "tensorflow", "keras", "tf_keras"},
    "jax_collectives": {"jax", "jaxlib"},
    "ray": {"ray"},
    "torch_distributed": {"torch", "torchft"},
    "torchrun": {"torch"},
}
# What is no framework, and yet for one integration alone.
SYSTEMS = {"ray", "torchft"}
MAX_PARAMETERS = 8  # *args and **options not counted
# Functions whose parameters are those of another library, which they take the place of.
GIVEN_SIGNATURES = {
    ("integrations/horovod/runner/functions.py", "run"),
    ("integrations/horovod/tensorflow/collectives.py", "allreduce"),
    ("integrations/horovod/tensorflow/collectives.py", "grouped_allreduce"),
    ("integrations/horovod/tensorflow/collectives.py", "grouped_reducescatter"),
    ("integrations/horovod/tensorflow/keras/optimizer.py", "DistributedOptimizer"),
    ("integrations/horovod/tensorflow/optimizer.py", "DistributedOptimizer"),
    ("integrations/horovod/tensorflow/tape.py", "DistributedGradientTape"),
    ("integrations/horovod/tensorflow/tape.py", "PartialDistributedGradientTape"),
    ("integrations/horovod/torch/optimizer.py", "DistributedOptimizer"),
}
NOT_COUNTED = {"self", "cls"}
# Folders whose folders the map in CONTRIBUTING.md names.
MAPPED = (".", "core", "core/multiring", "integrations", "models", "benchmarks", "tests")
# What stands on the adapters and on the integrations.
PROGRAMS = {"models", "benchmarks"}


def include_findings() -> Iterator[str]:
    for path in sorted((ROOT / "core").rglob("*")):
        within = [str(each) for each in path.relative_to(ROOT / "core").parents if str(each) in INCLUDES]
        if path.suffix not in {".h", ".cpp", ".inc"} or not within:
            continue
        folder = within[0]  # the innermost
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#include "([^"]+)"', line)
            if match and not match[1].startswith(INCLUDES[folder]):
                yield f"{path.relative_to(ROOT)}:{number}: {folder} must not include {match[1]}"
            if re.search(r"\b(" + "|".join(FRAMEWORKS) + r")\b", line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: core names a framework"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part_of_ours(name: str) -> str:
    """What `multiring.X` and all names below it are in the package: X; empty: a name of another package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "multiring" and len(parts) > 1 else ""


def cycle_findings() -> Iterator[str]:
    """Folders and modules at the top of the Python face import each other in one direction only."""
    face = ROOT / "core/multiring"
    rooms: dict[str, set[str]] = {path.stem: set() for path in face.iterdir() if path.stem[0] != "_"}
    for path in face.rglob("*.py"):
        room = path.relative_to(face).parts[0].removesuffix(".py")
        found = {part_of_ours(name) for _, name in imports(path)}
        rooms.setdefault(room, set()).update(found & rooms.keys() - {room})
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        yield f"core/multiring: imports in a circle: {' <- '.join(error.args[1])}"


def map_findings() -> Iterator[str]:
    """The map in CONTRIBUTING.md has a line for each folder that it divides things into, and for no other."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^    ([a-z]+(?:/[a-z_]+)*)  +\S", text, re.MULTILINE))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    folders = {parent for file in tracked.splitlines() for parent in Path(file).parents}
    shown = {str(folder) for folder in folders if str(folder.parent) in MAPPED and folder.name[:1] != "."}
    for name in sorted(shown - named - set(MAPPED)):
        yield f"CONTRIBUTING.md: the map lacks {name}"
    for name in sorted(named - {str(folder) for folder in folders}):
        yield f"CONTRIBUTING.md: the map names {name}, which is not there"


def import_findings() -> Iterator[str]:
    for path in sorted(ROOT.glob("core/multiring/**/*.py")):
        for number, name in imports(path):
            parts = name.split(".")
            if parts[0] in FRAMEWORKS | SYSTEMS or parts[0] == "tests":
                yield f"{path.relative_to(ROOT)}:{number}: the Python face imports {name}"
            if part_of_ours(name) in ADAPTERS | INTEGRATIONS.keys() | PROGRAMS:
                yield f"{path.relative_to(ROOT)}:{number}: the Python face imports {name}, which stands on it"
            if part_of_ours(name)[:1].isupper():
                yield f"{path.relative_to(ROOT)}:{number}: {name} is imported from the package"
    for folder in sorted((ROOT / "adapters").iterdir()):
        for path in sorted(folder.rglob("*.py")):
            for number, name in imports(path):
                yield from adapter_findings(path, number, name, folder.name)
    for path in sorted(ROOT.glob("integrations/*/**/*.py")):
        foreign = (FRAMEWORKS | SYSTEMS) - INTEGRATIONS[path.relative_to(ROOT / "integrations").parts[0]]
        for number, name in imports(path):
            if name.split(".")[0] in foreign or part_of_ours(name) in PROGRAMS:
                yield f"{path.relative_to(ROOT)}:{number}: an integration imports {name}"
    for folder in ("models", "benchmarks", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # The regression suite is the one program of models/ that measures.
            measures = folder != "models" or ROOT / "models" / "regress" in path.parents
            for number, name in imports(path):
                if name.split(".")[0] == "tests":
                    yield f"{path.relative_to(ROOT)}:{number}: imports {name}"
                if part_of_ours(name) == "benchmarks" and not measures:
                    yield f"{path.relative_to(ROOT)}:{number}: imports {name}, which stands on it"
                if name.startswith("multiring.models.regress") and folder == "benchmarks":
                    yield f"{path.relative_to(ROOT)}:{number}: imports {name}, which stands on it"


def signature_findings() -> Iterator[str]:
    for folder in ("core/multiring", "adapters", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(), str(path))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                own = *node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs
                count = len({each.arg for each in own} - NOT_COUNTED)
                file = str(path.relative_to(ROOT))
                if count > MAX_PARAMETERS and (file, node.name) not in GIVEN_SIGNATURES:
                    place = f"{file}:{node.lineno}"
                    yield f"{place}: {node.name} has {count} parameters; {MAX_PARAMETERS} are the most"


def adapter_findings(path: Path, number: int, name: str, adapter: str) -> Iterator[str]:
    parts = name.split(".")
    place = f"{path.relative_to(ROOT)}:{number}"
    if parts[0] in (FRAMEWORKS | SYSTEMS) - OWN_FRAMEWORK[adapter]:
        yield f"{place}: the {adapter} adapter imports {name}, another framework"
    if parts[0] == "tests" or part_of_ours(name) in INTEGRATIONS.keys() | PROGRAMS:
        yield f"{place}: an adapter imports {name}, which stands on it"
    if part_of_ours(name) in ADAPTERS - {adapter}:
        yield f"{place}: the {adapter} adapter imports {name}, another adapter"


def main() -> int:
    findings = [*include_findings(), *import_findings(), *cycle_findings(), *map_findings()]
    findings += signature_findings()
    print("\n".join(findings) if findings else "layers: every include and import goes the right way")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
