"""The input that InferenceSession rejects, and its one-line errors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest

from carryall import InferenceSession
from carryall.errors import GraphError, ModelNotFoundError, ProviderUnavailableError, UsageError
from carryall.providers.ort import ort

RELU = ir.to_proto(
    ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> relu (float[n] x) => (float[n] y) { y = Relu(x) }'
    )
).SerializeToString()
# A provider in every onnxruntime wheel. It runs no ordinary node, so it stands for an incomplete device.
LACKING = "AzureExecutionProvider"


@pytest.fixture
def quiet() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def test_a_missing_provider_is_an_error() -> None:
    with pytest.raises(
        ProviderUnavailableError, match=r"CUDAExecutionProvider is not part of .*carryall\[cuda\]"
    ):
        InferenceSession(RELU, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def test_nodes_that_would_fall_to_the_cpu_are_an_error(quiet: Any) -> None:
    with pytest.raises(ProviderUnavailableError, match="would fall back to another provider: Relu"):
        InferenceSession(RELU, quiet, providers=[LACKING])
    # The caller's options are unchanged and work for the next session.
    assert InferenceSession(RELU, quiet, providers=["cpu"]).get_providers() == [ort.CPU]


def test_the_cpu_may_be_asked_for_as_second_choice() -> None:
    session = InferenceSession(RELU, providers=[LACKING, "cpu"])
    assert session.get_providers() == [LACKING, ort.CPU]


def test_set_providers_is_as_strict(quiet: Any) -> None:
    session = InferenceSession(RELU, quiet, providers=["cpu"])
    with pytest.raises(ProviderUnavailableError, match="CUDAExecutionProvider"):
        session.set_providers(["CUDAExecutionProvider"])
    assert session.get_providers() == [ort.CPU]


def test_allow_fallback_permits_both() -> None:
    assert InferenceSession(RELU, providers=[LACKING], allow_fallback=True).get_providers()[-1] == ort.CPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnxruntime warns of the provider it lacks
        session = InferenceSession(RELU, providers=["CUDAExecutionProvider"], allow_fallback=True)
    assert session.get_providers() == [ort.CPU]


def test_a_provider_that_silently_disappears_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime drops a provider whose library does not load, and uses the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", ort.CPU])
    with (
        pytest.warns(UserWarning, match="is not in available provider names"),
        pytest.raises(
            ProviderUnavailableError, match=r"could not start for the given model; .* fell back to CPU"
        ),
    ):
        InferenceSession(RELU, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nowhere/model.onnx", ModelNotFoundError, "there is no model file nowhere/model.onnx"),
        (Path("nowhere.onnx"), ModelNotFoundError, "nowhere.onnx"),
        (b"not a model", GraphError, "onnxruntime cannot load the given model: .*protobuf"),
        (b"", GraphError, "onnxruntime cannot load the given model"),
        (RELU.replace(b"Relu", b"Rulu"), GraphError, "Rulu"),
        (RELU.replace(b"\x10\x15", b"\x10\x63"), GraphError, r"opset.*`carryall optimize` lowers the opset"),
    ],
)
def test_bad_models(source: Any, error: type[Exception], message: str, quiet: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        InferenceSession(source, quiet, providers=["cpu"])
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_named(tmp_path: Path, quiet: Any) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes(RELU[:-20])
    with pytest.raises(GraphError, match=r"cut\.onnx"):
        InferenceSession(path, quiet, providers=["cpu"])


def test_unknown_provider_names() -> None:
    with pytest.raises(UsageError, match=r"unknown provider 'gpu'; known providers: .*cpu"):
        InferenceSession(RELU, providers=["gpu"])
    with pytest.raises(UsageError, match=r"must be a sequence of names, such as \['cpu'\]"):
        InferenceSession(RELU, providers="cpu")


def test_a_file_that_is_not_a_model_is_refused() -> None:
    with pytest.raises(UsageError, match="a model is a file, bytes or a model object, not 17"):
        InferenceSession(17)  # type: ignore[arg-type]
