"""Imports go one way: the heart knows neither training nor data nor programs, and the core needs few packages."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "meshtrain"
FILES = sorted(SOURCE.rglob("*.py"))

ALLOWED = {
    "parallel": {"errors"},
    "models": {"parallel", "errors"},
    "state": {"mesh", "parallel", "errors"},
    "data": {"errors"},
    "train": {"parallel", "errors"},
    "convert": {"state", "models", "parallel", "errors"},
}
"""Folder -> the parts of meshtrain, besides itself, that it may import."""
CORE = {"torch", "safetensors", "einops", "tyro", "rich", "meshtrain"}
EXTRAS = {"tokenizers", "pyarrow", "transformers"}
"""Packages that are imported only inside the functions that need them."""


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of each import in a file; what only type checkers see is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("meshtrain", *path.relative_to(SOURCE).parent.parts)
    yield from _walk(tree.body, package, top_level_only)


def _walk(body: list[ast.stmt], package: tuple[str, ...], top_level_only: bool) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _walk(node.orelse, package, top_level_only)
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from _walk(getattr(node, name, []), package, top_level_only)
            for handler in getattr(node, "handlers", []):
                yield from _walk(handler.body, package, top_level_only)


def own_part(name: str) -> str | None:
    """The part of meshtrain that a dotted name belongs to, as in "meshtrain.parallel.plan.ParallelPlan" -> "parallel"."""
    parts = name.split(".")
    return parts[1] if parts[0] == "meshtrain" and len(parts) > 1 and not parts[1].startswith("__") else None


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_is_below_it(folder: str) -> None:
    files = [path for path in FILES if path.relative_to(SOURCE).parts[0] == folder]
    assert files
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in files
        for name, line in imports(path)
        if (part := own_part(name)) is not None and part not in ALLOWED[folder] | {folder}
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_but_the_tools_imports_the_programs() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in FILES
        if path.relative_to(SOURCE).parts[0] not in ("recipes", "__main__.py")
        for name, line in imports(path)
        if own_part(name) == "recipes"
    ]
    assert not wrong, "\n".join(wrong)


def test_core_needs_few_packages_and_extras_are_imported_where_used() -> None:
    wrong = []
    for path in FILES:
        for name, line in imports(path):
            if name.split(".")[0] not in CORE | EXTRAS | sys.stdlib_module_names:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
        for name, line in imports(path, top_level_only=True):
            if name.split(".")[0] in EXTRAS:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name} at the top of the file")
    assert not wrong, "\n".join(wrong)


def test_the_walker_sees_every_kind_of_import(tmp_path: Path) -> None:
    """A check of the checker: each of these would break a rule."""
    code = "import numpy\ntry:\n    from pyarrow import parquet\nexcept ImportError:\n    import tokenizers.models\ndef f():\n    import transformers\n"
    tree = ast.parse(code + "class C:\n    from ..train import loop\nfrom . import plan\n").body
    names = [name for name, _ in _walk(tree, ("meshtrain", "parallel"), False)]
    assert names == [
        "numpy", "pyarrow.parquet", "tokenizers.models", "transformers", "meshtrain.train.loop", "meshtrain.parallel.plan",
    ]  # fmt: skip
    assert "transformers" not in [name for name, _ in _walk(tree, ("meshtrain", "parallel"), True)]
