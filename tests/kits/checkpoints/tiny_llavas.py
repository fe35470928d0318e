"""Tiny configurations of LLaVA's models, with the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_layouts import attention, decoder, gated_mlp, modules, norms

Shapes = dict[str, tuple[int, ...]]

SPECIAL = ["<s>", "</s>", "<pad>", "<image>", "<video>", "<img>", "</img>", "[IMG_BREAK]", "[IMG_END]"]
BOS, EOS, PAD, IMAGE_ID, VIDEO_ID, *_ = range(256, 256 + len(SPECIAL))
NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<image>",
    "video_token": "<video>",
    "image_token": "<image>",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% elif part['type'] == 'video' %}<video>\n"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TILE, PATCH = 24, 8
RESOLUTIONS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]

_TEXT: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": TILE,
    "patch_size": PATCH,
    "projection_dim": 16,
}
_COMMON: dict[str, Any] = {
    "image_token_index": IMAGE_ID,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
    "vision_config": _CLIP,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {**_COMMON, "text_config": {**_TEXT, "model_type": "llama"}},
    "llava_next": {
        **_COMMON,
        "image_grid_pinpoints": RESOLUTIONS,
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
    },
}
CONFIGS["llava_next_video"] = {
    **_COMMON,
    "video_token_index": VIDEO_ID,
    "spatial_pool_mode": "average",
    "spatial_pool_stride": 2,
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
    "text_config": {**_TEXT, "model_type": "llama"},
    "vision_config": {**_CLIP, "image_size": 32},
}
CONFIGS["llava_onevision"] = {
    **_COMMON,
    "image_token_index": IMAGE_ID,
    "video_token_index": VIDEO_ID,
    "image_grid_pinpoints": [
        [rows * TILE, columns * TILE] for rows in range(1, 5) for columns in range(1, 5)
    ],
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
    "text_config": {**_TEXT, "model_type": "qwen2"},
    "vision_config": {
        **{key: value for key, value in _CLIP.items() if key != "projection_dim"},
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
    },
}
CONFIGS["internvl"] = {
    "image_token_id": IMAGE_ID,
    "downsample_ratio": 0.5,
    "tie_word_embeddings": False,
    "text_config": {**_TEXT, "model_type": "qwen2"},
    "vision_config": {
        "model_type": "internvl_vision",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": [32, 32],
        "patch_size": [8, 8],
        "attention_bias": True,
        "hidden_act": "gelu",
    },
}
CONFIGS["mistral3"] = {
    "image_token_index": IMAGE_ID,
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "tie_word_embeddings": False,
    "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "head_dim": 8,
        "image_size": 64,
        "patch_size": 8,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
}
CONFIGS["llava+pixtral"] = {
    "model_type": "llava",
    "image_token_index": IMAGE_ID,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": False,
    "text_config": CONFIGS["mistral3"]["text_config"],
    "vision_config": CONFIGS["mistral3"]["vision_config"],
}
CONFIGS["lighton_ocr"] = {
    "image_token_id": IMAGE_ID,
    "spatial_merge_size": 2,
    "tie_word_embeddings": False,
    "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16},
    "vision_config": CONFIGS["mistral3"]["vision_config"],
}


def preprocessor(model_type: str) -> dict[str, Any]:
    """Return preprocessor_config.json, as published."""
    square = {"height": TILE, "width": TILE}
    common = {"crop_size": square, "size": {"shortest_edge": TILE}, "do_center_crop": True}
    if model_type == "llava":
        return {**common, "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True}
    if model_type == "llava+pixtral":
        size = {"longest_edge": 48}
        return {"size": size, "patch_size": PATCH, "image_processor_type": "PixtralImageProcessor"}
    if model_type in ("mistral3", "lighton_ocr"):
        sizes = {"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}}
        return {**sizes, "image_processor_type": "PixtralImageProcessorFast", "do_center_crop": None}
    if model_type == "internvl":
        size = {"height": 32, "width": 32}
        options = {"crop_to_patches": False, "min_patches": 1, "max_patches": 6}
        return {**options, "size": size, "image_processor_type": "GotOcr2ImageProcessor"}
    if model_type == "llava_onevision":
        return {
            "size": square,
            "do_pad": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": CONFIGS[model_type]["image_grid_pinpoints"],
        }
    if model_type == "llava_next_video":
        common = {"crop_size": {"height": 32, "width": 32}, "size": {"shortest_edge": 32}}
    return {
        **common,
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": CONFIGS[model_type]["image_grid_pinpoints"],
        "aspect_ratio_setting": "anyres",
    }


def processor(model_type: str) -> dict[str, Any]:
    """Return processor_config.json."""
    if model_type == "lighton_ocr":
        options: dict[str, Any] = {"patch_size": PATCH, "spatial_merge_size": 2}
        return {"processor_class": "LightOnOcrProcessor", **options}
    if model_type == "llava+pixtral":
        return {"processor_class": "PixtralProcessor", "image_token": "<image>", "patch_size": PATCH}
    if model_type == "mistral3":
        options = {"image_token": "<image>", "patch_size": PATCH, "spatial_merge_size": 2}
        return {"processor_class": "PixtralProcessor", **options}
    if model_type == "internvl":
        return {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    if model_type == "llava_onevision":
        return {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": (TILE // PATCH) ** 2,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        }
    return {
        "processor_class": {
            "llava": "LlavaProcessor",
            "llava_next": "LlavaNextProcessor",
            "llava_next_video": "LlavaNextVideoProcessor",
        }[model_type],
        "patch_size": PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a checkpoint's tensors by name, as published."""
    text, vision = config["text_config"], config["vision_config"]

    def layer(_: int) -> Shapes:
        bias = text["model_type"] == "qwen2"
        heads = modules(self_attn__q_norm=(16,), self_attn__k_norm=(16,)) if "3" in text["model_type"] else {}
        return {**attention(text, bias), **heads, **gated_mlp(text), **norms(text, "input", "post_attention")}

    size, width = vision["hidden_size"], text["hidden_size"]
    if config["model_type"] == "lighton_ocr":
        found = decoder({**text, "tie_word_embeddings": False}, layer, prefix="model.language_model.")
        found |= {f"model.vision_encoder.{name}": shape for name, shape in _pixtral(vision).items()}
        projector = modules(norm=(size,), linear_1=(width, size), linear_2=(width, width))
        projector |= modules(patch_merger__merging_layer=(size, 4 * size))
        return {**found, **{f"model.vision_projection.{name}": shape for name, shape in projector.items()}}
    found = decoder({**text, "tie_word_embeddings": False}, layer, prefix="language_model.model.")
    found["language_model.lm_head.weight"] = found.pop("lm_head.weight")
    if config["model_type"] == "llava" and vision["model_type"] == "pixtral":
        found |= {f"vision_tower.{name}": shape for name, shape in _pixtral(vision).items()}
        projector = modules(True, linear_1=(width, size), linear_2=(width, width))
        return {**found, **{f"multi_modal_projector.{name}": shape for name, shape in projector.items()}}
    if config["model_type"] == "mistral3":
        found |= {f"vision_tower.{name}": shape for name, shape in _pixtral(vision).items()}
        projector = modules(norm=(size,), linear_1=(width, size), linear_2=(width, width))
        projector |= modules(patch_merger__merging_layer=(size, 4 * size))
        return {**found, **{f"multi_modal_projector.{name}": shape for name, shape in projector.items()}}
    if config["model_type"] == "internvl":
        found |= {f"vision_tower.{name}": shape for name, shape in _internvl_tower(vision).items()}
        projector = modules(True, layer_norm=(4 * size,), linear_1=(width, 4 * size), linear_2=(width, width))
        return {**found, **{f"multi_modal_projector.{name}": shape for name, shape in projector.items()}}
    found |= {f"vision_tower.vision_model.{name}": shape for name, shape in _tower(vision).items()}
    projector = modules(True, linear_1=(width, size), linear_2=(width, width))
    found |= {f"multi_modal_projector.{name}": shape for name, shape in projector.items()}
    return found if config["model_type"] == "llava" else {**found, "image_newline": (width,)}


def _tower(vision: Mapping[str, Any]) -> Shapes:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    clip = vision["model_type"] == "clip_vision_model"
    found: Shapes = {
        "embeddings.patch_embedding.weight": (size, 3, patch, patch),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2 + clip, size),
        **modules(True, post_layernorm=(size,)),
    }
    if clip:
        found |= {"embeddings.class_embedding": (size,), **modules(True, pre_layrnorm=(size,))}
    else:
        found |= {"embeddings.patch_embedding.bias": (size,)}
    for number in range(vision["num_hidden_layers"]):
        square = (size, size)
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
        found |= {f"encoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found


def _internvl_tower(vision: Mapping[str, Any]) -> Shapes:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"][0]
    found: Shapes = {
        "embeddings.cls_token": (1, 1, size),
        "embeddings.position_embeddings": (1, (vision["image_size"][0] // patch) ** 2 + 1, size),
        "embeddings.patch_embeddings.projection.weight": (size, 3, patch, patch),
        "embeddings.patch_embeddings.projection.bias": (size,),
    }
    for number in range(vision["num_hidden_layers"]):
        square = (size, size)
        layer = modules(
            True,
            attention__q_proj=square,
            attention__k_proj=square,
            attention__v_proj=square,
            attention__projection_layer=square,
            layernorm_before=(size,),
            layernorm_after=(size,),
            mlp__fc1=(inner, size),
            mlp__fc2=(size, inner),
        )
        layer |= {"lambda_1": (size,), "lambda_2": (size,)}
        found |= {f"encoder.layer.{number}.{name}": shape for name, shape in layer.items()}
    return found


def _pixtral(vision: Mapping[str, Any]) -> Shapes:
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    found: Shapes = {"patch_conv.weight": (size, 3, patch, patch), "ln_pre.weight": (size,)}
    for number in range(vision["num_hidden_layers"]):
        layer = {f"attention.{name}_proj.weight": (size, size) for name in "qkvo"} | modules(
            attention_norm=(size,),
            ffn_norm=(size,),
            feed_forward__gate_proj=(inner, size),
            feed_forward__up_proj=(inner, size),
            feed_forward__down_proj=(size, inner),
        )
        found |= {f"transformer.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found
