"""Latent attention on a compressed cache gives the logits of the expanded one, in standard operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from family_cases import write_case

from carryall.contract import is_past
from carryall.errors import UsageError
from carryall.exporter.export import export_model
from carryall.graph_opt.graph.edit import add_initializer, insert, int_attribute, nodes_of, replace, weight
from carryall.graph_opt.lower.pipelines.latent_cache import LatentCachePass

TOKENS = 9


def in_standard_operators(model: ir.Model) -> ir.Model:
    """Replace HeadProducts by a product with its weights, read from the tiles."""
    for node in list(nodes_of(model.graph, "HeadProducts", "carryall")):
        heads, inputs, outputs = (int_attribute(node, name, 0) for name in ("heads", "inputs", "outputs"))
        tensor = weight(node.inputs[1])
        assert tensor is not None
        half = int_attribute(node, "bits", 0) == 16
        values = tensor.numpy().view(np.uint16 if half else np.float32)
        floats = (values.astype(np.uint32) << 16).view(np.float32) if half else values
        by_tile = floats[:, : inputs * 16].reshape(heads, -1, inputs, 16)
        rows = by_tile.transpose(0, 2, 1, 3).reshape(heads, inputs, -1)[:, :, :outputs]
        graph = model.graph
        weights = add_initializer(graph, f"{node.name}.floats", np.ascontiguousarray(rows))
        sizes = [
            add_initializer(graph, f"{node.name}.{i}", np.array(shape))
            for i, shape in enumerate(([0, 0, heads, inputs], [0, 0, heads * outputs]))
        ]
        x = insert(node, "Reshape", [node.inputs[0], sizes[0]]).outputs[0]
        x = insert(node, "Transpose", [x], {"perm": [0, 2, 1, 3]}).outputs[0]
        x = insert(node, "MatMul", [x, weights]).outputs[0]
        x = insert(node, "Transpose", [x], {"perm": [0, 2, 1, 3]}).outputs[0]
        replace(node.outputs[0], insert(node, "Reshape", [x, sizes[1]]).outputs[0])
        graph.remove(node, safe=True)
    return model


def run(model: ir.Model, *lengths: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return the logits of tokens that are run in pieces, and the shapes of the caches at the end."""
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    caches = {
        name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for name, value in inputs.items()
        if is_past(name)
    }
    tokens, found, start = np.random.default_rng(4).integers(0, 250, (1, TOKENS)), [], 0
    for length in lengths:
        end = start + length
        feeds = {
            "input_ids": tokens[:, start:end],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end)[None],
        }
        logits, *present = session.run(None, {**feeds, **caches})
        caches = dict(zip(caches, present, strict=True))
        found.append(logits[0])
        start = end
    return np.concatenate(found), {name: cache.shape for name, cache in caches.items()}


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v2-groups-yarn", "deepseek_v3-halves", "minicpm3"])
def test_logits_stay_and_the_cache_is_small(case: str, tmp_path: Path) -> None:
    source = write_case(case, tmp_path / "checkpoint")
    expected, shapes = run(export_model(source), TOKENS)
    model = export_model(source)
    compressing = LatentCachePass()
    compressing(model)
    assert compressing.fired == 2
    for lengths in ((TOKENS,), (4, 1, TOKENS - 5)):
        found, small = run(in_standard_operators(model), *lengths)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert {shape[1:] for shape in shapes.values()} == {(4, TOKENS, 12)}
    assert {shape[1:] for shape in small.values()} == {(1, TOKENS, 20)}


def test_other_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs latent attention"):
        LatentCachePass()(export_model(write_case("llama", tmp_path / "checkpoint")))
