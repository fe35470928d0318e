"""Opening onnxruntime sessions strictly, and the error of each failure."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest

from carryall.errors import (
    GraphError,
    MissingExtraError,
    ModelNotFoundError,
    ProviderRuntimeError,
    ProviderUnavailableError,
)
from carryall.providers.ort import ort

RELU = '<ir_version: 10, opset_import: ["" : 21]> relu (float[n] x) => (float[n] y) { y = Relu(x) }'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ir.save(ir.from_onnx_text(RELU), tmp_path / "relu.onnx")
    return tmp_path / "relu.onnx"


@pytest.fixture
def fresh_import() -> Iterator[None]:
    ort.load_onnxruntime.cache_clear()
    ort._conflict.cache_clear()
    yield
    ort.load_onnxruntime.cache_clear()
    ort._conflict.cache_clear()


def test_a_session_has_only_the_asked_provider(model: Path) -> None:
    session = ort.open_session(
        model, ort.CPU, ort.session_options(1, {"session.intra_op.allow_spinning": "0"})
    )
    assert session.get_providers() == [ort.CPU]
    assert session.get_session_options().intra_op_num_threads == 1
    assert ort.open_session(model.read_bytes(), ort.CPU).get_inputs()[0].name == "x"


def test_warnings_of_providers_are_silent_while_a_session_opens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime-gpu 1.31 warns of every session with a ``device_id`` that no plugin has such a device."""
    levels: list[int] = []
    monkeypatch.setattr(onnxruntime, "set_default_logger_severity", levels.append)
    ort.open_session(model, ort.CPU)
    assert levels == [4, 2]
    with pytest.raises(GraphError):
        ort.open_session(b"broken", ort.CPU)
    assert levels == [4, 2, 4, 2]


def test_a_provider_that_this_build_lacks(model: Path) -> None:
    with pytest.raises(
        ProviderUnavailableError, match=r"TensorrtExecutionProvider is not part of .*onnxruntime \d"
    ):
        ort.open_session(model, "TensorrtExecutionProvider")


def test_nodes_that_the_provider_lacks(model: Path) -> None:
    with pytest.raises(ProviderUnavailableError, match=r"1 nodes of .*relu\.onnx cannot run on Azure"):
        ort.open_session(model, "AzureExecutionProvider")


def test_bad_files_are_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nothing\.onnx"):
        ort.open_session(tmp_path / "nothing.onnx", ort.CPU)
    model.write_bytes(b"\x00\x01 garbage")
    with pytest.raises(GraphError, match=r"cannot load .*relu\.onnx"):
        ort.open_session(model, ort.CPU)


def test_missing_external_data_is_a_graph_error(tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> '
    )
    path = tmp_path / "model.onnx"
    ir.save(
        ir.from_onnx_text(text + "{ y = Add(x, w) }"), path, external_data="w.data", size_threshold_bytes=0
    )
    (tmp_path / "w.data").unlink()
    with pytest.raises(GraphError, match=r"model\.onnx.*w\.data"):
        ort.open_session(path, ort.CPU)


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (MemoryError(), ProviderRuntimeError, "not enough memory to load the given model"),
        (RuntimeError("x Failed to allocate memory for 4096"), ProviderRuntimeError, "not enough memory"),
        (type("EPFail", (Exception,), {})("device lost"), ProviderUnavailableError, "failed while loading"),
        (
            RuntimeError("X::CreateProvider(o) no path"),
            ProviderUnavailableError,
            "failed while loading",
        ),
        (RuntimeError("line one\nline two"), GraphError, "line one line two"),
    ],
)
def test_failures_while_loading_become_typed(
    failure: Exception, error: type[Exception], message: str
) -> None:
    found = ort.load_error(failure, "the given model", ["CUDAExecutionProvider"])
    assert type(found) is error
    assert message in str(found)


def install(folder: Path, wheels: dict[str, str], file: str = "onnxruntime/__init__.py") -> None:
    for name, version in wheels.items():
        record = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD"
        record.parent.mkdir()
        record.write_text(f"{record.parent.name}/METADATA,sha256=x,1\n{file},sha256=x,1\n")


@pytest.mark.usefixtures("fresh_import")
def test_two_wheels_over_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ProviderUnavailableError) as caught:
        ort.load_onnxruntime("provider 'cpu'")
    assert "onnxruntime 1.31.1, onnxruntime-gpu 1.31.0" in str(caught.value)
    assert "pip uninstall -y onnxruntime onnxruntime-gpu && pip install" in str(caught.value)
    assert "'carryall[cpu]' or 'carryall[cuda]'" in str(caught.value)


def test_a_plugin_beside_onnxruntime_is_no_conflict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """onnxruntime-qnn 2 installs a folder of its own."""
    install(tmp_path, {"onnxruntime-qnn": "2.7.0"}, "onnxruntime_qnn/__init__.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert ort.installed_wheels() == {}


def test_a_wheel_without_a_record_holds_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime-1.30.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert ort.installed_wheels() == {"onnxruntime": "1.30.0"}


def test_one_wheel_is_no_conflict() -> None:
    assert ort.wheel_conflict(ort.installed_wheels()) is None
    assert ort.wheel_conflict({}) is None


def failing_import(error: Exception) -> Callable[..., Any]:
    real = builtins.__import__

    def imports(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "onnxruntime":
            raise error
        return real(name, *args, **kwargs)

    return imports


@pytest.mark.usefixtures("fresh_import")
def test_no_wheel_prints_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")
    monkeypatch.setattr(builtins, "__import__", failing_import(missing))
    with pytest.raises(MissingExtraError, match=r"provider 'cpu' needs .*pip install 'carryall\[cpu\]'"):
        ort.load_onnxruntime("provider 'cpu'")


@pytest.mark.usefixtures("fresh_import")
def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ImportError("libcudart.so.13: cannot open shared object file")
    monkeypatch.setattr(builtins, "__import__", failing_import(broken))
    with pytest.raises(ProviderUnavailableError, match=r"libcudart\.so\.13"):
        ort.load_onnxruntime("provider 'cuda'")
