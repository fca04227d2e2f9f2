"""Checks that includes and imports go only in the directions of the design.

    base <- topology            base <- transport
    topology, transport.h <- collective <- engine <- capi, binding
    binding <- Python face <- adapters <- integrations <- models <- benchmarks <- models/regress

Run by hand: python ci/check_layers.py. Exit code 1 and one line for each finding if something is wrong.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# For each folder of core/, the include paths that its files may use (prefixes).
INCLUDES = {
    "base": ("base/",),
    "topology": ("base/", "topology/"),
    "transport": ("base/", "transport/"),
    "collective": (
        "base/",
        "topology/",
        "transport/transport.h",
        "transport/hierarchy.h",
        "collective/",
    ),
    "engine": ("base/", "topology/", "transport/transport.h", "collective/", "engine/"),
    # These two choose the transport, so they see all of them.
    "capi": ("base/", "topology/", "transport/", "collective/", "engine/", "capi/", "multiring.h"),
    # capi/queue.h: Python hands named queues on to native code.
    "binding": (
        "base/",
        "topology/",
        "transport/",
        "collective/",
        "engine/",
        "binding/",
        "capi/queue.h",
    ),
}

FRAMEWORKS = {
    "torch",
    "tensorflow",
    "keras",
    "chainer",
    "chainermn",
    "caffe",
    "jax",
    "jaxlib",
    "pytensor",
    "cupy",
}
# A launcher's own store comes in a framework; imported where a job needs it, never with the module (ADR 17).
LAUNCHERS_STORES = {"core/multiring/torchrun.py": "torch.distributed.TCPStore"}
# What sits around training: each folder of integrations/, and what it alone imports.
INTEGRATIONS = {"ray"}
# What stands on the adapters and on the integrations.
PROGRAMS = {"models", "benchmarks"}
ADAPTERS = {"torch", "tensorflow", "chainer", "caffe", "jax", "pytensor", "numpy"}
OWN_FRAMEWORK = {
    "tensorflow": {"tensorflow", "keras"},
    "jax": {"jax", "jaxlib"},
    "chainer": {"chainer", "chainermn", "cupy"},
}


def include_findings() -> Iterator[str]:
    for path in sorted((ROOT / "core").rglob("*")):
        folder = path.relative_to(ROOT / "core").parts[0]
        if path.suffix not in {".h", ".cpp", ".inc"} or folder not in INCLUDES:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#include "([^"]+)"', line)
            if match and not match[1].startswith(INCLUDES[folder]):
                yield f"{path.relative_to(ROOT)}:{number}: {folder} must not include {match[1]}"
            if re.search(r"\b(" + "|".join(FRAMEWORKS) + r")\b", line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: core names a framework"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, `from a import b` as `a.b`."""
    yield from imports_in(ast.parse(path.read_text(), str(path)))


def imports_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def launchers_stores(path: Path) -> list[tuple[int, str]]:
    """The imports of a module that `LAUNCHERS_STORES` allows it, inside of functions."""
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    allowed = LAUNCHERS_STORES.get(str(path.relative_to(ROOT)))
    return [found for function in functions for found in imports_in(function) if found[1] == allowed]


def import_findings() -> Iterator[str]:
    for path in sorted(ROOT.glob("core/multiring/**/*.py")):
        allowed = launchers_stores(path)
        for number, name in imports(path):
            if (number, name) in allowed:
                continue
            parts = name.split(".")
            if parts[0] in FRAMEWORKS | INTEGRATIONS or parts[0] == "tests":
                yield f"{path.relative_to(ROOT)}:{number}: the Python face imports {name}"
            if parts[0] == "multiring" and len(parts) > 1 and parts[1] in ADAPTERS | INTEGRATIONS | PROGRAMS:
                yield f"{path.relative_to(ROOT)}:{number}: the Python face imports {name}, which stands on it"
    for folder in sorted((ROOT / "adapters").iterdir()):
        own = OWN_FRAMEWORK.get(folder.name, {folder.name})
        for path in sorted(folder.rglob("*.py")):
            for number, name in imports(path):
                yield from adapter_findings(path, number, name, folder.name, own)
    for path in sorted(ROOT.glob("integrations/**/*.py")):
        for number, name in imports(path):
            parts = name.split(".")
            if parts[0] in FRAMEWORKS or (parts[0] == "multiring" and parts[1:2] and parts[1] in PROGRAMS):
                yield f"{path.relative_to(ROOT)}:{number}: an integration imports {name}"
    for folder in ("models", "benchmarks", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # The regression suite is the one program of models/ that measures.
            measures = folder != "models" or ROOT / "models" / "regress" in path.parents
            for number, name in imports(path):
                if name.split(".")[0] == "tests":
                    yield f"{path.relative_to(ROOT)}:{number}: imports {name}"
                if name.startswith("multiring.benchmarks") and not measures:
                    yield f"{path.relative_to(ROOT)}:{number}: imports {name}, which stands on it"
                if name.startswith("multiring.models.regress") and folder == "benchmarks":
                    yield f"{path.relative_to(ROOT)}:{number}: imports {name}, which stands on it"


def adapter_findings(path: Path, number: int, name: str, adapter: str, own: set[str]) -> Iterator[str]:
    parts = name.split(".")
    place = f"{path.relative_to(ROOT)}:{number}"
    if parts[0] in (FRAMEWORKS | INTEGRATIONS) - own:
        yield f"{place}: the {adapter} adapter imports {name}, another framework"
    if parts[0] == "tests" or (
        parts[0] == "multiring" and parts[1:2] and parts[1] in INTEGRATIONS | PROGRAMS
    ):
        yield f"{place}: an adapter imports {name}, which stands on it"
    if parts[0] == "multiring" and len(parts) > 1 and parts[1] in ADAPTERS - {adapter}:
        yield f"{place}: the {adapter} adapter imports {name}, another adapter"


def main() -> int:
    findings = [*include_findings(), *import_findings()]
    print("\n".join(findings) if findings else "layers: every include and import goes the right way")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
