"""``carryall optimize`` and ``carryall verify``."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from tiny_models import write_tiny

from carryall.cli import carryall
from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.providers import provider_names

BREAKING_SOURCE = '''
import onnx_ir as ir

class BreakingPass(ir.passes.InPlacePass):
    """Doubles the logits."""

    def call(self, model):
        logits = model.graph.outputs[0]
        doubled = ir.node("Add", [logits, logits])
        doubled.outputs[0].shape, doubled.outputs[0].dtype = logits.shape, logits.dtype
        logits.name, doubled.outputs[0].name = "half", "logits"
        model.graph.append(doubled)
        model.graph.outputs[0] = doubled.outputs[0]
        return ir.passes.PassResult(model, modified=True)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimize")
    write_tiny("llama", folder / "source")
    return export_package(folder / "source", folder / "package").path


@pytest.fixture
def breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "breaking_pass_module.py").write_text(BREAKING_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "breaking_pass_module", raising=False)
    return "breaking_pass_module:BreakingPass"


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args], env={"COLUMNS": "110"})


def test_lowering_to_the_cpu_is_reported_and_verified(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "cpu"
    result = run(
        "optimize", package, out, "--target", "cpu", "--verify", "--report", tmp_path / "report.json"
    )
    assert result.exit_code == 0, result.output
    assert "GroupQueryAttention" in result.stdout
    assert re.search(r"greedy tokens equal: (\d+) of \1;", result.stdout)
    assert "8 tokens after 120 cached ones" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["before"]["Attention"] == report["after"]["com.microsoft::GroupQueryAttention"]
    names = {value.name for value in ir.load(out / "model.onnx").graph.inputs}
    assert {"input_ids", "seqlens_k", "logits_positions"} <= names
    assert (out / "tokenizer.json").is_file()
    assert run("verify", package, out).exit_code == 0


def test_json_is_one_document(package: Path, tmp_path: Path) -> None:
    result = run("optimize", package, tmp_path / "out", "--target", "cpu", "--json")
    assert json.loads(result.stdout)["passes"]
    assert result.stderr == ""


def test_an_onnx_file_becomes_an_onnx_file(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    assert run("optimize", package / "model.onnx", out).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data"]
    again = run("optimize", package / "model.onnx", out)
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert "exists" in again.stderr


def small(path: Path, body: str, opset: int = 17, **options: Any) -> Path:
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float16[n, 4] x) => (float16[n, 4] y)
        {{ {body} }}"""
    weight = ir.tensor(np.eye(4, dtype=np.float16), name="w")
    ir.save(ir.from_onnx_text(text, initializers=[weight]), path, **options)
    return path


@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_a_small_file_stays_one_file(target: str, tmp_path: Path) -> None:
    body = "t = Transpose<perm = [1, 0]>(x) u = Transpose<perm = [1, 0]>(t) y = MatMul(u, w)"
    out = tmp_path / "out.onnx"
    assert run("optimize", small(tmp_path / "a.onnx", body), out, "--target", target).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "out.onnx"]
    assert [node.op_type for node in ir.load(out).graph] == ["MatMul"]
    assert out.stat().st_size < (tmp_path / "a.onnx").stat().st_size
    two = small(tmp_path / "b.onnx", body, external_data="b.data", size_threshold_bytes=0)
    assert run("optimize", two, tmp_path / "c.onnx", "--target", target).exit_code == 0
    assert (tmp_path / "c.onnx.data").is_file()


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_a_file_without_anything_to_rewrite_is_copied(opset: int, tmp_path: Path) -> None:
    source, out = small(tmp_path / "a.onnx", "t = MatMul(x, w) y = Exp(t)", opset), tmp_path / "out.onnx"
    result = run("optimize", source, out, "--verify")
    assert result.exit_code == 0, result.output
    assert "no pass found anything to rewrite: the model is copied" in result.stdout
    assert out.read_bytes() == source.read_bytes()
    two = small(
        tmp_path / "b.onnx", "y = MatMul(x, w)", opset, external_data="b.data", size_threshold_bytes=0
    )
    assert run("optimize", two, tmp_path / "c.onnx").exit_code == 0
    written = ir.load(tmp_path / "c.onnx")
    assert (written.opset_imports[""], [node.op_type for node in written.graph]) == (opset, ["MatMul"])


def test_a_pass_of_one_s_own_runs(package: Path, tmp_path: Path, breaking: str) -> None:
    result = run("optimize", package, tmp_path / "out", "--pass", breaking)
    assert result.exit_code == 0, result.output
    assert "Breaking" in result.stdout
    record = json.loads((tmp_path / "out" / "carryall.json").read_text())
    assert record["passes"][-1] == "Breaking"
    differs = run("verify", package, tmp_path / "out", "--json")
    assert differs.exit_code == 1
    assert json.loads(differs.stdout)["passed"] is False
    assert differs.stderr.startswith("error: ")


@pytest.mark.long
def test_verify_refuses_to_write_a_graph_that_differs(package: Path, tmp_path: Path, breaking: str) -> None:
    result = run("optimize", package, tmp_path / "out", "--pass", breaking, "--verify")
    assert result.exit_code == 1
    assert "above the limit" in result.stderr
    assert not (tmp_path / "out").exists()
    assert (
        run("optimize", package, tmp_path / "out", "--pass", breaking, "--verify", "--max-kl", 100).exit_code
        == 0
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "gpu"], "choose one of portable, cpu"),
        (["--target", "cpu", "--disable", "Nope"], "GroupQueryAttention"),
        (["--pass", "nope"], "package.module.Class"),
        (["--pass", "no_such_module_anywhere:Pass"], "cannot be imported"),
        (["--pass", "json:JSONDecoder"], "neither a subclass of onnx_ir.passes.PassBase"),
    ],
)
def test_wrong_use_gets_one_line_and_writes_nothing(
    options: list[str], words: str, package: Path, tmp_path: Path
) -> None:
    result = run("optimize", package, tmp_path / "out", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_graph_that_does_not_say_its_context_needs_the_option(package: Path, tmp_path: Path) -> None:
    model = ir.load(package / "model.onnx")
    model.graph.metadata_props.pop("context_length", None)
    model.metadata_props.pop("context_length", None)
    ir.save(model, tmp_path / "bare.onnx", external_data="bare.data")
    arguments = ("optimize", tmp_path / "bare.onnx", tmp_path / "out.onnx", "--target", "cpu")
    assert "--context-length" in run(*arguments).stderr
    assert run(*arguments, "--context-length", 64).exit_code == 0


@pytest.mark.long
def test_verify_wants_the_same_vocabulary_and_decoders(package: Path, tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> net (float[3] x) => (float[3] y) { y = Relu(x) }'
    ir.save(ir.from_onnx_text(text), tmp_path / "net.onnx")
    assert run("verify", package, tmp_path / "net.onnx").exit_code == 1
    result = run("verify", package, "demo")
    assert result.exit_code == 2
    assert "different vocabulary sizes" in result.stderr


def test_the_report_is_a_page_with_the_error_of_each_layer(package: Path, tmp_path: Path) -> None:
    int4, page = tmp_path / "int4", tmp_path / "report.html"
    assert run("quantize", package, int4, "--method", "int4-fast", "--block-size", 16).exit_code == 0
    result = run(
        "optimize", int4, tmp_path / "out", "--target", "cpu", "--reference", package, "--report", page
    )
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "Error of quantized weights" in text
    assert "model.layers.N.mlp.down_proj.weight" in text
    assert "MatMulNBits" in text


def test_a_pass_may_lie_in_the_working_folder(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passes_beside_me.py").write_text(BREAKING_SOURCE)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    result = run("optimize", package, "out", "--pass", "passes_beside_me.BreakingPass")
    assert result.exit_code == 0, result.output
    assert "Breaking" in result.stdout
    assert sys.path == path
    sys.modules.pop("passes_beside_me", None)


def test_a_traced_model_beside_its_configuration_is_a_model(package: Path, tmp_path: Path) -> None:
    """Optimum writes such folders. config.json, not the graph, has the context length."""
    folder = tmp_path / "traced"
    folder.mkdir()
    model = ir.load(package / "model.onnx")
    model.metadata_props.pop("context_length", None)
    model.graph.metadata_props.pop("context_length", None)
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(package / name, folder / name)
    generated = run("run", folder, "abc", "--raw", "--max-tokens", 3, "--temperature", 0, "--json")
    assert generated.exit_code == 0, generated.output
    of_package = run("run", package, "abc", "--raw", "--max-tokens", 3, "--temperature", 0, "--json")
    assert json.loads(generated.stdout)["text"] == json.loads(of_package.stdout)["text"]
    lowered = run("optimize", folder, tmp_path / "cpu", "--target", "cpu", "--verify")
    assert lowered.exit_code == 0, lowered.output
    assert Package.open(tmp_path / "cpu").record.context_length == 128
    assert (
        run("quantize", folder, tmp_path / "int8", "--method", "int8-fast", "--block-size", 16).exit_code == 0
    )
    (folder / "config.json").unlink()
    refused = run("run", folder, "abc")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "config.json" in refused.stderr


@pytest.mark.parametrize("width", [60, 80])
def test_operators_names_are_whole_in_a_narrow_terminal(package: Path, tmp_path: Path, width: int) -> None:
    arguments = ["optimize", str(package), str(tmp_path / "out"), "--target", "cpu", "--explain"]
    result = CliRunner().invoke(carryall, arguments, env={"COLUMNS": str(width)})
    assert "com.microsoft::SkipSimplifiedLayerNormalization" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width


OLD = """<ir_version: 3, opset_import: ["": {opset}]>
net (float[1, 2, 3, 3] x, float[2] s) => (float[1, 2, 3, 3] y) <float[2] s = {{1, 2}}> {{
    i = Identity(x) n = BatchNormalization <spatial = {spatial}> (i, s, s, s, s)
    y = Dropout <ratio = 0.5> (n) }}"""


@pytest.mark.parametrize("target", ["portable", *provider_names()])
def test_a_model_that_is_no_decoder_needs_no_context_and_no_logits(target: str, tmp_path: Path) -> None:
    ir.save(ir.from_onnx_text(OLD.format(opset=7, spatial=1)), tmp_path / "net.onnx")
    result = run("optimize", tmp_path / "net.onnx", tmp_path / "out.onnx", "--target", target, "--verify")
    assert result.exit_code == 0, result.output
    made = ir.load(tmp_path / "out.onnx")
    assert made.opset_imports[""] == 18
    assert [node.op_type for node in made.graph] == ["BatchNormalization"]


def test_a_model_that_cannot_be_raised_keeps_its_opset_and_the_report_says_why(tmp_path: Path) -> None:
    ir.save(ir.from_onnx_text(OLD.format(opset=8, spatial=0)), tmp_path / "net.onnx")
    result = run("optimize", tmp_path / "net.onnx", tmp_path / "out.onnx", "--explain")
    assert result.exit_code == 0, result.output
    assert "the model keeps opset 8: opset 9 removed spatial" in " ".join(result.stdout.split())
    made = ir.load(tmp_path / "out.onnx")
    assert made.opset_imports[""] == 8
    assert [node.op_type for node in made.graph] == ["BatchNormalization"]


def test_it_says_why_a_graph_is_optimized_as_any_model(tmp_path: Path) -> None:
    """Attention that sees all tokens: its graph cannot have a KV cache."""
    text = """<ir_version: 11, opset_import: ["" : 23]>
    g (int64[B, S] input_ids) => (float[B, S, 8] logits) {
        x = Gather(w, input_ids)
        [attn] logits = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x) }"""
    weights = [ir.tensor(np.ones((4, 8), np.float32), name="w")]
    ir.save(ir.from_onnx_text(text, initializers=weights), tmp_path / "net.onnx")
    report = tmp_path / "report.json"
    result = run("optimize", tmp_path / "net.onnx", tmp_path / "out.onnx", "--explain", "--report", report)
    assert result.exit_code == 0, result.output
    reason = "AddCache refused attn: it has no mask, so it is not causal"
    said = f"Optimized as any model, not as a decoder: {reason}."
    assert said in " ".join(result.stdout.split())
    assert json.loads(report.read_text())["not_decoder"] == reason
