"""A tiny configuration of LFM2-VL, with the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_layouts import LAYOUTS, modules

Shapes = dict[str, tuple[int, ...]]

_SIDE = 4  # tiles along an edge that the tokenizer names
SPECIAL = [
    *("<|startoftext|>", "<|im_end|>", "<|pad|>", "<image>"),
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, _SIDE + 1) for column in range(1, _SIDE + 1)),
]
BOS, EOS, PAD, IMAGE_ID, *_ = range(256, 256 + len(SPECIAL))
NAMES = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
CHAT_TEMPLATE = (
    "<|startoftext|>{% for message in messages %}{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
PATCH = 8
_LAYOUT, _DECODER_SHAPES = LAYOUTS["lfm2"]
CONFIG: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "downsample_factor": 2,
    "projector_hidden_size": 40,
    "projector_hidden_act": "gelu",
    "projector_use_layernorm": True,
    "projector_bias": True,
    "tie_embedding": True,  # as published
    "text_config": {
        **_LAYOUT,
        "model_type": "lfm2",
        "vocab_size": 256 + len(SPECIAL),
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    },
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_patches": 25,
        "patch_size": PATCH,
        "vision_use_head": False,
    },
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "encoder_patch_size": PATCH,
    "downsample_factor": 2,
    "min_tiles": 2,
    "max_tiles": 6,
    "tile_size": 32,
    "min_image_tokens": 2,
    "max_image_tokens": 8,
    "max_pixels_tolerance": 1.5,
    "use_thumbnail": True,
}
PROCESSOR: dict[str, Any] = {"processor_class": "Lfm2VlProcessor"}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name, as published."""
    text, vision = config["text_config"], config["vision_config"]
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    found: Shapes = {
        name.replace("model.", "model.language_model.", 1): shape
        for name, shape in _DECODER_SHAPES(text).items()
    }
    tower = {
        "embeddings.position_embedding.weight": (vision["num_patches"], size),
        **modules(True, post_layernorm=(size,), embeddings__patch_embedding=(size, 3 * patch**2)),
    }
    square = (size, size)
    for number in range(vision["num_hidden_layers"]):
        layer = modules(
            True,
            self_attn__q_proj=square,
            self_attn__k_proj=square,
            self_attn__v_proj=square,
            self_attn__out_proj=square,
            layer_norm1=(size,),
            layer_norm2=(size,),
            mlp__fc1=(inner, size),
            mlp__fc2=(size, inner),
        )
        tower |= {f"encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    found |= {f"model.vision_tower.vision_model.{name}": shape for name, shape in tower.items()}
    joined, between = size * config["downsample_factor"] ** 2, config["projector_hidden_size"]
    projector = modules(
        True, layer_norm=(joined,), linear_1=(between, joined), linear_2=(text["hidden_size"], between)
    )
    return {**found, **{f"model.multi_modal_projector.{name}": shape for name, shape in projector.items()}}
