"""Tiny configurations of Gemma's models that see, with the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_layouts import attention, decoder, gated_mlp, modules, norms

Shapes = dict[str, tuple[int, ...]]

SPECIAL = [
    *("<bos>", "<eos>", "<pad>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<start_of_turn>", "<end_of_turn>"),
]
BOS, EOS, PAD, BEGIN_ID, END_ID, IMAGE_ID, *_ = range(256, 256 + len(SPECIAL))
NAMES = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
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
CONFIGS: dict[str, dict[str, Any]] = {"gemma3": _GEMMA3, "gemma3+crops": {**_GEMMA3, "model_type": "gemma3"}}


def preprocessor(model_type: str) -> dict[str, Any]:
    """Return preprocessor_config.json, as published."""
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
    return {"processor_class": "Gemma3Processor", "image_seq_length": 4}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name, as published."""
    text, vision = config["text_config"], config["vision_config"]

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
