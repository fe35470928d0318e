"""The threat model names tests that exist, and what holds for the whole package."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "threat_model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
PACKAGE = ("cli", "client", "exporter", "graph_opt", "providers", "runtime", "storage")


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_tests_that_the_page_names_exist(path: str) -> None:
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    there = {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for each, name in NAMED if each == path} - there == set()


def test_each_threat_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| -")]
    without = [row for row in rows if "::test_" not in row and not row.startswith("| threat |")]
    assert (len(rows) > 30, without) == (True, [])


@functools.cache
def nodes() -> list[tuple[str, ast.Call | ast.Import | ast.ImportFrom]]:
    """The calls and imports of the package, each with its file."""
    found = []
    for path in (path for folder in PACKAGE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call | ast.Import | ast.ImportFrom):
                found.append((path.relative_to(ROOT).as_posix(), node))
    return found


def calls(name: str) -> list[tuple[str, str]]:
    """The files and calls of a function or method in the package."""
    return [
        (path, ast.unparse(node))
        for path, node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


def imported(*names: str) -> set[str]:
    """The files of the package that import one of these modules."""
    found = set()
    for path, node in nodes():
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        if any(module.split(".")[0] in names for module in modules):
            found.add(path)
    return found


@pytest.mark.long
def test_no_code_of_a_model_can_run() -> None:
    assert calls("eval") == calls("exec") == []
    own_process = {"providers/runners/runner_process.py"}  # exchanges objects with its own child process
    assert imported("pickle", "dill", "joblib", "marshal", "torch") == own_process
    trusting = [call for folder in PACKAGE for call in _mentions(folder, "trust_remote_code=True")]
    assert trusting == []


def _mentions(folder: str, text: str) -> list[str]:
    return [str(path) for path in (ROOT / folder).rglob("*.py") if text in path.read_text(encoding="utf-8")]


SESSION = """
import onnx
from carryall.providers.ort import ort
graph = '<ir_version: 10, opset_import: ["": 21]> g (float[1] x) => (float[1] y) {y = Abs(x)}'
model = onnx.parser.parse_model(graph)
ort.load_onnxruntime("a test").InferenceSession(model.SerializeToString()).run(None, {"x": [1.0]})
"""


def test_onnxruntime_sends_and_keeps_nothing(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", SESSION], env=environment, timeout=60, check=True)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.long
def test_nothing_is_sent_unless_configured() -> None:
    """Only named files may import a library that opens connections to others."""
    clients = ("requests", "httpx", "aiohttp", "urllib3", "http", "ftplib", "smtplib", "telnetlib")
    assert imported(*clients) == {
        "runtime/program/service.py",  # to the address that a program is run on
        "runtime/engine/requests/prefill_client.py",  # to --prefill-server
    }
    assert {path for path, _ in calls("open_connection") + calls("create_connection")} == {
        "runtime/service/core/fetching.py",  # to --image-domain
    }
