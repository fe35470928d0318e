"""Tiny configurations of Gemma's models that see, with the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_layouts import LAYOUTS, attention, decoder, gated_mlp, modules, norms

Shapes = dict[str, tuple[int, ...]]

SPECIAL = [
    *("<bos>", "<eos>", "<pad>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<start_of_turn>", "<end_of_turn>", "<|audio>", "<audio|>", "<|audio|>"),
]
BOS, EOS, PAD, BEGIN_ID, END_ID, IMAGE_ID, *_, AUDIO_ID = range(256, 256 + len(SPECIAL))
NAMES = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
# Gemma 4's writes the token of a row for a picture, Gemma 3's that in front of them.
PLACES = {"gemma3": "<start_of_image>", "gemma4": "<image_soft_token>"}
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TILE, PATCH = 32, 8

_GEMMA3: dict[str, Any] = {
    "image_token_index": IMAGE_ID,
    "boi_token_index": BEGIN_ID,
    "eoi_token_index": END_ID,
    "mm_tokens_per_image": 4,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": TILE,
        "patch_size": PATCH,
        "vision_use_head": False,
    },
}
_GEMMA4: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "boi_token_id": BEGIN_ID,
    "eoi_token_id": END_ID,
    "audio_token_id": AUDIO_ID,
    "video_token_id": AUDIO_ID,
    "audio_config": None,
    "tie_word_embeddings": True,
    "text_config": {
        **LAYOUTS["gemma4_text"][0],
        "model_type": "gemma4_text",
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256 + len(SPECIAL),
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 256,
        "use_clipped_linears": True,
    },
}
# The larger models have no embeddings of each layer, and pictures whose tokens see each other.
_JOINED = {
    key: value
    for key, value in _GEMMA4["text_config"].items()
    if "per_layer" not in key and "shared" not in key
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": _GEMMA3,
    "gemma3+crops": {**_GEMMA3, "model_type": "gemma3"},
    "gemma4": _GEMMA4,
    "gemma4+joined": {
        **_GEMMA4,
        "model_type": "gemma4",
        "text_config": {**_JOINED, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        "vision_config": {**_GEMMA4["vision_config"], "use_clipped_linears": False, "standardize": True},
    },
}


def template(model_type: str) -> str:
    """Return the chat template."""
    return _TEMPLATE.replace("PLACE", PLACES[model_type.partition("+")[0]])


def preprocessor(model_type: str) -> dict[str, Any]:
    """Return preprocessor_config.json, as published."""
    if model_type.startswith("gemma4"):
        return {
            "do_normalize": False,
            "image_processor_type": "Gemma4ImageProcessor",
            "max_soft_tokens": 70,
            "patch_size": 4,
            "pooling_kernel_size": 3,
        }
    crops: dict[str, Any] = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    nothing = dict.fromkeys([*crops, "do_convert_rgb"])
    return {
        **(crops if model_type.endswith("crops") else nothing),
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 4,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": TILE, "width": TILE},
    }


def processor(model_type: str) -> dict[str, Any]:
    """Return processor_config.json."""
    if model_type.startswith("gemma4"):
        return {"processor_class": "Gemma4Processor"}
    return {"processor_class": "Gemma3Processor", "image_seq_length": 4}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name, as published."""
    text, vision = config["text_config"], config["vision_config"]
    if config["model_type"] == "gemma4":
        decoder_shapes = LAYOUTS["gemma4"][1](config)
        kept = {name: shape for name, shape in decoder_shapes.items() if "language_model" in name}
        return {**kept, **_gemma4_tower(vision, text)}

    def layer(_: int) -> Shapes:
        heads = modules(self_attn__q_norm=(16,), self_attn__k_norm=(16,))
        around = norms(text, "input", "post_attention", "pre_feedforward", "post_feedforward")
        return {**attention(text), **heads, **gated_mlp(text), **around}

    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower: Shapes = {
        "embeddings.patch_embedding.weight": (size, 3, patch, patch),
        "embeddings.patch_embedding.bias": (size,),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, size),
        **modules(True, post_layernorm=(size,)),
    }
    for number in range(vision["num_hidden_layers"]):
        projections = {f"self_attn__{name}_proj": (size, size) for name in ("q", "k", "v", "out")}
        rest = {
            "layer_norm1": (size,),
            "layer_norm2": (size,),
            "mlp__fc1": (inner, size),
            "mlp__fc2": (size, inner),
        }
        parts = modules(True, **projections, **rest)
        tower |= {f"encoder.layers.{number}.{name}": shape for name, shape in parts.items()}
    return {
        **decoder(text, layer, prefix="language_model.model."),
        **{f"vision_tower.vision_model.{name}": shape for name, shape in tower.items()},
        "multi_modal_projector.mm_input_projection_weight": (size, text["hidden_size"]),
        "multi_modal_projector.mm_soft_emb_norm.weight": (size,),
    }


def _gemma4_tower(vision: Mapping[str, Any], text: Mapping[str, Any]) -> Shapes:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    tower: Shapes = {
        "patch_embedder.position_embedding_table": (2, vision["position_embedding_size"], size),
        "patch_embedder.input_proj.weight": (size, 3 * patch * patch),
    }
    if vision.get("standardize"):
        tower |= {"std_bias": (size,), "std_scale": (size,)}
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for number in range(vision["num_hidden_layers"]):
        linears = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
        linears |= {
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        layer = modules(self_attn__q_norm=(vision["head_dim"],), self_attn__k_norm=(vision["head_dim"],))
        layer |= modules(**{f"{name}_layernorm": (size,) for name in names})
        for name, shape in linears.items():
            layer[f"{name}.linear.weight"] = shape
            if vision["use_clipped_linears"]:
                layer |= {
                    f"{name}.{side}_{end}": () for side in ("input", "output") for end in ("min", "max")
                }
        tower |= {f"encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {
        **{f"model.vision_tower.{name}": shape for name, shape in tower.items()},
        "model.embed_vision.embedding_projection.weight": (text["hidden_size"], size),
    }
