"""The public names exist, and importing the package stays cheap."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import carryall

HEAVY = (
    *("onnxruntime", "openvino", "grpc", "torch", "transformers", "rich.progress"),
    *("onnx_ir", "onnx", "onnx.reference", "onnxscript", "sympy"),
)


def test_every_name_of_the_package_is_there() -> None:
    assert sorted(set(carryall.__all__)) == sorted(carryall.__all__)
    for name in carryall.__all__:
        assert getattr(carryall, name) is not None
    assert set(carryall.__all__) <= set(dir(carryall))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = carryall.LLMM


def module_names() -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(carryall.__path__, "carryall.")]
    return [name for name in names if "_pb2" not in name and not name.endswith("__main__")]


@pytest.mark.parametrize("name", module_names())
def test_all_is_true_wherever_it_stands(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [item for item in exported if not hasattr(module, item)] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        "import carryall",
        "from carryall import SamplingParams, CarryallError",
        "from carryall import LLM, AsyncLLM",
        "import carryall.cli",
        "from click.testing import CliRunner; from carryall.cli import carryall\n"
        "assert CliRunner().invoke(carryall, ['--help']).exit_code == 0",
    ],
)
def test_light_imports_stay_light(code: str) -> None:
    program = f"import sys\n{code}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
