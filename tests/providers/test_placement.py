"""Nodes on another provider than requested: shape arithmetic is allowed, everything else is reported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph

from carryall.errors import ProviderUnavailableError
from carryall.providers import placement
from carryall.providers.ort import ort
from carryall.providers.placement import PlacedNode, Placement, heavy_nodes, stray_nodes, summarise

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
SHAPE, CONCAT = PlacedNode("Shape", "", "s"), PlacedNode("Concat", "", "c")
TABLE, INDEX = PlacedNode("Gather", "", "embed"), PlacedNode("Gather", "", "index")
SCALING = PlacedNode("Mul", "", "scaling")
MATMUL, QUICK = PlacedNode("MatMul", "", "m"), PlacedNode("QuickGelu", "com.microsoft", "q")
MODEL = """g (int64[n] ids) => (float[n, 4] y) {
    [embed] h = Gather(table, ids)
    [scaling] y = Mul(h, h)
    s = Shape(ids)
    [index] i = Gather(s, zero)
}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    content = graph(MODEL, table=np.zeros((1000, 4), np.float32), zero=np.zeros(1, np.int64))
    ir.save(content, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_arithmetic_on_shapes_may_run_on_the_cpu(model: Path) -> None:
    placed = {CUDA: [MATMUL, QUICK, TABLE], CPU: [SHAPE, CONCAT, INDEX]}
    assert stray_nodes(placed, [CUDA], lambda: heavy_nodes(model)) == []


@pytest.mark.parametrize("stray", [MATMUL, QUICK, TABLE, SCALING], ids=str)
def test_other_nodes_on_the_host_are_reported(model: Path, stray: PlacedNode) -> None:
    """An embedding is a Gather too, but it reads a large weight, unlike shape arithmetic."""
    placed = {CUDA: [], CPU: [SHAPE, INDEX, stray]}
    for source in (model, model.read_bytes()):
        assert stray_nodes(placed, [CUDA], lambda source=source: heavy_nodes(source)) == [stray]  # type: ignore[misc]


def test_a_third_provider_is_always_a_stray(model: Path) -> None:
    def heavy() -> set[str]:
        return heavy_nodes(model)

    assert stray_nodes({"Other": [SHAPE]}, [CUDA], heavy) == [SHAPE]
    assert stray_nodes({"Other": [SHAPE], CPU: [MATMUL]}, [CPU], heavy) == [SHAPE]
    assert stray_nodes({"Other": [SHAPE], CPU: [MATMUL]}, [CUDA, "Other", CPU], heavy) == []


def test_onnxruntimes_own_record_is_read(model: Path) -> None:
    options = ort.session_options(1, {placement.RECORD: "1"})
    placed = placement.placed_nodes(ort.open_session(model, ort.CPU, options))
    assert placed is not None
    assert [node.op_type for node in placed[CPU]] == ["Gather", "Mul", "Shape", "Gather"]
    assert {node.name for node in placed[CPU]} >= {"embed", "index"}


def test_strays_are_named_with_the_remedy(model: Path) -> None:
    part = SimpleNamespace(ep_name=CPU, get_nodes=lambda: [QUICK, TABLE])
    session: Any = SimpleNamespace(get_provider_graph_assignment_info=lambda: [part])
    with pytest.raises(
        ProviderUnavailableError, match=r"2 nodes .*com.microsoft.QuickGelu q, Gather embed. Low"
    ):
        ort.check_placed(session, [CUDA], "m", lambda: {"embed"})


def test_an_older_onnxruntime_refuses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        InferenceSession = object

    assert ort._strictness(Older) == ("session.disable_cpu_ep_fallback", "1")  # type: ignore[arg-type]
    assert placement.placed_nodes(SimpleNamespace()) is None


def test_a_summary_says_why_nodes_lie_elsewhere(model: Path) -> None:
    placed = {CPU: [PlacedNode("Loop", "", "a"), TABLE, SHAPE], CUDA: [PlacedNode("Gather", "", "c"), QUICK]}
    weights = {"embed": 10, "c": 20, "fused away": 5}
    found = summarise(placed, [CUDA], weights, lambda: heavy_nodes(model))
    assert [(share.provider, share.nodes, share.weight_bytes) for share in found.shares] == [
        (CUDA, 2, 20),
        (CPU, 3, 10),
    ]
    assert found.unplaced_bytes == 5
    assert found.reasons == (
        f"1 Loop run on {CPU}: {CUDA} runs none of this operator",
        f"1 Gather run on {CPU}: {CUDA} runs 1 others of this operator, so types or shapes decide",
        f"1 nodes of shape arithmetic run on {CPU}, as onnxruntime places them",
    )
    assert "1 com.microsoft.QuickGelu" in str(found)


def test_an_allowed_fallback_is_told_with_the_placement(model: Path) -> None:
    told: list[Placement] = []
    part = SimpleNamespace(ep_name=CPU, get_nodes=lambda: [SHAPE, TABLE])
    session: Any = SimpleNamespace(get_provider_graph_assignment_info=lambda: [part])
    ort._check_or_tell(session, CUDA, model, told.append)
    (placed,) = told
    assert [(share.provider, share.weight_bytes) for share in placed.shares] == [(CPU, 16000)]
    session = SimpleNamespace(
        get_provider_graph_assignment_info=lambda: [SimpleNamespace(ep_name=CPU, get_nodes=lambda: [SHAPE])]
    )
    ort._check_or_tell(session, CUDA, model, told.append)
    assert len(told) == 1
