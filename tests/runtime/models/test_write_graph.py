"""A graph is written as a file that no other process has written meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from carryall.errors import OutputExistsError
from carryall.graph_opt.graph.saving import save_checked
from carryall.runtime.models import write_graph
from carryall.runtime.models.write_graph import write_single_file

TEXT = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { y = Neg(x) }'


def test_a_file_that_another_process_wrote_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.onnx"

    def slow(*arguments: Any, **options: Any) -> None:
        save_checked(*arguments, **options)
        out.write_text("of another process")

    monkeypatch.setattr(write_graph, "save_checked", slow)
    with pytest.raises(OutputExistsError, match=r"out\.onnx exists; choose another name or delete it"):
        write_single_file(ir.from_onnx_text(TEXT), out, at_most=1000)
    assert out.read_text() == "of another process"
    assert list(tmp_path.iterdir()) == [out]
