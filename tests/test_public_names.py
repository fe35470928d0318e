"""The public names exist, and importing the package stays cheap."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny

import carryall
from carryall.exporter.export import export_package

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


@pytest.mark.long
@pytest.mark.parametrize("name", module_names())
def test_all_is_true_wherever_it_stands(name: str) -> None:
    if name == "carryall.runtime.cluster.router":
        pytest.importorskip("ray")  # which alone imports it
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [item for item in exported if not hasattr(module, item)] == []


# What reads and changes graphs.
OPTIMIZER = ("onnx_ir", "onnx", "onnxscript", "sympy", "carryall.graph_opt.pipeline.pipeline")


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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, its package, and the package's ONNX file, all prepared in the cache."""
    checkpoint = write_tiny("llama", tmp_path_factory.mktemp("models") / "checkpoint")
    package = export_package(checkpoint, checkpoint.with_name("package")).path
    models = {"checkpoint": checkpoint, "package": package, "file": package / "model.onnx"}
    for model in models.values():
        carryall.LLM(model, max_slots=1).close()
    return models


@pytest.mark.long
@pytest.mark.parametrize("form", ["checkpoint", "package", "file"])
def test_a_prepared_model_runs_without_the_optimizer(form: str, prepared: dict[str, Path]) -> None:
    program = (
        "import sys\n"
        "from carryall import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], max_slots=1)\n"
        "(output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))\n"
        f"print(len(output.outputs[0].token_ids), [name for name in {OPTIMIZER!r} if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(prepared[form])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 []"


@pytest.mark.long
def test_run_prints_text_without_the_optimizer() -> None:
    unneeded = (*OPTIMIZER, "rich", "llguidance", "numpy.ma")
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from carryall.cli import carryall\n"
        "done = CliRunner().invoke(carryall, ['run', 'demo', 'def f(', '--max-tokens', '2'])\n"
        f"print(done.exit_code, [name for name in {unneeded!r} if name in sys.modules])"
    )
    carryall.LLM("demo", max_slots=1).close()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"
