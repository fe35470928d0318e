"""The layout of transformers.js: its files, the keys of config.json, and the tokens that it writes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from processor import needs_vnni
from tiny_models import write_tiny
from transformers_js import PROMPTS, clear_tokens, library

from carryall import export
from carryall.cli import carryall
from carryall.errors import OutputExistsError
from carryall.exporter.demo import demo_path
from carryall.graph_opt.compare.runners import PortableRunner

ort = pytest.importorskip("onnxruntime")
TOKENS = 12
GENERATE = """
import { env, AutoModelForCausalLM, AutoTokenizer } from "@huggingface/transformers";
const [folder, name, count, ...prompts] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = folder;
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModelForCausalLM.from_pretrained(name);
const results = [];
for (const prompt of prompts) {
  const inputs = tokenizer(prompt);
  const ids = await model.generate({ ...inputs, max_new_tokens: Number(count), do_sample: false });
  results.push(ids.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number));
}
console.log(JSON.stringify(results));
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "dtype", "name"),
    [
        (None, "fp32", "model.onnx"),
        ("int4", "q4", "model_q4.onnx"),
        ("int8", "q8", "model_quantized.onnx"),
        ("int8-dynamic", "q8", "model_quantized.onnx"),
    ],
)
def test_files_and_keys(method: str | None, dtype: str, name: str, tmp_path: Path) -> None:
    checkpoint = write_tiny("llama", tmp_path / "checkpoint", hidden_size=64, intermediate_size=64)
    report = export(checkpoint, tmp_path / "web", quantize=method, layout="transformers.js")
    files = {str(path.relative_to(report.path)) for path in report.path.rglob("*") if path.is_file()}
    assert {f"onnx/{name}", f"onnx/{name}_data", "config.json", "tokenizer.json"} <= files
    assert "carryall.json" not in files
    assert report.bytes == sum((report.path / file).stat().st_size for file in files)
    before = json.loads((checkpoint / "config.json").read_text())
    config: dict[str, Any] = json.loads((report.path / "config.json").read_text())
    assert config.pop("transformers.js_config") == {"dtype": dtype, "use_external_data_format": {name: 1}}
    assert config == before
    inputs = ort.InferenceSession(report.path / "onnx" / name).get_inputs()
    assert {value.shape[0] for value in inputs} == {"batch_size"}


def test_the_graph_is_that_of_the_package(tmp_path: Path) -> None:
    checkpoint = write_tiny("qwen3", tmp_path / "checkpoint")
    export(checkpoint, tmp_path / "package")
    export(checkpoint, tmp_path / "web", layout="transformers.js")
    tokens = {0: np.arange(9)}
    expected = PortableRunner(tmp_path / "package" / "model.onnx").forward(tokens)[0]
    found = PortableRunner(tmp_path / "web" / "onnx" / "model.onnx").forward(tokens)[0]
    np.testing.assert_array_equal(found, expected)


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "model.onnx")

    monkeypatch.setattr(onnx, "save_model", full)
    with pytest.raises(OSError, match="No space left"):
        export(checkpoint, tmp_path / "web", layout="transformers.js")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "file").touch()
    with pytest.raises(OutputExistsError):
        export(checkpoint, tmp_path / "web", layout="transformers.js")


def test_the_command(tmp_path: Path) -> None:
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")
    arguments = ["export", str(checkpoint), str(tmp_path / "web"), "--layout", "transformers.js", "-q"]
    done = CliRunner().invoke(carryall, arguments)
    assert done.exit_code == 0, done.output
    onnx.load(tmp_path / "web" / "onnx" / "model.onnx")
    assert CliRunner().invoke(carryall, [*arguments[:-2], "flat"]).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    # onnxruntime-node adds 8-bit products with saturation without VNNI; its option against that fails for
    # weights that products share.
    "method",
    [None, "int4", "int8", pytest.param("int8-dynamic", marks=needs_vnni)],
)
def test_it_writes_the_tokens_of_carryall(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    export(demo_path(), tmp_path / "web", quantize=method, layout="transformers.js")
    package = export(demo_path(), tmp_path / "package", quantize=method).path
    expected = clear_tokens(package, TOKENS)
    script = library() / "generate.mjs"
    script.write_text(GENERATE)
    command = ["node", str(script), str(tmp_path), "web", str(TOKENS), *PROMPTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
