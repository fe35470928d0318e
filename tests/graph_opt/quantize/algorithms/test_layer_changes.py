"""An adapter that is changed like its layers has the effect that it has on the float model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny

from carryall.errors import GraphError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare.runners import PortableRunner
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.quantize.algorithms.layer_changes import KEY, LayerChanges, module_of
from carryall.graph_opt.quantize.algorithms.rotate import RotatePass
from carryall.graph_opt.quantize.algorithms.smooth import SmoothQuantPass, _sites

TOKENS, RANK = np.arange(9), 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen2", tmp_path_factory.mktemp("changes") / "model", dtype=np.float32)


class Merge(GraphPass):
    """Add low-rank changes A^T U to the weights of linear layers."""

    def __init__(self, pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__()
        self.pairs = pairs

    def rewrite(self, graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            pair = self.pairs.get(module_of(str(value.name)) or "")
            if pair is not None and value.const_value is not None:
                changed = value.const_value.numpy() + pair[0].T @ pair[1]
                value.const_value = ir.tensor(changed.astype(np.float32), name=value.name)
                self.fired += 1


def vary_gains(model: ir.Model, rng: np.random.Generator) -> None:
    for node in model.graph:
        gain = node.inputs[1] if node.op_type == "RMSNormalization" else None
        if gain is not None and gain.const_value is not None:
            values = rng.uniform(0.5, 2, gain.const_value.shape.numpy()).astype(np.float32)
            gain.const_value = ir.tensor(values, name=gain.name)


def smoothing(model: ir.Model, rng: np.random.Generator, *, norms: bool) -> SmoothQuantPass:
    sites = [site for site in _sites(model.graph) if norms or not site.is_norm]
    sizes = {site.name: site.layers[0].const_value for site in sites}
    return SmoothQuantPass(
        {
            name: rng.uniform(0.3, 3, tensor.shape.numpy()[0]).astype(np.float32)
            for name, tensor in sizes.items()
            if tensor is not None
        }
    )


def logits(model: ir.Model, path: Path) -> np.ndarray:
    ir.save(model, path, external_data=f"{path.name}.data")
    return np.array(PortableRunner(path).forward({0: TOKENS})[0])


ORDERS = {
    "rotated": (True, ()),
    "smoothed": (False, (True,)),
    "rotated and smoothed twice": (True, (False, False)),
}


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_an_adapter_has_the_effect_of_merging_it_before(
    order: str, seed: int, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("case")
    rotate, smooths = ORDERS[order]
    model, merged = export_model(checkpoint), export_model(checkpoint)
    for one in (model, merged):
        vary_gains(one, np.random.default_rng(seed))
    pairs = {}
    for value in model.graph.initializers.values():
        module, tensor = module_of(str(value.name)), value.const_value
        if module is not None and module.endswith("_proj") and tensor is not None:
            ends = [rng.normal(0, 0.2, (RANK, size)).astype(np.float32) for size in tensor.shape.numpy()]
            pairs[module] = (ends[0], ends[1])
    Merge(pairs)(merged)
    plain = logits(model, folder / "plain.onnx")
    expected = logits(merged, folder / "merged.onnx")
    model = ir.load(folder / "plain.onnx")
    for change in [RotatePass()] if rotate else []:
        change(model)
    for norms in smooths:
        smoothing(model, rng, norms=norms)(model)
    ir.save(model, folder / "changed.onnx", external_data="changed.data")
    changes = LayerChanges.of(ir.load(folder / "changed.onnx").graph)  # as a file records them
    assert len(pairs) == 14
    merge = Merge({module: changes.adapted(module, *pair) for module, pair in pairs.items()})
    merge(model)
    assert merge.fired == len(pairs)
    found = logits(model, folder / "found.onnx")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * scale)
    assert np.abs(plain - expected).max() > 0.05 * scale


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        json.dumps({"vectors": [], "inputs": {"a": "*0"}, "outputs": {}}),
        json.dumps({"vectors": ["AAAA"], "inputs": {}, "outputs": {}}),
        json.dumps({"vectors": [], "inputs": {"a": "X"}, "outputs": {}}),
        json.dumps({"vectors": [], "inputs": {"a": 1}, "outputs": {}}),
    ],
)
def test_a_damaged_record_is_an_error(record: str) -> None:
    graph = ir.Graph([], [], nodes=[])
    graph.metadata_props[KEY] = record
    with pytest.raises(GraphError, match=r"carryall\.layer_changes' is damaged"):
        LayerChanges.of(graph)


def test_a_vector_of_another_size_is_an_error() -> None:
    changes = LayerChanges([np.ones(4, np.float32)], {"layer": "*0"}, {})
    rows = np.ones((2, 6), np.float32)
    with pytest.raises(GraphError, match="does not fit layer"):
        changes.adapted("layer", rows, rows)
