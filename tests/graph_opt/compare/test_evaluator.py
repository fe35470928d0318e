"""Small float graphs are also compared in ONNX's evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from carryall.graph_opt.compare import tensors
from carryall.graph_opt.compare.evaluator import evaluated
from carryall.graph_opt.compare.verify import verify

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g'
X = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)


def saved(body: str, path: Path) -> Path:
    ir.save(ir.from_onnx_text(f"{HEAD} (float[2, 4] x) => (float[2, 4] y) {{ {body} }}"), path)
    return path


def test_a_small_float_graph_is_computed(tmp_path: Path) -> None:
    path = saved("t = Neg(x) y = Relu(t)", tmp_path / "m.onnx")
    found = evaluated(path, ["called"], {"called": X})
    assert found is not None
    np.testing.assert_array_equal(found["y"], np.maximum(-X, 0))


@pytest.mark.parametrize(
    "body",
    [
        "y = com.microsoft.QuickGelu(x)",
        "s = Constant<value = float {0.1}>() q = QuantizeLinear(x, s) y = DequantizeLinear(q, s)",
        "y = RandomNormalLike(x)",
    ],
)
def test_others_are_not(body: str, tmp_path: Path) -> None:
    assert evaluated(saved(body, tmp_path / "m.onnx"), ["x"], {"x": X}) is None


def test_a_candidate_that_only_onnxruntime_computes_rightly_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved("y = Exp(x)", tmp_path / "a.onnx"), saved("y = Exp(x)", tmp_path / "b.onnx")
    assert verify(first, second).passed

    def other(model: Path, names: Sequence[str], feed: Mapping[str, Any]) -> dict[str, Any] | None:
        found = evaluated(model, names, feed)
        assert found is not None
        return {name: 2 * array if model == second else array for name, array in found.items()}

    monkeypatch.setattr(tensors, "evaluated", other)
    (failure,) = verify(first, second).failures
    assert failure.startswith("output y, in ONNX's evaluator, has relative error")
