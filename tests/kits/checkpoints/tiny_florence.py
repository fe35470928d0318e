"""A tiny random Florence-2, as a Hugging Face folder, from a seed: windows that do not fit its stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from text_kit import byte_level_with
from tiny_whisper import norm_shapes
from tokenizers import AddedToken

BEGIN, END, PADDING, IMAGE = 256, 257, 258, 259
TOKENS = ("<pad>", "<image>", *(f"<loc_{number}>" for number in range(12)))
TILE, ROWS, WIDTH = 32, 17, 32

_TEXT: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 258 + len(TOKENS),
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PADDING,
    "decoder_start_token_id": END,
    "forced_eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "model_type": "florence_vision",
    "depths": [1, 2],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "embed_dim": [8, 16],
    "num_heads": [2, 4],
    "num_groups": [4, 2],
    "window_size": 3,
    "mlp_ratio": 2.0,
    "projection_dim": WIDTH,
    "max_temporal_embeddings": 4,
    "max_position_embeddings": 6,
}


def write_florence(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the folder; ``changes`` are of ``vision_config``."""
    byte_level_with(folder, [AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vision = {**_VISION, **changes}
    contents = {
        "config.json": {
            "model_type": "florence2",
            "architectures": ["Florence2ForConditionalGeneration"],
            "text_config": _TEXT,
            "vision_config": vision,
            "image_token_id": IMAGE,
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
        },
        "generation_config.json": {
            "bos_token_id": BEGIN,
            "eos_token_id": END,
            "decoder_start_token_id": END,
            "forced_bos_token_id": BEGIN,
            "no_repeat_ngram_size": 3,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": TILE, "width": TILE},
            "do_center_crop": False,
            "image_seq_length": ROWS,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
        "tokenizer_config.json": {**tokenizer, "pad_token": "<pad>", "image_token": "<image>"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    random, values = np.random.default_rng(seed), {}
    for name, shape in _shapes(vision).items():
        scale = 0.1 if name.endswith("bias") else 1.0 if "shared" in name else 0.3
        drawn = random.standard_normal(shape) * scale
        values[name] = np.asarray(drawn + ("norm" in name and name.endswith("weight")), np.float32)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return folder


def _shapes(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return _tower(vision) | _projector(vision) | _language()


def _tower(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    seen = 3
    for stage, width in enumerate(vision["embed_dim"]):
        name, kernel = f"model.vision_tower.convs.{stage}", vision["patch_size"][stage]
        shapes |= {f"{name}.conv.weight": (width, seen, kernel, kernel), f"{name}.conv.bias": (width,)}
        shapes |= norm_shapes(f"{name}.norm", seen if vision["patch_prenorm"][stage] else width)
        for layer in range(vision["depths"][stage]):
            for kind, attention in (("spatial", "window_attn"), ("channel", "channel_attn")):
                block = f"model.vision_tower.blocks.{stage}.{layer}.{kind}_block"
                for number in (1, 2):
                    shapes |= {f"{block}.conv{number}.weight": (width, 1, 3, 3)}
                    shapes |= {f"{block}.conv{number}.bias": (width,)}
                    shapes |= norm_shapes(f"{block}.norm{number}", width)
                inner = int(width * vision["mlp_ratio"])
                shapes |= _linear(f"{block}.{attention}.qkv", width, 3 * width)
                shapes |= _linear(f"{block}.{attention}.proj", width, width)
                shapes |= {
                    **_linear(f"{block}.ffn.fc1", width, inner),
                    **_linear(f"{block}.ffn.fc2", inner, width),
                }
        seen = width
    return shapes


def _projector(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    name, last, most = (
        "model.multi_modal_projector",
        vision["embed_dim"][-1],
        vision["max_position_embeddings"],
    )
    return {
        f"{name}.image_position_embed.row_embeddings.weight": (most, last // 2),
        f"{name}.image_position_embed.column_embeddings.weight": (most, last - last // 2),
        f"{name}.image_projection.weight": (WIDTH, last),
        **norm_shapes(f"{name}.image_proj_norm", WIDTH),
    }


def _language() -> dict[str, tuple[int, ...]]:
    prefix = "model.language_model"
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.shared.weight": (_TEXT["vocab_size"], WIDTH)}
    for part in ("encoder", "decoder"):
        inner = _TEXT[f"{part}_ffn_dim"]
        shapes[f"{prefix}.{part}.embed_positions.weight"] = (_TEXT["max_position_embeddings"] + 2, WIDTH)
        shapes |= norm_shapes(f"{prefix}.{part}.layernorm_embedding", WIDTH)
        for number in range(2):
            layer = f"{prefix}.{part}.layers.{number}"
            for name in ("self_attn", *(["encoder_attn"] if part == "decoder" else [])):
                shapes |= norm_shapes(f"{layer}.{name}_layer_norm", WIDTH)
                for module in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes |= _linear(f"{layer}.{name}.{module}", WIDTH, WIDTH)
            shapes |= norm_shapes(f"{layer}.final_layer_norm", WIDTH)
            shapes |= {**_linear(f"{layer}.fc1", WIDTH, inner), **_linear(f"{layer}.fc2", inner, WIDTH)}
    return shapes


def _linear(name: str, size: int, out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, size), f"{name}.bias": (out,)}
