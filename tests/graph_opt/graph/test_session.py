from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import GraphError, MissingExtraError
from carryall.graph_opt.graph.session import open_session


def test_without_onnxruntime_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'carryall\[cpu\]'"):
        open_session(tmp_path / "any.onnx")


def test_16_bit_products_without_a_kernel_are_named(tmp_path: Path) -> None:
    text = "g (bfloat16[1, 2] x) => (bfloat16[1, 2] y) { y = MatMul(x, w) }"
    ir.save(graph(text, w=np.eye(2, dtype=ml_dtypes.bfloat16)), tmp_path / "bf16.onnx")
    with pytest.raises(GraphError, match="lacks kernels for 16-bit floats, so give a graph whose weights"):
        open_session(tmp_path / "bf16.onnx")
