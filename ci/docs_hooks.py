"""What `make docs` adds to mkdocs: the front page, the package as users import it, and a check of names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pygments.formatters import HtmlFormatter

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "build" / "docs"
_LAYOUT = """
.wy-nav-content { max-width: 64rem; }
.rst-content pre, .rst-content .highlight pre { overflow-x: auto; white-space: pre; font-size: 80%; }
.rst-content .highlight pre { border: 0; margin: 0; padding: 0; }
.rst-content table { font-size: 90%; }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
.wy-side-nav-search { position: sticky; top: 0; z-index: 1; }
.wy-side-nav-search > a.tutorial { font-size: 90%; margin: 0.5rem 0 0; padding: 0; }
"""
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*)([^)#\s:]+)(#[^)]*)?\)")


def on_startup(**_: Any) -> None:
    """Lays the package out as the wheel does, by links: its names are read without an installation."""
    table = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    for name in sorted(table):
        _link(
            _PACKAGE / name, _ROOT / table[name], {other for other in table if other.startswith(f"{name}/")}
        )


def _link(target: Path, source: Path, inner: set[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.is_symlink():
            old.unlink()
    taken = {Path(name).name for name in inner}
    for entry in source.iterdir():
        if entry.name not in taken and entry.name != "__pycache__" and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)


def on_files(files: Any, config: Any) -> Any:
    """Makes the README the front page, and adds the stylesheet."""
    text = (_ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    files.append(File.generated(config, "code.css", content=_style()))
    return files


def _style() -> str:
    """The stylesheet: colours of code, pages as wide as its lines, and a search that does not scroll away."""
    return f"{HtmlFormatter().get_style_defs('.highlight')}\n{_LAYOUT}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Names files that are not part of the site instead of linking to them."""
    folder = (_ROOT / "docs" / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        label, up, name, _anchor = link.groups()
        path = (folder / up / name).resolve()
        outside = not path.is_relative_to(_ROOT / "docs") or not path.exists()
        if not outside or name in ("index.md",):
            return link.group()
        real = path if path.exists() else _ROOT / name
        where = str(real.relative_to(_ROOT)) if real.is_relative_to(_ROOT) else name
        return f"`{where}`" if label == where or label == real.name else f"{label} (`{where}`)"

    return _LINK.sub(plain, markdown)


def on_post_build(config: Any) -> None:
    """Fails unless the reference has every public name."""
    pages = (Path(config.site_dir) / "reference").glob("*.html")
    there = {name for page in pages for name in re.findall(r'id="(multiring[\w.]*)"', page.read_text())}
    wanted = set()
    for init in [*_PACKAGE.glob("multiring/__init__.py"), *_PACKAGE.glob("multiring/*/__init__.py")]:
        module = ".".join(init.parent.relative_to(_PACKAGE).parts)
        if (_ROOT / "docs" / "reference" / f"{init.parent.name}.md").exists():
            wanted |= {f"{module}.{name}" for name in _public(init)}
    there |= {name.rpartition(".")[0] for name in there}  # a module whose members are shown
    missing = sorted(name for name in wanted - there if not name.endswith("__version__"))
    if missing:
        raise PluginError(f"the reference lacks {', '.join(missing)}")


def _public(init: Path) -> list[str]:
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []
