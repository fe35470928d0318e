"""Dependencies point one way, as the table in docs/architecture.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "exporter", "graph_opt", "proto", "providers", "runtime")

# folder -> what it may import of carryall besides itself. runtime.errors is a leaf for everybody.
ALLOWED: dict[str, tuple[str, ...]] = {
    "exporter": (),
    "graph_opt": (),
    "proto": (),
    "providers": ("graph_opt",),
    "runtime": ("exporter", "graph_opt", "proto", "providers"),
    "cli": ("exporter", "graph_opt", "proto", "providers", "runtime", "__init__"),
}
TENSOR_RUNTIMES = {"onnxruntime", "openvino", "torch", "tensorflow"}
PURE = ("runtime/engine", "exporter", "graph_opt/passes", "graph_opt/rules", "graph_opt/lower")


def modules(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def imports(path: Path) -> Iterator[str]:
    """Yield what a module imports, absolute, with carryall's own modules starting with a dot."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            prefix = "." + ".".join(part for part in base if part)
            # `from . import x` may name a module or a value; both lie in the same folder.
            yield from (f"{prefix.rstrip('.')}.{alias.name}" for alias in node.names)


def test_imports_inside_the_package_are_relative() -> None:
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in modules(folder)
        for name in imports(path)
        if name.split(".")[0] in {*FOLDERS, "carryall"}
    }
    assert wrong == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_the_architecture_allows(folder: str) -> None:
    allowed = {folder, *ALLOWED[folder]}
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in modules(folder)
        for name in imports(path)
        if name.startswith(".")
        and not name.startswith(".runtime.errors")
        and name.split(".")[1] not in allowed
    }
    if "__init__" in allowed:  # the command line may ask the package for its version
        wrong = {(path, name) for path, name in wrong if name.split(".")[1] in FOLDERS}
    assert wrong == set()


@pytest.mark.parametrize("folder", PURE)
def test_no_tensor_runtime_is_imported_where_none_is_needed(folder: str) -> None:
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in modules(folder)
        for name in imports(path)
        if name.split(".")[0] in TENSOR_RUNTIMES
    }
    assert wrong == set()


def test_a_wrong_direction_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "exporter").mkdir()
    (tmp_path / "exporter" / "bad.py").write_text("from ..runtime.llm import LLM\nfrom . import demo\n")
    assert set(imports(tmp_path / "exporter" / "bad.py")) == {".runtime.llm.LLM", ".exporter.demo"}
