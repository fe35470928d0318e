"""Tiny random TrOCRs and Donuts, as Hugging Face folders, from a seed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from text_kit import byte_level_with
from tiny_whisper import norm_shapes
from tokenizers import AddedToken

START, PADDING, END = 257, 256, 257
PATCH, TILE = 8, 24

_ENCODER: dict[str, Any] = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
    "qkv_bias": True,
}
_DECODER: dict[str, Any] = {
    "model_type": "trocr",
    "vocab_size": 258,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 48,
    "bos_token_id": 256,
    "pad_token_id": PADDING,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}
# Special tokens of Donut's checkpoints, from 258 on: tasks, fields, categories.
TAGS = ("<s_cord-v2>", "<s_name>", "</s_name>", "<s_price>", "</s_price>", "<sep/>", "<yes/>")
_SWIN: dict[str, Any] = {"model_type": "donut-swin", "patch_size": 2, "mlp_ratio": 2.0, "qkv_bias": True}
_MBART: dict[str, Any] = {
    **_DECODER,
    "model_type": "mbart",
    "vocab_size": 258 + len(TAGS),
    "activation_function": "gelu",
    "scale_embedding": True,
    "decoder_start_token_id": 258,
}
# Case -> the parts of config.json. The first is as trocr-base, the second as trocr-large-printed, the last as
# trocr-small. In the first Donut windows fit the first stage, in the second none, and it has odd stages.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": (
        {**_ENCODER, "model_type": "vit"},
        {**_DECODER, "activation_function": "gelu", "cross_attention_hidden_size": 20},
    ),
    "vit-sinusoidal": (
        {**_ENCODER, "model_type": "vit", "qkv_bias": False},
        {
            **_DECODER,
            "activation_function": "relu",
            "layernorm_embedding": False,
            "scale_embedding": True,
            "use_learned_position_embeddings": False,
            "tie_word_embeddings": False,
            "cross_attention_hidden_size": 20,
        },
    ),
    "deit": (
        {**_ENCODER, "model_type": "deit"},
        {**_DECODER, "activation_function": "relu", "scale_embedding": True, "tie_word_embeddings": False},
    ),
    "donut": (
        {
            **_SWIN,
            "image_size": [32, 24],
            "embed_dim": 10,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        {**_MBART, "scale_embedding": False},
    ),
    "donut-odd": (
        {
            **_SWIN,
            "image_size": [22, 30],
            "embed_dim": 8,
            "depths": [2, 1, 2],
            "num_heads": [1, 2, 4],
            "window_size": 3,
            "qkv_bias": False,
        },
        {**_MBART, "tie_word_embeddings": False},
    ),
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    # As old files state it.
    "vit": {
        "feature_extractor_type": "ViTFeatureExtractor",
        "size": TILE,
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "deit": {
        "image_processor_type": "DeiTImageProcessor",
        "size": {"height": 31, "width": 31},
        "crop_size": {"height": TILE, "width": TILE},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "donut-swin": {
        "feature_extractor_type": "DonutFeatureExtractor",
        "size": [24, 32],
        "do_align_long_axis": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
}
_SIZES: dict[str, dict[str, Any]] = {
    "donut-odd": {"size": {"height": 22, "width": 30}, "do_align_long_axis": True, "resample": 3}
}


def preprocessor(case: str) -> dict[str, Any]:
    """Return the content of preprocessor_config.json of a case."""
    return {**PREPROCESSORS[CASES[case][0]["model_type"]], **_SIZES.get(case, {})}


def write_trocr(folder: Path, case: str = "vit", seed: int = 0, **changes: Any) -> Path:
    """Write the folder of a case; ``changes`` are of the decoder's part of config.json."""
    encoder, decoder = CASES[case][0], {**CASES[case][1], **changes}
    tags = TAGS if decoder["model_type"] == "mbart" else ()
    byte_level_with(folder, [AddedToken(tag, special=True, normalized=False) for tag in tags])
    contents = {
        "config.json": {
            "model_type": "vision-encoder-decoder",
            "architectures": ["VisionEncoderDecoderModel"],
            "encoder": encoder,
            "decoder": decoder,
            "tie_word_embeddings": False,
        },
        "preprocessor_config.json": preprocessor(case),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    save_file(tensors(encoder, decoder, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def tensors(encoder: dict[str, Any], decoder: dict[str, Any], seed: int) -> dict[str, npt.NDArray[Any]]:
    """Return random weights under the names of published checkpoints."""
    if encoder["model_type"] == "donut-swin":
        shapes = _swin_shapes(encoder)
        width = encoder["embed_dim"] * 2 ** (len(encoder["depths"]) - 1)
    else:
        shapes, width = _encoder_shapes(encoder), encoder["hidden_size"]
    shapes |= _decoder_shapes(decoder, width)
    random, values = np.random.default_rng(seed), dict[str, npt.NDArray[Any]]()
    for name, shape in shapes.items():
        scale = 1.0 if "embed_" in name else 0.1 if name.endswith(("bias", "reduction.weight")) else 0.3
        drawn = random.standard_normal(shape) * scale
        values[name] = np.asarray(drawn + ("norm" in name and name.endswith("weight")), np.float32)
    return values | _distances(shapes, encoder.get("window_size", 0))


def _distances(names: Iterable[str], window: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the rows of the tables of Swin for each two places of a window, which checkpoints store too."""
    places = [(row, column) for row in range(window) for column in range(window)]
    rows = [
        [(a - c + window - 1) * (2 * window - 1) + b - d + window - 1 for c, d in places] for a, b in places
    ]
    return {
        name.replace("bias_table", "index"): np.array(rows, np.int64)
        for name in names
        if name.endswith("relative_position_bias_table")
    }


def _encoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, prefix = config["hidden_size"], config["intermediate_size"], "encoder.embeddings"
    extra = ["cls_token", *(["distillation_token"] if config["model_type"] == "deit" else [])]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.{name}": (1, 1, width) for name in extra}
    shapes[f"{prefix}.position_embeddings"] = (1, (TILE // PATCH) ** 2 + len(extra), width)
    shapes |= {f"{prefix}.patch_embeddings.projection.weight": (width, 3, PATCH, PATCH)}
    shapes |= {
        f"{prefix}.patch_embeddings.projection.bias": (width,),
        **norm_shapes("encoder.layernorm", width),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.encoder.layer.{number}"
        shapes |= norm_shapes(f"{layer}.layernorm_before", width)
        shapes |= norm_shapes(f"{layer}.layernorm_after", width)
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{layer}.attention.attention.{name}", width, width, config["qkv_bias"])
        shapes |= _linear(f"{layer}.attention.output.dense", width, width)
        shapes |= _linear(f"{layer}.intermediate.dense", width, inner)
        shapes |= _linear(f"{layer}.output.dense", inner, width)
    return shapes | _linear("encoder.pooler.dense", width, width)


def _swin_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, patch, prefix = config["embed_dim"], config["patch_size"], "encoder.embeddings"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.patch_embeddings.projection.weight": (width, 3, patch, patch),
        f"{prefix}.patch_embeddings.projection.bias": (width,),
        **norm_shapes(f"{prefix}.norm", width),
    }
    for number, (depth, heads) in enumerate(zip(config["depths"], config["num_heads"], strict=True)):
        stage, inner = f"encoder.encoder.layers.{number}", int(width * config["mlp_ratio"])
        for block in range(depth):
            layer = f"{stage}.blocks.{block}"
            shapes |= norm_shapes(f"{layer}.layernorm_before", width)
            shapes |= norm_shapes(f"{layer}.layernorm_after", width)
            for name in ("query", "key", "value"):
                shapes |= _linear(f"{layer}.attention.self.{name}", width, width, config["qkv_bias"])
            table = ((2 * config["window_size"] - 1) ** 2, heads)
            shapes[f"{layer}.attention.self.relative_position_bias_table"] = table
            shapes |= _linear(f"{layer}.attention.output.dense", width, width)
            shapes |= _linear(f"{layer}.intermediate.dense", width, inner)
            shapes |= _linear(f"{layer}.output.dense", inner, width)
        if number + 1 < len(config["depths"]):
            shapes |= norm_shapes(f"{stage}.downsample.norm", 4 * width)
            shapes |= _linear(f"{stage}.downsample.reduction", 4 * width, 2 * width, False)
            width *= 2
    return shapes


def _decoder_shapes(config: dict[str, Any], seen: int) -> dict[str, tuple[int, ...]]:
    width, inner, prefix = config["d_model"], config["decoder_ffn_dim"], "decoder.model.decoder"
    rows = config.get("cross_attention_hidden_size") or width
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.embed_tokens.weight": (config["vocab_size"], width)}
    if config.get("use_learned_position_embeddings", True):
        shapes[f"{prefix}.embed_positions.weight"] = (config["max_position_embeddings"] + 2, width)
    if config.get("layernorm_embedding", True):
        shapes |= norm_shapes(f"{prefix}.layernorm_embedding", width)
    if not config.get("tie_word_embeddings", True):
        head = "lm_head" if config["model_type"] == "mbart" else "output_projection"
        shapes[f"decoder.{head}.weight"] = (config["vocab_size"], width)
    if config["model_type"] == "mbart":
        shapes |= norm_shapes(f"{prefix}.layer_norm", width)
    if rows != seen:
        shapes |= _linear("enc_to_dec_proj", seen, width)
    for number in range(config["decoder_layers"]):
        layer = f"{prefix}.layers.{number}"
        for name, source in (("self_attn", width), ("encoder_attn", rows)):
            shapes |= norm_shapes(f"{layer}.{name}_layer_norm", width)
            for module in ("k_proj", "v_proj"):
                shapes |= _linear(f"{layer}.{name}.{module}", source, width)
            for module in ("q_proj", "out_proj"):
                shapes |= _linear(f"{layer}.{name}.{module}", width, width)
        shapes |= norm_shapes(f"{layer}.final_layer_norm", width)
        shapes |= {**_linear(f"{layer}.fc1", width, inner), **_linear(f"{layer}.fc2", inner, width)}
    return shapes


def _linear(name: str, size: int, out: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, size)} | ({f"{name}.bias": (out,)} if bias else {})
