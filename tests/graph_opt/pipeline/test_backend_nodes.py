"""ONNX's backend node tests give the same results after the whole generic pipeline."""

from __future__ import annotations

import random

import onnx_ir as ir
import pytest
from backend_nodes import node_tests, passes

from carryall.errors import GraphError
from carryall.graph_opt.graph.load import check_model
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

SAMPLE = 150
PARTS = 4
OLDEST_OPSET = 13  # older models are refused, and the error names their opset


def fails_after_passes(name: str) -> str | None:
    """Return what is wrong with an optimized test; None if it passes, or also fails without passes."""
    case = node_tests()[name]
    if not passes(case, case.model):
        return None
    model = ir.from_proto(case.model)
    version = model.opset_imports.get("", OLDEST_OPSET)
    try:
        check_model(model, name)
        optimized, _ = run(model, portable_passes())
    except GraphError as error:
        refused = version < OLDEST_OPSET and f"of opset {version}" in str(error)
        return None if refused else f"{name}: {error}"
    return None if passes(case, ir.to_proto(optimized)) else f"{name}: another result"


def failures(names: list[str]) -> list[str]:
    return [reason for reason in map(fails_after_passes, names) if reason is not None]


@pytest.mark.long
def test_a_sample_of_the_tests() -> None:
    names = random.Random(7).sample(sorted(node_tests()), SAMPLE)
    assert failures(names) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_tests(part: int) -> None:
    assert failures(sorted(node_tests())[part::PARTS]) == []


@pytest.mark.long
def test_a_wrong_result_is_found() -> None:
    case = node_tests()["test_abs"]
    assert passes(case, case.model)
    wrong = ir.from_proto(case.model)
    wrong.graph[0].op_type = "Neg"
    assert not passes(case, ir.to_proto(wrong))
