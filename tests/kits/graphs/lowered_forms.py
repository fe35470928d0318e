"""Small decoders of every family in every quantized form, of sizes that the kernels of all targets accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tiny_models import write_tiny

from carryall.contract import is_past
from carryall.exporter.export import export_model
from carryall.graph_opt.graph.edit import static_size
from carryall.graph_opt.pipeline import pipeline
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from carryall.graph_opt.quantize.formats.kv_cache import QuantizeKVPass
from carryall.graph_opt.quantize.formats.static_int8 import StaticQuantizationPass
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

CONTEXT = 64
_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0] * 16,
    "long_factor": [1.5] * 16,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"moe_intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "mistral": {**_WIDE, "sliding_window": 16},
    "qwen2": {**_WIDE, "head_dim": None},
    "qwen3": _WIDE,
    "smollm3": {**_WIDE, "head_dim": None},
    "phi3": {**_WIDE, "head_dim": None, "rope_parameters": _LONG_ROPE},
    "gemma3_text": {**_WIDE, "sliding_window": 16, "query_pre_attn_scalar": 64},
    "gpt2": {"n_embd": 256, "n_head": 4, "n_positions": CONTEXT},
    "mixtral": {**_WIDE, "sliding_window": 16},
    "qwen2_moe": {**_WIDE, **_EXPERTS, "head_dim": None, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**_WIDE, **_EXPERTS},
}
FORMS = ("float", "int4", "int4-minima", "int8", "dynamic", "static", "int8-kv", "int8-kv-tensor")
_BLOCKS = {
    "int4": BlockFormat(bits=4, block_size=128, symmetric=True),
    "int4-minima": BlockFormat(bits=4, block_size=32, symmetric=False),
    "int8": BlockFormat(bits=8, block_size=128, symmetric=True),
}


def decoder(family: str, form: str, folder: Path) -> ir.Model:
    """Return a portable decoder; ranges and scales of activations are invented."""
    checkpoint = folder / family
    if not checkpoint.exists():
        write_tiny(family, checkpoint, **FAMILIES[family])
    model = export_model(checkpoint)
    return pipeline.run(model, _passes(form, model.graph))[0]


def _passes(form: str, graph: ir.Graph) -> list[ir.passes.PassBase]:
    if form == "float":
        return []
    if form in _BLOCKS:
        return [WeightOnlyQuantizationPass(_BLOCKS[form])]
    if form == "dynamic":
        return [DynamicQuantizationPass(_BLOCKS["int8"])]
    if form == "static":
        names = {str(value.name): 4.0 for node in graph for value in node.inputs if value is not None}
        return [StaticQuantizationPass(_BLOCKS["int8"], names)]
    caches = {str(value.name): value for value in graph.inputs if is_past(value.name)}
    sizes = {
        name: (static_size(value, 1) or 0) * (static_size(value, 3) or 0) for name, value in caches.items()
    }
    shapes = {name: () if form == "int8-kv-tensor" else (size,) for name, size in sizes.items()}
    scales = {name: np.full(shape, 0.03, np.float32) for name, shape in shapes.items()}
    return [WeightOnlyQuantizationPass(_BLOCKS["int4"]), QuantizeKVPass(scales)]
