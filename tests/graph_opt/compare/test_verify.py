from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_tiny

from carryall.errors import VerificationError
from carryall.exporter.export import export_model
from carryall.graph_opt.compare import runners, verify
from carryall.graph_opt.compare.bars import Bars
from carryall.graph_opt.graph.edit import add_initializer
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline import pipeline

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def models(folder: Path, scale: float = 1.0) -> tuple[Path, Path]:
    """Return a portable graph and its lowered graph, with one weight of the second scaled."""
    checkpoint = write_tiny("llama", folder / "checkpoint", head_dim=16)
    paths = (folder / "a.onnx", folder / "b.onnx")
    for path in paths:
        model = export_model(checkpoint)
        if path is paths[1]:
            value = model.graph.initializers["model.layers.1.mlp.down_proj.weight"]
            assert value.const_value is not None
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(scale), name=value.name)
            pipeline.run(model, slot_passes(SlotOptions(context_length=32)))
        ir.save(model, path, external_data=f"{path.name}.data")
    return paths


def test_equal_graphs_compare_equal(tmp_path: Path) -> None:
    result = verify.verify(*models(tmp_path), prompts=[PROMPT], bars=Bars(max_kl=1e-6), steps=5)
    result.check()
    assert result.max_rel < 1e-5
    assert result.tokens is not None
    assert result.tokens.greedy_equal == result.tokens.steps == 6
    assert result.tokens.mean_kl <= result.tokens.kl


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    paths = models(tmp_path, scale=1.1)
    result = verify.verify(*paths, prompts=[PROMPT], bars=Bars(max_kl=1e-6), steps=5)
    assert result.max_rel > 1e-3
    assert result.tokens is not None
    assert result.tokens.kl > 1e-4
    with pytest.raises(VerificationError, match=r"KL .* is above the limit 1e-06"):
        result.check()


def test_the_runner_follows_the_contract_of_the_inputs(tmp_path: Path) -> None:
    portable, lowered = models(tmp_path)
    assert isinstance(runners.runner(portable), runners.PortableRunner)
    assert isinstance(runners.runner(lowered), runners.SlotGraphRunner)


def without_padding(model: ir.Model) -> None:
    """Make the mask hide nothing, which is correct for single sequences and wrong in a padded batch."""
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    readers = list(mask.uses())
    one = add_initializer(model.graph, "one_token", np.array(1))
    shape = ir.node("Shape", [mask])
    ones = ir.node("Expand", [one, shape.outputs[0]])
    model.graph.insert_before(model.graph[0], [shape, ones])
    for use in readers:
        use.node.replace_input_with(use.idx, ones.outputs[0])


def counted_positions(model: ir.Model) -> None:
    """Compute past, past + 1, ... for all rows, as a trace does: padding shifts the keys' angles."""
    graph = model.graph
    positions = next(value for value in graph.inputs if value.name == "position_ids")
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    tokens = next(value for value in graph.inputs if value.name == "input_ids")
    zero, one = (add_initializer(graph, f"count.{n}", np.array(n)) for n in (0, 1))
    first = add_initializer(graph, "count.first", np.array([0]))
    new, total = (ir.node("Shape", [value], {"start": 1, "end": 2}) for value in (tokens, mask))
    sizes = [ir.node("Squeeze", [node.outputs[0], first]) for node in (new, total)]
    past = ir.node("Sub", [sizes[1].outputs[0], sizes[0].outputs[0]])
    counted = ir.node("Range", [past.outputs[0], sizes[1].outputs[0], one])
    row = ir.node("Unsqueeze", [counted.outputs[0], zero])
    rows = ir.node("Expand", [row.outputs[0], ir.node("Shape", [tokens]).outputs[0]])
    shape = rows.inputs[1].producer() if rows.inputs[1] is not None else None
    assert shape is not None
    graph.insert_before(graph[0], [new, total, *sizes, past, counted, row, shape, rows])
    for use in list(positions.uses()):
        use.node.replace_input_with(use.idx, rows.outputs[0])
    graph.inputs.remove(positions)


def wrong_values(model: ir.Model) -> None:
    weight = model.graph.initializers["model.layers.1.self_attn.v_proj.weight"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1.1), name=weight.name)


def test_keys_of_padded_rows_may_have_other_angles(tmp_path: Path) -> None:
    """Attention depends on differences of positions, so the logits are equal and the rotated keys are not."""
    checkpoint = write_tiny("llama", tmp_path / "checkpoint")
    reference, candidate, wrong = (export_model(checkpoint) for _ in range(3))
    counted_positions(reference)
    found = verify.verify(reference, candidate)
    found.check()
    assert any("in one batch" in line for line in found.inputs)
    assert any("caches of the batch" in note for note in found.notes)
    wrong_values(wrong)
    assert not verify.verify(reference, wrong).passed


def wider_window(model: ir.Model) -> None:
    """Increase every constant of the mask that equals the window by one."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(-1)[0]) in (5, 4):
            value.const_value = ir.tensor(tensor.numpy() + tensor.numpy().dtype.type(1), name=value.name)


@pytest.mark.long
@pytest.mark.parametrize(("family", "change"), [("llama", without_padding), ("mistral", wider_window)])
def test_wrong_masks_are_caught(family: str, change: Callable[[ir.Model], None], tmp_path: Path) -> None:
    checkpoint = write_tiny(family, tmp_path / "checkpoint")
    reference, wrong = export_model(checkpoint), export_model(checkpoint)
    change(wrong)
    assert verify.verify(reference, reference).passed
    found = verify.verify(reference, wrong)
    assert found.tokens is not None
    assert found.tokens.kl > 1e-3
    assert not found.passed
