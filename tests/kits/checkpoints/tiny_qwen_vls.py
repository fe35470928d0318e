"""Tiny configurations of Qwen's models that see, with the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_layouts import LAYOUTS, attention, decoder, gated_mlp, modules, norms

Shapes = dict[str, tuple[int, ...]]

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
BOS, EOS, PAD, START, END, IMAGE_ID, VIDEO_ID = range(256, 256 + len(SPECIAL))
IMAGE = "<|image_pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_TOKENS = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
_IDS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TOWER: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_TEXT: dict[str, Any] = {
    **_TEXT,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_QWEN3_TOWER: dict[str, Any] = {
    **_TOWER,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 3,
    "out_hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}

CONFIGS: dict[str, dict[str, Any]] = {
    # As published: the decoder's fields are not in a part of their own.
    "qwen2_vl": {
        **_TEXT,
        **_IDS,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {
            **_TOWER,
            "embed_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "hidden_act": "quick_gelu",
        },
    },
    # As transformers 5 writes it.
    "qwen2_5_vl": {
        **_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            **_TOWER,
            "model_type": "qwen2_5_vl_vision",
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
        },
    },
    "qwen3_vl": {
        **_IDS,
        "tie_word_embeddings": False,
        "text_config": {**_QWEN3_TEXT, "model_type": "qwen3_vl_text"},
        "vision_config": {**_QWEN3_TOWER, "model_type": "qwen3_vl_vision"},
    },
}
CONFIGS["qwen3_vl_moe"] = {
    **CONFIGS["qwen3_vl"],
    "text_config": {
        **_QWEN3_TEXT,
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "vision_config": {**_QWEN3_TOWER, "model_type": "qwen3_vl_moe_vision"},
}
for _kind in ("qwen3_5", "qwen3_5_moe"):
    CONFIGS[_kind] = {
        **_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **LAYOUTS[_kind][0]["text_config"],
            **{key: _TEXT[key] for key in _TOKENS},
            "linear_key_head_dim": 16,  # as carryall's kernels take them
            "linear_value_head_dim": 16,
        },
        "vision_config": {
            **{key: value for key, value in _QWEN3_TOWER.items() if key != "deepstack_visual_indexes"},
            "model_type": f"{_kind}_vision",
        },
    }
# As published: the decoder's fields are not in a part of their own.
CONFIGS["paddleocr_vl"] = {
    **_TEXT,
    **_IDS,
    "head_dim": 16,
    "use_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3]},
    "vision_config": {
        "model_type": "paddleocr_vl",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 56,
        "patch_size": 8,
        "spatial_merge_size": 2,
    },
}
CONFIGS["glm_ocr"] = {
    **_IDS,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "tie_word_embeddings": False,
    "text_config": {
        **_TEXT,
        "model_type": "glm_ocr_text",
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 2],
        },
    },
    "vision_config": {
        **_TOWER,
        "model_type": "glm_ocr_vision",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 3,
        "out_hidden_size": 32,
        "hidden_act": "silu",
        "attention_bias": True,
    },
}
# How the checkpoints name decoder and tower: published ones, and those of transformers 5.
_PREFIXES = {"qwen2_vl": ("model.", "visual."), "paddleocr_vl": ("model.", "")}


def preprocessor(model_type: str) -> dict[str, Any]:
    """Return preprocessor_config.json."""
    common = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2,
              "temporal_patch_size": 2}  # fmt: skip
    if model_type == "paddleocr_vl":
        name = "PaddleOCRVLImageProcessor"
        return {**common, "temporal_patch_size": 1, "image_processor_type": name, "min_pixels": 512,
                "max_pixels": 6000}  # fmt: skip
    if model_type == "glm_ocr":
        size = {"shortest_edge": 1024, "longest_edge": 12000}
        return {**common, "size": size, "image_processor_type": "Glm46VImageProcessor"}
    if model_type == "qwen2_vl":
        return {**common, "min_pixels": 512, "max_pixels": 6000}
    size = {"shortest_edge": 512, "longest_edge": 6000}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if model_type.startswith("qwen3") else {}
    return {**common, **half, "size": size, "image_processor_type": "Qwen2VLImageProcessorFast"}


def processor(model_type: str) -> dict[str, Any]:
    """Return processor_config.json."""
    if model_type == "paddleocr_vl":
        return {"processor_class": "PaddleOCRVLProcessor"}
    if model_type == "glm_ocr":
        return {"processor_class": "Glm46VProcessor"}
    return {"processor_class": "Qwen3VLProcessor" if "3" in model_type else "Qwen2VLProcessor"}


def names(model_type: str) -> dict[str, str]:
    """Return the tokens that the processor asks the tokenizer for by name."""
    return {"image_token": IMAGE} if model_type in ("paddleocr_vl", "glm_ocr") else {}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name."""
    kind, vision = config["model_type"], config["vision_config"]
    text = {**config, **config.get("text_config", {}), "tie_word_embeddings": config["tie_word_embeddings"]}
    first, tower = _PREFIXES.get(kind, ("model.language_model.", "model.visual."))

    third = kind.startswith("qwen3")

    def layer(number: int) -> Shapes:
        size = (text.get("head_dim", 16),)
        heads = {"self_attn.q_norm.weight": size, "self_attn.k_norm.weight": size}
        if kind == "glm_ocr":
            return _glm_layer(text)
        plain = kind == "paddleocr_vl"
        attending = attention(text, bias=False) | heads if third else attention(text, bias=not plain)
        sparse = "num_experts" in text and number not in text["mlp_only_layers"]
        mlp = _experts(text) if sparse else gated_mlp(text)
        return {**attending, **mlp, **norms(text, "input", "post_attention")}

    if kind.startswith("qwen3_5"):
        whole = LAYOUTS[kind][1](config)
        found = {name: shape for name, shape in whole.items() if not name.startswith(("mtp", "model.visual"))}
    else:
        found = decoder(text, layer, prefix=first)
    if kind == "paddleocr_vl":
        written = _paddle_tower(vision, text)
    elif kind == "glm_ocr":
        written = _glm_tower(vision)
    else:
        written = _qwen3_tower(vision) if third else _tower(kind, vision)
    return {**found, **{f"{tower}{name}": shape for name, shape in written.items()}}


def _experts(text: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a mixture of experts; its stacks are [experts, in, out]."""
    count, width, hidden = text["num_experts"], text["moe_intermediate_size"], text["hidden_size"]
    return {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * width),
        "mlp.experts.down_proj": (count, width, hidden),
    }


def _glm_layer(text: Mapping[str, Any]) -> Shapes:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    names = ("input", "post_attention", "post_self_attn", "post_mlp")
    mlp = modules(mlp__gate_up_proj=(2 * inner, hidden), mlp__down_proj=(hidden, inner))
    return {**attention(text), **mlp, **norms(text, *names)}


def _glm_tower(vision: Mapping[str, Any]) -> Shapes:
    size, inner, out, patch = (
        vision[key] for key in ("hidden_size", "intermediate_size", "out_hidden_size", "patch_size")
    )
    head = size // vision["num_heads"]
    found: Shapes = {
        "patch_embed.proj.weight": (size, 3, vision["temporal_patch_size"], patch, patch),
        "patch_embed.proj.bias": (size,),
        "downsample.weight": (out, size, 2, 2),
        "downsample.bias": (out,),
        "post_layernorm.weight": (size,),
        **modules(merger__proj=(out, out), merger__gate_proj=(3 * out, out)),
        **modules(merger__up_proj=(3 * out, out), merger__down_proj=(out, 3 * out)),
        **modules(True, merger__post_projection_norm=(out,)),
    }
    for number in range(vision["depth"]):
        linears = modules(True, attn__qkv=(3 * size, size), attn__proj=(size, size))
        linears |= modules(True, mlp__gate_proj=(inner, size), mlp__up_proj=(inner, size))
        linears |= modules(True, mlp__down_proj=(size, inner))
        layer = linears | modules(norm1=(size,), norm2=(size,), attn__q_norm=(head,), attn__k_norm=(head,))
        found |= {f"blocks.{number}.{name}": shape for name, shape in layer.items()}
    return found


def _paddle_tower(vision: Mapping[str, Any], text: Mapping[str, Any]) -> Shapes:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower: Shapes = {
        "embeddings.patch_embedding.weight": (size, 3, patch, patch),
        "embeddings.patch_embedding.bias": (size,),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, size),
        **modules(True, post_layernorm=(size,)),
    }
    for number in range(vision["num_hidden_layers"]):
        layer = modules(
            True,
            **{f"self_attn__{name}_proj": (size, size) for name in ("q", "k", "v", "out")},
            layer_norm1=(size,),
            layer_norm2=(size,),
            mlp__fc1=(inner, size),
            mlp__fc2=(size, inner),
        )
        tower |= {f"encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    projector = modules(
        True, pre_norm=(size,), linear_1=(4 * size, 4 * size), linear_2=(text["hidden_size"], 4 * size)
    )
    return {
        **{f"visual.vision_model.{name}": shape for name, shape in tower.items()},
        **{f"mlp_AR.{name}": shape for name, shape in projector.items()},
    }


def _tower(kind: str, vision: Mapping[str, Any]) -> Shapes:
    old = kind == "qwen2_vl"
    size = vision["embed_dim" if old else "hidden_size"]
    out = vision["hidden_size" if old else "out_hidden_size"]
    inner = vision["embed_dim"] * vision["mlp_ratio"] if old else vision["intermediate_size"]
    joined = size * vision["spatial_merge_size"] ** 2
    patch = vision["patch_size"]
    found: Shapes = {"patch_embed.proj.weight": (size, 3, vision["temporal_patch_size"], patch, patch)}
    for number in range(vision["depth"]):
        if old:
            mlp = modules(True, mlp__fc1=(inner, size), mlp__fc2=(size, inner))
        else:
            wide = {"mlp__gate_proj": (inner, size), "mlp__up_proj": (inner, size)}
            mlp = modules(True, **wide, mlp__down_proj=(size, inner))
        layer = {
            **modules(old, norm1=(size,), norm2=(size,)),
            **modules(True, attn__qkv=(3 * size, size), attn__proj=(size, size)),
            **mlp,
        }
        found |= {f"blocks.{number}.{name}": shape for name, shape in layer.items()}
    found |= modules(old, merger__ln_q=(size,))
    return found | modules(True, merger__mlp__0=(joined, joined), merger__mlp__2=(out, joined))


def _qwen3_tower(vision: Mapping[str, Any]) -> Shapes:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    joined, out = size * vision["spatial_merge_size"] ** 2, vision["out_hidden_size"]
    found: Shapes = {
        "patch_embed.proj.weight": (size, 3, vision["temporal_patch_size"], patch, patch),
        "patch_embed.proj.bias": (size,),
        "pos_embed.weight": (vision["num_position_embeddings"], size),
    }
    for number in range(vision["depth"]):
        layer = modules(
            True,
            norm1=(size,),
            norm2=(size,),
            attn__qkv=(3 * size, size),
            attn__proj=(size, size),
            mlp__linear_fc1=(inner, size),
            mlp__linear_fc2=(size, inner),
        )
        found |= {f"blocks.{number}.{name}": shape for name, shape in layer.items()}
    mergers = {"merger": size}
    deep = len(vision.get("deepstack_visual_indexes", ()))
    mergers |= {f"deepstack_merger_list.{number}": joined for number in range(deep)}
    for name, normed in mergers.items():
        parts = modules(True, norm=(normed,), linear_fc1=(joined, joined), linear_fc2=(out, joined))
        found |= {f"{name}.{part}": shape for part, shape in parts.items()}
    return found
