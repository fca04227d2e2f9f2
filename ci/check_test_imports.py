"""Finds names that tests import from other modules of the tests and that are not there. `make test` does not
import the files that it leaves out (tests/tiers.py), so it would not see this.

python ci/check_test_imports.py
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def defined(tree: ast.Module) -> set[str]:
    """The names that a module has at its top level."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)


def main() -> int:
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    findings = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests"):
                continue
            target = file_of(node.module or "")
            for alias in node.names:
                there = target is not None and alias.name in defined(trees[target])
                if not there and file_of(f"{node.module}.{alias.name}") is None:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    findings.append(f"{where}: {node.module} has no {alias.name}")
    print("\n".join(findings) if findings else "test imports: all names are there")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
