"""Decoders of every family in every quantized form, small and with random weights, for self-tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ...contract import GROUP_ROWS, GROUPS, MERGED_PATCHES, PATCH_POSITIONS, PIXELS, is_past
from ...graph_opt.graph.edit import nodes_of, static_size
from ...graph_opt.graph.saving import save_model
from ...graph_opt.pipeline import pipeline
from ...graph_opt.quantize.algorithms.blockwise import BlockFormat
from ...graph_opt.quantize.calibration.activations import ActivationReader
from ...graph_opt.quantize.formats.dynamic_int8 import DynamicQuantizationPass
from ...graph_opt.quantize.formats.kv_cache import QuantizeKVPass
from ...graph_opt.quantize.formats.static_int8 import StaticQuantizationPass
from ...graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass
from ...storage.scratch import scratch_folder
from .random_model import random_model, random_tower

CONTEXT = 64  # tokens
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Sizes that the kernels of all targets accept.
_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
}
_HEADS = {"head_dim": 64}
_LONG_ROPE = {
    **_ROPE,
    "rope_type": "longrope",
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0] * 16,
    "long_factor": [1.5] * 16,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": []}
_SHORT_CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
}
_LAYER_TYPES = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, **_HEADS},
    "mistral": {**_BASE, **_HEADS, "sliding_window": 16},
    "qwen2": {**_BASE, "use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {**_BASE, **_HEADS, "tie_word_embeddings": True},
    "smollm3": {**_BASE, "no_rope_layers": [1, 0]},
    "phi3": {**_BASE, "original_max_position_embeddings": 16, "rope_parameters": _LONG_ROPE},
    "gemma3_text": {
        **_BASE,
        **_HEADS,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 16,
        "layer_types": _LAYER_TYPES,
        "rope_parameters": dict.fromkeys(_LAYER_TYPES, _ROPE),
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "vocab_size": 512,
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": CONTEXT,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "lfm2": {**_BASE, **_SHORT_CONVOLUTIONS},
    "mixtral": {**_BASE, **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen2_moe": {**_BASE, **_EXPERTS, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**_BASE, **_HEADS, **_EXPERTS, "norm_topk_prob": True},
}
_BLOCKS = {
    "int4": BlockFormat(bits=4, block_size=128, symmetric=True),
    "int4-minima": BlockFormat(bits=4, block_size=32, symmetric=False),
    "int8": BlockFormat(bits=8, block_size=128, symmetric=True),
}
FORMS = ("float", *_BLOCKS, "dynamic", "static", "int8-kv", "int8-kv-tensor")
# Four layers of Llama 3.2 1B: 276 million parameters, more than the cache of any device holds.
LARGE: dict[str, Any] = {
    **_BASE,
    **_HEADS,
    "vocab_size": 16384,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_PATCHES, _PICTURES = 16, 4  # patches of a picture, which see each other
# Of SmolVLM: patches of 16 x 16 pixels, of which 2 x 2 join into a token.
TOWER: dict[str, Any] = {
    "model_type": "smolvlm",
    "text_config": {"hidden_size": 256},
    "vision_config": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    },
    "scale_factor": 2,
}
_KV_SCALE = 0.08  # invented: both sides of a comparison have the same


def cases() -> Iterator[tuple[str, str]]:
    """Yield each pair of family and form once; the first ones have each family and each form."""
    families, forms = list(FAMILIES), len(FORMS)
    for offset in range(forms):
        for index, family in enumerate(families):
            yield family, FORMS[(index + offset) % forms]


def decoder(family: str, form: str) -> ir.Model:
    """Return a portable decoder of a family in a form, with two layers."""
    return in_form(random_model({"model_type": family, **FAMILIES[family]}), form)


def tower() -> ir.Model:
    """Return the portable tower of a model that sees."""
    return random_tower(TOWER)


def pictures() -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of ``tower`` for random pictures of 64 x 64 pixels."""
    count, edge = _PATCHES * _PICTURES, 3 * TOWER["vision_config"]["patch_size"] ** 2
    rows = np.arange(count)
    squares = rows.reshape(_PICTURES, 2, 2, 2, 2).swapaxes(2, 3)  # two rows and two columns of a picture
    return {
        PIXELS: np.random.default_rng(0).uniform(-1, 1, (count, edge)).astype(np.float32),
        PATCH_POSITIONS: rows % _PATCHES,
        GROUPS: rows.reshape(_PICTURES, _PATCHES),
        GROUP_ROWS: rows,
        MERGED_PATCHES: squares.reshape(-1, 4),
    }


def in_form(model: ir.Model, form: str) -> ir.Model:
    """Return a portable decoder in a form of ``FORMS``."""
    return pipeline.run(model, _passes(form, model))[0]


def _passes(form: str, model: ir.Model) -> list[ir.passes.PassBase]:
    if form == "float":
        return []
    if form in _BLOCKS:
        return [WeightOnlyQuantizationPass(_BLOCKS[form])]
    if form == "dynamic":
        return [DynamicQuantizationPass(_BLOCKS["int8"])]
    if form == "static":
        return [StaticQuantizationPass(_BLOCKS["int8"], _ranges(model))]
    scales = {}
    for value in model.graph.inputs:
        if is_past(str(value.name)):
            size = (static_size(value, 1) or 0) * (static_size(value, 3) or 0)
            shape = () if form == "int8-kv-tensor" else (size,)
            scales[str(value.name)] = np.full(shape, _KV_SCALE, np.float32)
    return [WeightOnlyQuantizationPass(_BLOCKS["int4"]), QuantizeKVPass(scales)]


def _ranges(model: ir.Model) -> dict[str, float]:
    """Return the largest magnitude of each input of a product, measured on random tokens."""
    products = {str(node.inputs[0].name) for node in nodes_of(model.graph, "MatMul") if node.inputs[0]}
    names = sorted(products - set(model.graph.initializers))
    with scratch_folder() as folder:
        path = folder / "model.onnx"
        save_model(model, path)
        tokens = np.random.default_rng(0).integers(1, static_size(model.graph.outputs[0], 2) or 2, CONTEXT)
        values = ActivationReader(path, names).read(tokens)
    return {name: float(np.abs(value).max()) for name, value in values.items()}
