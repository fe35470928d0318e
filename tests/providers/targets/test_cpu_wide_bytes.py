"""Which graphs the CPU provider keeps a second copy of int4 weights for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_gguf import write_gguf

from carryall.exporter.export import export_package
from carryall.graph_opt.lower.pipelines.cpu_facts import wide_bytes

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize(("kind", "wide"), [("Q4_0", True), ("Q4_1", True), ("Q8_0", False)])
def test_int4_weights_count_with_and_without_minima(tmp_path: Path, kind: str, wide: bool) -> None:
    write_gguf("llama", tmp_path / "m.gguf", types=kind, **SIZES)  # type: ignore[arg-type]
    graph = export_package(tmp_path / "m.gguf", tmp_path / "out").graph.graph
    assert (wide_bytes(graph) > 0) == wide
