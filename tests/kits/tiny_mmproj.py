"""A tiny checkpoint that sees as two GGUF files, its decoder and its vision tower, as llama.cpp converts it.

Names are those of the gguf package's own table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tiny_gemma_vls
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file
from tiny_gguf import set_value
from tiny_vlms import write_vlm

from carryall.exporter.image_processor import CLIP_MEAN, CLIP_STD

Json = dict[str, Any]
Weights = dict[str, npt.NDArray[np.float32]]
TYPES = {
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
}
_DECODERS = {"gemma3": "gemma3", "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl"}
_UNUSED, _MERGED = "\u00ff", "\u00f5\u00f6"
_EARLY = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_TOWER = ("vision_tower.", "multi_modal_projector.", "model.vision_model.", "model.connector.", "visual.")


def write_seeing(checkpoint: Path, family: str, *, seed: int = 1) -> Path:
    """Write a tiny checkpoint of which a pair of files says the same."""
    changes: Json = {}
    if family == "gemma3":  # files have one layer without a window after each five
        text = tiny_gemma_vls.CONFIGS["gemma3"]["text_config"]
        changes["text_config"] = {**text, "layer_types": ["sliding_attention"] * text["num_hidden_layers"]}
    return write_vlm(checkpoint, family, seed=seed, **changes)


def write_pair(
    checkpoint: Path,
    folder: Path,
    *,
    decoder: str = "F32",
    tower: str = "F32",
    clip: Json | None = None,
    without: str = "",
    early: bool = False,
) -> Path:
    """Write the two files, and round the checkpoint's tower to what its file holds.

    Args:
        checkpoint: of ``write_vlm``.
        folder: where ``model.gguf`` and ``mmproj-model.gguf`` go.
        decoder: GGML's type of the decoder's matrices.
        tower: GGML's type of the tower's.
        clip: values of keys of the tower without ``clip.``, set last; None leaves a key out.
        without: the stored name of a tensor of the tower that is left out.
        early: name the two layers of the tower's feed-forward networks as early converters did, and write
            what theirs of Qwen2-VL had: no size of these, and a table of positions that nothing reads.

    Returns:
        The decoder's file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    weights = {
        _published(name): weight for name, weight in load_file(checkpoint / "model.safetensors").items()
    }
    seen = {name: weight for name, weight in weights.items() if name.startswith(_TOWER)}
    changed = {without: ""} if without else _EARLY if early else {}
    keys = {**_tower_keys(config, checkpoint), **(clip or {})}
    if early and config["model_type"] == "qwen2_vl":
        keys |= {"vision.feed_forward_length": 0, "has_qwen2vl_merger": True}
    written = _write_tower(keys, seen, folder / "mmproj-model.gguf", tower, changed)
    text = {name: weight for name, weight in weights.items() if name not in seen}
    written |= _write_decoder(config, checkpoint, text, folder / "model.gguf", decoder)
    save_file(written, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.gguf"


def _published(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def _tower_keys(config: Json, checkpoint: Path) -> Json:
    """Return the metadata of the tower, without ``clip.``."""
    vision, family = config["vision_config"], config["model_type"]
    processor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    qwen = family.startswith("qwen")
    keys: Json = {
        "has_vision_encoder": True,
        "projector_type": TYPES[family],
        "vision.projection_dim": config.get("text_config", config)["hidden_size"],
        "vision.image_size": vision.get("image_size", 560),
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "vision.feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),
        "vision.block_count": vision["depth" if qwen else "num_hidden_layers"],
        "vision.attention.head_count": vision["num_heads" if qwen else "num_attention_heads"],
        "vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "vision.image_mean": processor.get("image_mean", CLIP_MEAN),
        "vision.image_std": processor.get("image_std", CLIP_STD),
    }
    if qwen:  # limits that a user sets; the converter writes none
        size = processor.get("size", {})
        keys["vision.image_min_pixels"] = processor.get("min_pixels", size.get("shortest_edge"))
        keys["vision.image_max_pixels"] = processor.get("max_pixels", size.get("longest_edge"))
        if family == "qwen2_5_vl":
            keys |= {"use_silu": True, "vision.window_size": vision["window_size"]}
            keys["vision.n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
        return keys
    keys |= {"use_gelu": True, "vision.projector.scale_factor": config.get("scale_factor", 2)}
    if family != "gemma3":
        keys["vision.preproc_image_size"] = processor["size"]["longest_edge"]
    return keys


def _write_tower(keys: Json, weights: Weights, path: Path, kind: str, changed: Mapping[str, str]) -> Weights:
    """Write the tower; ``changed`` are other names of parts of stored names, empty for a tensor left out."""
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in keys.items():
        set_value(writer, f"clip.{key}", value)
    names, held = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8), Weights()
    for name, weight in weights.items():
        parts = []
        for source, array in _tower_parts(name, weight):
            stem, dot, suffix = source.replace("_weight", ".weight").rpartition(".")
            target = "v.patch_embd.weight.1" if suffix == "1" else f"{names.get_name(stem)}{dot}{suffix}"
            target = next(
                (target.replace(old, new) if new else "" for old, new in changed.items() if old in target),
                target,
            )
            parts.append(_add(writer, target, array, kind))
        held[name] = np.stack(parts, 2) if weight.ndim == 5 else np.concatenate(parts)
        if "soft_emb_norm" in name:
            held[name] = held[name] - np.float32(1)
    if keys.get("has_qwen2vl_merger"):
        _add(writer, "v.position_embd.weight", np.zeros((10, 10), np.float32), "F32")
    _finish(writer)
    return held


def _tower_parts(name: str, weight: npt.NDArray[np.float32]) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """Return the tensors that the converter makes of one, under the names that it looks up."""
    if ".qkv." in name:
        return [
            (name.replace("qkv", part), rows) for part, rows in zip("qkv", np.split(weight, 3), strict=True)
        ]
    if weight.ndim == 5:
        return [(name, weight[:, :, 0]), (name.removesuffix("weight") + "1", weight[:, :, 1])]
    return [(name, weight + 1 if "soft_emb_norm" in name else weight)]


def _write_decoder(config: Json, checkpoint: Path, weights: Weights, path: Path, kind: str) -> Weights:
    text, family = {**config, **config.get("text_config", {})}, config["model_type"]
    name = _DECODERS.get(family, "llama")
    layers, heads, keys = text["num_hidden_layers"], text["num_attention_heads"], text["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, name)
    size = text.get("head_dim", text["hidden_size"] // heads)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    rope = text.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", text.get("rope_theta", 1e6)))
    if name == "gemma3":
        writer.add_sliding_window(text["sliding_window"])
    if name == "qwen2vl":
        sections = {**(text.get("rope_scaling") or {}), **rope}["mrope_section"]
        writer.add_rope_dimension_sections([*sections, 0])
    _write_tokenizer(writer, checkpoint)
    names = gguf.get_tensor_name_map(
        next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name), layers
    )
    held = Weights()
    for stored, weight in weights.items():
        plain = stored.replace("language_model.model.", "model.").replace("text_model.", "")
        if name == "gemma3" and plain.startswith("lm_head"):
            continue
        target = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert target is not None, stored
        shift = np.float32(name == "gemma3" and plain.endswith("norm.weight"))
        turned = {"q_proj": heads, "k_proj": keys}.get(plain.split(".")[-2], 0) if name == "llama" else 0
        rows = _turned(weight, turned, -1) if turned else weight + shift
        floats = _add(writer, target, rows, kind if weight.ndim == 2 else "F32")
        held[stored] = _turned(floats, turned, 1) if turned else floats - shift
    _finish(writer)
    return held


def _turned(weight: npt.NDArray[np.float32], heads: int, way: int) -> npt.NDArray[np.float32]:
    """Order rows of heads for a rope that rotates adjacent elements (-1), or back (1)."""
    parts = (heads, 2, -1) if way < 0 else (heads, -1, 2)
    swapped = weight.reshape(*parts, *weight.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(swapped.reshape(weight.shape))


def _write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    numbers = {
        **content["model"]["vocab"],
        **{each["content"]: each["id"] for each in content["added_tokens"]},
    }
    # A file without merges is none, and these bytes are in no text: the last two become one token.
    tokens = [_MERGED if token == _UNUSED else token for token in sorted(numbers, key=numbers.__getitem__)]
    added = {each["content"] for each in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in added else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(_MERGED)])
    writer.add_add_bos_token(False)
    for key, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        add(numbers[settings[f"{key}_token"]])
    writer.add_chat_template(settings["chat_template"])


def _add(
    writer: gguf.GGUFWriter, name: str, array: npt.NDArray[np.float32], kind: str
) -> npt.NDArray[np.float32]:
    """Write a tensor; return its floats as the file holds them."""
    blocks = kind not in ("F32", "F16", "BF16")
    plain = array.ndim == 1 or (blocks and (array.ndim != 2 or array.shape[-1] % 32 or "position" in name))
    qtype = GGMLQuantizationType["F32" if plain else kind]
    data = quantize(np.ascontiguousarray(array, np.float32), qtype)
    if name:
        writer.add_tensor(name, data, raw_dtype=qtype)
    return gguf.quants.dequantize(data, qtype).reshape(array.shape).astype(np.float32)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
