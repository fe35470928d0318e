"""The layers of the package: allowed imports, and tests that mirror the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "client", "exporter", "graph_opt", "proto", "providers", "runtime", "storage")
TENSOR_RUNTIMES = {"onnxruntime", "openvino", "torch", "tensorflow"}
PURE = ("runtime/engine", "exporter", "graph_opt/passes", "graph_opt/analysis", "graph_opt/lower")

# The rooms from bottom to top. A module may import its own room and rooms of lines above its own.
LAYERS = """
errors contract records
options logs plain_json progress reports
storage
deferred_imports
proto exporter.demo exporter.gguf exporter.quantized graph_opt.graph
client
exporter.config
exporter.gguf.architectures exporter.gguf.projectors
exporter graph_opt.passes
exporter.layers
exporter.layouts exporter.encoders exporter.models
exporter.audio exporter.drafters exporter.encoders.families exporter.vision
graph_opt.analysis
graph_opt.experts graph_opt.shard
graph_opt.passes.cleanup graph_opt.passes.importing graph_opt.passes.normalize
graph_opt.passes.cache graph_opt.passes.fuse
graph_opt.compare graph_opt.pipeline graph_opt.quantize.calibration
graph_opt.quantize.algorithms
graph_opt.quantize.formats
graph_opt.quantize.search
graph_opt.quantize.any_model
graph_opt.quantize
graph_opt.lower
graph_opt.lower.attention graph_opt.lower.norms graph_opt.lower.outputs graph_opt.lower.products
graph_opt.lower.chain
graph_opt.lower.pipelines
providers
providers.kv providers.native
providers.runners
providers.ort
providers.host
providers.cuda
providers.openvino
providers.targets
runtime.types runtime.process
runtime.images
runtime.text runtime.engine.sampling
runtime.audio
runtime.text.parsers
runtime.engine.requests
runtime.engine.kv.tiers
runtime.engine.kv
runtime.engine.schedule
runtime.engine.speculation
runtime.engine
runtime.models
runtime.evaluate
runtime.tasks runtime.api
runtime.program
runtime.service.core
runtime.service.access runtime.service.telemetry
runtime.service.kserve
runtime.service.http.openai runtime.service.http.schemas
runtime.service.grpc runtime.service.http
runtime.service
runtime.batch.inputs
runtime.batch.jobs
runtime.batch.workers
runtime.batch
runtime.batch.online
runtime.cluster
cli
cli.verbs
"""
RANK = {room: rank for rank, line in enumerate(LAYERS.split("\n")) for room in line.split()}


def modules(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name)


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute names that a module imports; names of carryall's modules start with a dot."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            prefix = "." + ".".join(part for part in base if part)
            # `from . import x` may name a module or a value; both are in the same folder.
            yield from (f"{prefix.rstrip('.')}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str:
    """The room of an imported name: the longest known room that it begins with."""
    parts = name.lstrip(".").split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in RANK:
            return ".".join(parts[:length])
    return ""


def is_discovery(name: str) -> bool:
    """Return whether the import is of a folder with an empty ``__init__``, which a registry scans."""
    init = ROOT / name.lstrip(".").replace(".", "/") / "__init__.py"
    return init.is_file() and len(ast.parse(init.read_text()).body) == 1


@pytest.mark.long
def test_imports_inside_the_package_are_relative() -> None:
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in modules(folder)
        for name in imports(path)
        if name.split(".")[0] in {*FOLDERS, "carryall"}
    }
    assert wrong == set()


def test_data_classes_are_records() -> None:
    """Those of the standard library are compiled when a module is imported."""
    other = re.compile(r"^from dataclasses import .*\bdataclass\b", re.MULTILINE)
    assert [path for name in FOLDERS for path in modules(name) if other.search(path.read_text())] == []


def test_every_folder_is_a_room_of_the_table() -> None:
    folders = {".".join(path.relative_to(ROOT).parent.parts) for name in FOLDERS for path in modules(name)}
    assert {folder for folder in folders if folder not in RANK and has_modules(folder)} == set()


def has_modules(folder: str) -> bool:
    return any(path.name != "__init__.py" for path in (ROOT / folder.replace(".", "/")).glob("*.py"))


def test_onnx_files_are_read_in_one_place() -> None:
    """``ir.load`` refuses weights behind links."""
    readers = {path.name for folder in FOLDERS for path in modules(folder) if "ir.load(" in path.read_text()}
    assert readers == {"onnx_files.py"}


@pytest.mark.long
@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_points_upward(folder: str) -> None:
    wrong = set()
    for path in modules(folder):
        room = ".".join(path.relative_to(ROOT).parent.parts)
        for name in imports(path):
            if not name.startswith("."):
                continue
            target = room_of(name)
            if is_discovery(name):
                continue
            if target != room and RANK.get(target, -1) >= RANK.get(room, len(RANK)):
                wrong.add((str(path.relative_to(ROOT)), name))
    assert wrong == set()


@pytest.mark.parametrize("name", ["errors.py", "contract.py"])
def test_the_bottom_imports_nothing_of_carryall(name: str) -> None:
    assert [found for found in imports(ROOT / name) if found.startswith(".")] == []


# Names of the contract only; ``logits`` and ``input_ids`` occur in other interfaces too.
CONTRACT = (
    *("past_key_values", "seqlens_k", "total_sequence_length"),
    *("logits_positions", "last_hidden_state", "sliding_windows"),
)


@pytest.mark.long
def test_names_of_the_contract_are_spelled_once() -> None:
    """Counts string literals in code, not docstrings or sentences."""
    found = [
        (path.relative_to(ROOT).as_posix(), node.value)
        for folder in ("exporter", "graph_opt", "providers", "runtime/models")
        for path in modules(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
        if any(name in node.value for name in CONTRACT)
    ]
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize("folder", PURE)
def test_no_tensor_runtime_is_imported_where_none_is_needed(folder: str) -> None:
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in modules(folder)
        for name in imports(path)
        if name.split(".")[0] in TENSOR_RUNTIMES
    }
    assert wrong == set()


def test_tests_mirror_the_package() -> None:
    """A test folder is a room, and a test named after a module lies in that module's room."""
    homes: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in modules(folder):
            homes.setdefault(path.stem, set()).add(path.parent.relative_to(ROOT).as_posix())
    misplaced = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        room = path.parent.relative_to(ROOT / "tests").as_posix()
        if room in {".", "tools", "benchmarks", "public"}:
            continue
        named = {home for home in homes.get(path.stem.removeprefix("test_"), ()) if home.startswith(room)}
        if not (ROOT / room).is_dir() or (named and room not in named):
            misplaced.add(path.relative_to(ROOT).as_posix())
    assert misplaced == set()


def test_every_room_has_tests() -> None:
    untested = {
        room
        for room in RANK
        if "." in room
        and has_modules(room)
        and not any((ROOT / "tests" / room.replace(".", "/")).glob("test_*.py"))
    }
    assert untested == set()


def test_a_wrong_direction_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "exporter").mkdir()
    bad = tmp_path / "exporter" / "bad.py"
    bad.write_text("from ..runtime.api.llm import LLM\nfrom . import demo\n")
    assert set(imports(bad)) == {".runtime.api.llm.LLM", ".exporter.demo"}
    with pytest.raises(AssertionError, match="bad"):
        test_no_import_points_upward("exporter")


def test_hypothesis_bounds_no_times() -> None:
    """Its limits hold for an idle machine: under other load, correct tests would fail."""
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
