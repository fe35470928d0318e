"""Tiny random checkpoints of encoders of texts and pictures, with the tensors that transformers 5.24 saves.

``picture_encoder_shapes.json`` has their shapes; ``picture_encoder_golden.py`` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from text_kit import write_byte_level
from tokenizers import Tokenizer, processors

PATCH, TILE, LENGTH = 8, 24, 20
END, PADDING = 257, 256
SHAPES = Path(__file__).with_name("picture_encoder_shapes.json")
TEXTS = ["a photo of a cat", "Two Dogs", "x"]

_LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_LAYERS, "vocab_size": 258, "max_position_embeddings": LENGTH}
_ENDS = {"bos_token_id": 256, "eos_token_id": END, "pad_token_id": PADDING}
_CLIP: dict[str, Any] = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "projection_dim": 12,
    "text_config": {**_TEXT, **_ENDS, "projection_dim": 12},
    "vision_config": {
        **_LAYERS,
        "hidden_size": 20,
        "image_size": TILE,
        "patch_size": PATCH,
        "projection_dim": 12,
    },
}
# Case -> config.json.
CASES: dict[str, dict[str, Any]] = {
    "clip": _CLIP,
    "clip-old": {**_CLIP, "text_config": {**_CLIP["text_config"], "eos_token_id": 2, "hidden_act": "gelu"}},
    "siglip": {
        "model_type": "siglip",
        "architectures": ["SiglipModel"],
        "text_config": {**_TEXT, **_ENDS},
        "vision_config": {**_LAYERS, "image_size": TILE, "patch_size": PATCH},
    },
    "siglip2": {
        "model_type": "siglip2",
        "architectures": ["Siglip2Model"],
        "text_config": {**_TEXT, **_ENDS, "projection_size": 16},
        "vision_config": {**_LAYERS, "patch_size": PATCH, "num_patches": 9},
    },
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "clip": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": TILE},
        "crop_size": {"height": TILE, "width": TILE},
        "resample": 3,
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": TILE, "width": TILE}},
    "siglip2": {"image_processor_type": "Siglip2ImageProcessor", "patch_size": PATCH, "max_num_patches": 30},
}


def write_picture_encoder(folder: Path, case: str, *, seed: int = 0) -> Path:
    """Write the checkpoint of a case and return ``folder``; its tokenizer ends a text with ``</s>``."""
    config, kind = CASES[case], CASES[case]["model_type"]
    write_byte_level(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>" if kind == "clip" else "$A </s>", special_tokens=[("<s>", 256), ("</s>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    settings |= {"tokenizer_class": "Siglip2Tokenizer", "padding_side": "left"} if kind == "siglip2" else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[kind]), encoding="utf-8")
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(json.loads(SHAPES.read_text())[case].items()):
        values = rng.standard_normal(shape) * 0.3
        scale = ("norm" in name and name.endswith("weight")) or name == "logit_scale"
        tensors[name] = np.asarray(values + 1 if scale else values, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
