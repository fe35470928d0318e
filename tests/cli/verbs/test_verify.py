"""``carryall verify`` and ``carryall optimize --verify``."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall

WRONG_PASSES = '''
import onnx_ir as ir

from carryall.graph_opt.graph.edit import nodes_of
from carryall.graph_opt.passes.base import GraphPass


class HarmlessPass(GraphPass):
    """Renames a node."""

    def rewrite(self, graph):
        graph[0].name = "renamed"
        self.fired += 1


class WrongPass(GraphPass):
    """Reads each gate's sigmoid as a tanh."""

    def rewrite(self, graph):
        for node in nodes_of(graph, "Sigmoid"):
            node.op_type = "Tanh"
            self.fired += 1
'''
NET = """<ir_version: 10, opset_import: ["": 20]>
    net (float[batch, 3] x, int64[1] by) => (float[batch, 3] y, float[batch, 3] z)
    <float[3] w = {1.0, 2.0, 3.0}> { y = Mul(x, w) c = Cast<to = 1>(by) z = OP(y, c) }"""


@pytest.fixture
def wrong_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_passes_module.py").write_text(WRONG_PASSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_passes_module", raising=False)


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args])


def net(path: Path, op: str = "Add") -> Path:
    ir.save(ir.from_onnx_text(NET.replace("OP", op)), path)
    return path


@pytest.mark.long
@pytest.mark.usefixtures("wrong_passes")
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_the_first_wrong_pass_is_named(tiny_package: Path, tmp_path: Path, target: str) -> None:
    own = [f"--pass=wrong_passes_module.{name}Pass" for name in ("Harmless", "Wrong", "Harmless")]
    out = tmp_path / "out"
    result = run("optimize", tiny_package, out, "--target", target, "--verify", *own)
    assert result.exit_code == 1
    assert "It first differs after pass Wrong." in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "wrong_passes_module.py"
    ]
    assert run("optimize", tiny_package, out, "--verify", *own, "--disable", "Wrong").exit_code == 0


def test_a_portable_and_a_lowered_graph_agree_on_given_tokens(tiny_package: Path, tmp_path: Path) -> None:
    lowered = tmp_path / "lowered"
    assert run("optimize", tiny_package, lowered, "--target", "cpu").exit_code == 0
    ids = np.array([[5, 6, 7, 8], [9, 10, 0, 0]])
    np.savez(tmp_path / "in.npz", input_ids=ids, attention_mask=np.array([[1, 1, 1, 1], [1, 1, 0, 0]]))
    result = run("verify", tiny_package, lowered, "--inputs", tmp_path / "in.npz", "--steps", 3, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["steps"] == found["greedy_equal"] == 8  # two prompts and their generated tokens
    assert found["kl"] < 1e-6
    assert set(found["outputs"]) == {
        "logits",
        *(f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")),
    }
    assert all(error["max_rel"] < 1e-4 for error in found["outputs"].values())


def test_any_two_graphs_run_on_made_up_or_given_tensors(tmp_path: Path) -> None:
    first, same, other = (
        net(tmp_path / name, op) for name, op in [("a.onnx", "Add"), ("b.onnx", "Add"), ("c.onnx", "Sub")]
    )
    assert run("verify", first, same).exit_code == 0
    np.savez(tmp_path / "zero.npz", x=np.ones((2, 3), np.float32), by=np.array([0]))
    assert run("verify", first, other, "--inputs", tmp_path / "zero.npz").exit_code == 0
    np.savez(tmp_path / "one.npz", x=np.ones((2, 3), np.float32), by=np.array([1]))
    result = run("verify", first, other, "--inputs", tmp_path / "one.npz", "--json")
    assert result.exit_code == 1
    assert "output z has relative error 1, above the limit 0.001 (--max-error)" in result.stderr
    found = json.loads(result.stdout)
    assert (found["outputs"]["y"]["max_abs"], found["outputs"]["y"]["max_rel"]) == (0, 0)
    assert (found["outputs"]["z"]["max_abs"], found["outputs"]["z"]["max_rel"]) == (2, 1)  # of 2, the range
    assert run("verify", first, other, "--inputs", tmp_path / "one.npz", "--max-error", 1.1).exit_code == 0


def test_given_inputs_must_fit(tiny_package: Path, tmp_path: Path) -> None:
    graph = net(tmp_path / "a.onnx")
    np.savez(tmp_path / "half.npz", x=np.ones((2, 3), np.float32))
    (tmp_path / "text.npz").write_text("no tensors")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "folder").mkdir()
    np.savez(tmp_path / "nothing.npz")
    np.savez(tmp_path / "ids.npz", input_ids=np.array([[1, 2]]), attention_mask=np.array([[0, 0]]))
    cases = [
        ([graph, graph, "--inputs", tmp_path / "half.npz"], "needs input by"),
        ([graph, graph, "--inputs", tmp_path / "text.npz"], "cannot be read as an .npz file"),
        ([graph, graph, "--inputs", tmp_path / "empty.npz"], "is an empty file"),
        ([graph, graph, "--inputs", tmp_path / "nothing.npz"], "holds no tensors"),
        ([graph, graph, "--inputs", tmp_path / "folder"], "holds no .npz file"),
        ([graph, graph, "--inputs", tmp_path / "missing.npz"], "does not exist"),
        (
            [graph, graph, "--inputs", tmp_path / "half.npz", "--prompt", "x"],
            "either a prompt or inputs",
        ),
        ([tiny_package, tiny_package, "--inputs", tmp_path / "ids.npz"], "at least one token per row"),
    ]
    for arguments, words in cases:
        result = run("verify", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert words in result.stderr


def test_optimize_verifies_graphs_that_are_no_decoders(tmp_path: Path) -> None:
    result = run(
        "optimize",
        net(tmp_path / "a.onnx"),
        tmp_path / "out.onnx",
        "--verify",
        "--report",
        tmp_path / "r.json",
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["facts"]["verification"]["outputs"]["z"]["max_rel"] == 0
    assert "outputs differ by 0 at most" in result.stdout


def test_a_graph_that_only_its_provider_runs_is_verified_there(tiny_package: Path, tmp_path: Path) -> None:
    result = run("optimize", tiny_package, tmp_path / "out", "--target", "openvino", "--verify")
    assert result.exit_code == 0, result.output
    assert re.search(r"greedy tokens equal: (\d+) of \1;", result.stdout)
    assert "sequences of 6, 18, 32 tokens in one batch" in result.stdout
    assert "PagedAttention" in result.stdout


def test_a_folder_of_inputs_is_run_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    for by in range(3):
        np.savez(tmp_path / "inputs" / f"{by}.npz", x=np.ones((2, 3), np.float32), by=np.array([by]))
    first, other = net(tmp_path / "a.onnx"), net(tmp_path / "c.onnx", "Sub")
    result = run("verify", first, first, "--inputs", tmp_path / "inputs")
    assert result.exit_code == 0, result.output
    assert "2.npz: x float32[2, 3], by int64[1]" in result.stdout
    assert run("verify", first, other, "--inputs", tmp_path / "inputs").exit_code == 1


def test_optimize_verifies_on_given_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.ones((5, 3), np.float32), by=np.array([2]))
    graph, inputs = net(tmp_path / "a.onnx"), tmp_path / "in.npz"
    result = run("optimize", graph, tmp_path / "out.onnx", "--verify", "--inputs", inputs)
    assert result.exit_code == 0, result.output
    assert "compared on in.npz: x float32[5, 3], by int64[1]" in result.stdout
    without = run("optimize", graph, tmp_path / "other.onnx", "--inputs", inputs)
    assert (without.exit_code, without.stderr.count("\n")) == (2, 1)
    assert "--verify" in without.stderr


def test_nothing_runs_beyond_the_context(tiny_package: Path, tmp_path: Path) -> None:
    """The rope tables of the lowered graph end there, and onnxruntime rejects later positions."""
    short = tmp_path / "short"
    assert run("optimize", tiny_package, short, "--target", "cpu", "--context-length", 24).exit_code == 0
    result = run("verify", tiny_package / "model.onnx", short / "model.onnx", "--json")
    assert result.exit_code == 0, result.output
    assert "24 tokens in pieces" in result.stdout
    result = run("verify", tiny_package, short, "--prompt", "x" * 20)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "20 tokens and 16 steps exceed the context of 24 tokens" in result.stderr


def test_messages_show_no_temporary_names(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[n] x) => (float[n] y) <int64[1] s = {7}> '
    refusing = tmp_path / "refusing.onnx"
    ir.save(ir.from_onnx_text(text + "{ t = Abs(x) y = Reshape(t, s) }"), refusing)
    np.savez(tmp_path / "in.npz", x=np.ones(3, np.float32))
    for verb in (["optimize", refusing, tmp_path / "o.onnx", "--verify"], ["verify", refusing, refusing]):
        result = run(*verb, "--inputs", tmp_path / "in.npz")
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert "refusing.onnx" in result.stderr
        assert tempfile.gettempdir() not in result.stderr.replace(str(tmp_path), "")
