"""Parts of a decoder give the whole decoder's results if they run one after the other."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
from family_cases import write_case
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import write_tiny

from carryall.contract import HIDDEN_STATES
from carryall.errors import GraphError, UsageError
from carryall.exporter.export import export_package
from carryall.graph_opt.analysis import layers
from carryall.graph_opt.analysis.layers import (
    KeepLayersPass,
    LayerCost,
    LayerRange,
    balanced_ranges,
    num_layers,
)
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes
from carryall.graph_opt.quantize.formats.half import HalfPrecisionPass

Arrays = dict[str, npt.NDArray[Any]]


def package(case: str, folder: Path) -> Path:
    return export_package(write_case(case, folder / "checkpoint"), folder / "package").model_path


def part(path: Path, first: int, last: int, *, half: bool = False) -> ir.Model:
    convert = [HalfPrecisionPass(ir.DataType.FLOAT16)] if half else []
    keep = KeepLayersPass(LayerRange(first, last))
    model, _ = run(ir.load(path), [*portable_passes(), *convert, keep])
    return model


def evaluate(model: ir.Model | Path, feeds: Arrays) -> Arrays:
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    results = session.run(None, {name: array for name, array in feeds.items() if name in names})
    return dict(zip([value.name for value in session.get_outputs()], results, strict=True))


def feeds(path: Path, past: int = 3, new: int = 4) -> Arrays:
    rng = np.random.default_rng(0)
    found: Arrays = {
        "input_ids": rng.integers(0, 32, (2, new)),
        "attention_mask": np.ones((2, past + new), np.int64),
        "position_ids": np.broadcast_to(np.arange(past, past + new), (2, new)).copy(),
    }
    for value in ir.load(path).graph.inputs:
        if str(value.name).startswith("past_key_values"):
            assert value.shape is not None
            shape = (2, int(value.shape[1]), past, int(value.shape[3]))  # type: ignore[arg-type]
            found[str(value.name)] = rng.standard_normal(shape).astype(np.float32)
    return found


def loaded(model: ir.Model) -> ir.Model:
    """Return the model with its weights in memory, so that it can be serialized."""
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)
    return model


@pytest.mark.long
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text", "gpt2", "llama-biases-tied"])
def test_parts_in_sequence_equal_the_whole(case: str, tmp_path: Path) -> None:
    path = package(case, tmp_path)
    given = feeds(path)
    whole = evaluate(path, given)
    last = num_layers(ir.load(path).graph) - 1
    first_results = evaluate(loaded(part(path, 0, 0)), given)
    states = first_results.pop("logits")
    second_results = evaluate(loaded(part(path, 1, last)), {**given, HIDDEN_STATES: states})
    joined = {**first_results, **second_results}
    assert joined.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_allclose(joined[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_a_layer_stays_with_the_one_whose_cache_it_reads(tmp_path: Path) -> None:
    """Each part computes the embeddings of its layers from the token ids."""
    path = package("gemma4_text", tmp_path)
    given = feeds(path)
    whole = evaluate(path, given)
    first_results = evaluate(loaded(part(path, 0, 0)), given)
    states = first_results.pop("logits")
    joined = first_results | evaluate(loaded(part(path, 1, 4)), {**given, HIDDEN_STATES: states})
    assert joined.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_allclose(joined[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    with pytest.raises(UsageError, match="layer 3 reads the keys and values of layer 2"):
        part(path, 0, 2)


def test_a_part_holds_its_own_weights_and_caches(tmp_path: Path) -> None:
    path = package("llama", tmp_path)
    first, second = part(path, 0, 0).graph, part(path, 1, 1).graph
    names = {str(value.name) for value in first.inputs}
    assert names == {
        *("input_ids", "attention_mask", "position_ids", "past_key_values.0.key", "past_key_values.0.value")
    }
    assert HIDDEN_STATES in {value.name for value in second.inputs}
    assert not any("layers.1." in name or "lm_head" in name for name in first.initializers)
    assert not any("layers.0." in name or "embed" in name for name in second.initializers)


def test_hidden_states_are_float32(tmp_path: Path) -> None:
    second = part(package("llama", tmp_path), 1, 1, half=True)
    states = next(value for value in second.graph.inputs if value.name == HIDDEN_STATES)
    first = part(tmp_path / "package" / "model.onnx", 0, 0, half=True)
    assert states.dtype == first.graph.outputs[0].dtype == ir.DataType.FLOAT
    assert "Cast" in {node.op_type for node, _ in states.uses()}


@pytest.mark.parametrize(("first", "last"), [(0, 2), (-1, 0), (1, 0), (2, 2)])
def test_missing_layers_are_refused(first: int, last: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model has layers 0-1"):
        part(package("llama", tmp_path), first, last)


def test_a_graph_without_numbered_caches_has_no_layers() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["" : 23]> g (float[1, 2, 8] x) => (float[1, 2, 8] logits) '
        "{ logits = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x) }"
    )
    with pytest.raises(GraphError, match="does not read a cache"):
        run(model, [KeepLayersPass(LayerRange(0, 0))])


def test_a_part_needs_a_layer_with_a_cache(tmp_path: Path) -> None:
    path = package("lfm2", tmp_path)  # a convolution, attention, a convolution
    with pytest.raises(UsageError, match="layers 2-2 cannot be a part: none of them has a KV cache"):
        part(path, 2, 2)
    with pytest.raises(UsageError, match="has 1 layers with KV, which cannot be cut into 2 stages"):
        balanced_ranges(ir.load(path).graph, 2)
    model = part(path, 0, 2)
    assert {"past_conv.0", "past_conv.2"} <= {str(value.name) for value in model.graph.inputs}


def test_each_range_has_a_layer_with_a_cache() -> None:
    costs = [
        LayerCost(0, 9, False),
        LayerCost(1, 1),
        LayerCost(2, 1, False),
        LayerCost(4, 1),
        LayerCost(5, 1, False),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "layer_costs", lambda graph: costs)
        found = balanced_ranges(ir.Graph([], [], nodes=[]), 2)
    assert found == [LayerRange(0, 1), LayerRange(2, 5)]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.data())
def test_ranges_of_layers_are_as_equal_as_possible(costs: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "layer_costs", lambda graph: [LayerCost(*pair) for pair in enumerate(costs)])
        found = balanced_ranges(ir.Graph([], [], nodes=[]), count)
    assert [layer for part in found for layer in range(part.first, part.last + 1)] == [*range(len(costs))]
    assert len(found) == count
    best = min(
        max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)]))
        for cuts in combinations(range(1, len(costs)), count - 1)
    )
    assert max(sum(costs[part.first : part.last + 1]) for part in found) == best


def test_the_head_counts_as_a_part_of_the_last_layer(tmp_path: Path) -> None:
    """A head of 40 times the layer's weights leaves the last range one layer."""

    def graph(size: int) -> ir.Graph:
        folder = write_tiny("llama", tmp_path / str(size), num_hidden_layers=4, vocab_size=size)
        return ir.load(export_package(folder, tmp_path / f"{size}.package").model_path).graph

    small, large = graph(256), graph(16384)
    assert balanced_ranges(small, 2)[1].first == 2
    assert balanced_ranges(large, 2) == [LayerRange(0, 2), LayerRange(3, 3)]
    with pytest.raises(UsageError, match="has 4 layers with KV, which cannot be cut into 5 stages"):
        balanced_ranges(small, 5)
