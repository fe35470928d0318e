"""Damaged and invalid models: every verb that reads a graph says so in one line and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result

from carryall.cli import carryall

NET = "(float[3] x) => (float[3] y)"


def net(body: str, opsets: str = '"" : 20') -> bytes:
    content: bytes = onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: [{opsets}]> net {NET} {body}"
    ).SerializeToString()
    return content


def text_file(path: Path) -> None:
    path.write_text("this is no model")


def truncated(path: Path) -> None:
    content = net("{ a = Neg(x) b = Exp(a) y = Abs(b) }")
    path.write_bytes(content[: len(content) // 2])


def without_weights(path: Path) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 20]> net {NET} {{ y = Add(x, w) }}'
    model = ir.from_onnx_text(text, initializers=[ir.tensor(np.ones(3, np.float32), name="w")])
    ir.save(model, path, external_data="weights.data", size_threshold_bytes=0)
    path.with_name("weights.data").unlink()


BAD: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "empty": (Path.touch, 1, "is an empty file"),
    "text": (text_file, 1, "cannot be read as ONNX"),
    "truncated": (truncated, 1, "cannot be read as ONNX"),
    "folder": (Path.mkdir, 2, "neither a package nor a checkpoint"),
    "cyclic": (
        lambda path: path.write_bytes(net("{ a = Add(x, b) b = Neg(a) y = Abs(b) }")),
        1,
        "has a cycle",
    ),
    "invalid": (lambda path: path.write_bytes(net("{ y = Add(x, nope) }")), 1, "Add reads nope"),
    "too new": (lambda path: path.write_bytes(net("{ y = Abs(x) }", '"" : 99')), 1, "has opset 99"),
    "missing weights": (without_weights, 1, "which does not exist"),
}


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args])


@pytest.mark.parametrize("verb", ["optimize", "inspect", "verify", "diff"])
@pytest.mark.parametrize("case", BAD)
def test_one_line_says_what_is_wrong_and_nothing_is_written(verb: str, case: str, tmp_path: Path) -> None:
    make, code, words = BAD[case]
    path, out = tmp_path / "bad.onnx", tmp_path / "out"
    out.mkdir()
    make(path)
    rest = {"optimize": [out / "out.onnx", "--report", out / "report.html"], "inspect": []}
    result = run(verb, path, *rest.get(verb, [path]))
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(out.iterdir()) == []


def test_an_opset_too_old_to_be_raised_is_kept_and_named(tmp_path: Path) -> None:
    (tmp_path / "old.onnx").write_bytes(net("{ y = Abs(x) }", '"" : 6'))
    result = run("optimize", tmp_path / "old.onnx", tmp_path / "out.onnx", "--explain")
    assert result.exit_code == 0, result.output
    assert "the model keeps opset 6" in " ".join(result.stdout.split())
    assert ir.load(tmp_path / "out.onnx").opset_imports[""] == 6


def test_operators_of_other_domains_are_left_alone(tmp_path: Path) -> None:
    body = """{ a = their.own.Twice <k = 3, s = "t"> (x, , x) c = Identity(a)
        b, unused = their.own.Twice(c) y = Abs(b) }"""
    (tmp_path / "net.onnx").write_bytes(net(body, '"" : 20, "their.own" : 7'))
    result = run("optimize", tmp_path / "net.onnx", tmp_path / "out.onnx", "--debug")
    assert result.exit_code == 0, result.output
    model = ir.load(tmp_path / "out.onnx")
    assert [node.op_type for node in model.graph] == ["Twice", "Twice", "Abs"]
    first = model.graph[0]
    assert (first.domain, model.opset_imports["their.own"]) == ("their.own", 7)
    assert [value and value.name for value in first.inputs] == ["x", None, "x"]
    assert {name: attribute.value for name, attribute in first.attributes.items()} == {"k": 3, "s": "t"}
    assert len(model.graph[1].outputs) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/out.onnx"], "there is no folder"),
        (["out"], "name it"),
        (["out.onnx", "--report", "nowhere/report.html"], "the folder nowhere does not exist"),
    ],
)
def test_places_that_cannot_be_written_to_are_refused_first(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.onnx").write_bytes(net("{ y = Abs(x) }"))
    result = run("optimize", "net.onnx", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
