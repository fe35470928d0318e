from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import pytest
from family_cases import normalised
from tiny_models import write_tiny

from carryall.contract import EXPERT_STACKS
from carryall.exporter.export import export_model
from carryall.exporter.safetensors_files import safetensors_of
from carryall.storage.stored_tensor import StoredStack


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_steps_and_lists_choose_the_sparse_layers(model_type: str) -> None:
    config = normalised(model_type, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [experts is not None for experts in config.experts] == [False, True, False, False, False, True]


def unread(*_: int) -> NoReturn:
    raise AssertionError("weights are read when they are written")


@pytest.mark.parametrize(
    ("family", "module", "single"),
    [
        ("qwen3_moe", "mlp.experts", r"mlp\.experts\.\d+\."),
        ("granitemoe", "block_sparse_moe", r"block_sparse_moe\.(input|output)_linear"),
    ],
)
def test_experts_of_softmax_routers_are_one_node_where_a_target_takes_stacks(
    tmp_path: Path, family: str, module: str, single: str
) -> None:
    folder, config = write_tiny(family, tmp_path / "checkpoint"), normalised(family)
    tensors, stacks = safetensors_of(folder), dict[str, StoredStack]()
    names = tuple(name for name in tensors if re.search(single, name))
    sparse = {layer: experts for layer, experts in enumerate(config.experts) if experts is not None}
    for layer, experts in sparse.items():
        inner, outer = (experts.width, config.hidden_size), (config.hidden_size, experts.width)
        for part, shape in (("gate", inner), ("up", inner), ("down", outer)):
            stacks[f"model.layers.{layer}.{module}.{part}_proj.weight"] = StoredStack(
                "Q4_0", 4, (experts.count, *shape), 0, unread, names, unread
            )
    model = export_model(folder, None, tensors, stacks, ["Q4_0"])
    nodes = [node for node in model.graph if node.op_type == EXPERT_STACKS]
    assert len(nodes) == len(sparse) > 0
    assert "Split" not in {node.op_type for node in model.graph}
